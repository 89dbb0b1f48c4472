//! Which store a command line names, and how it is reached.

use super::*;

#[test]
fn etcd_over_tls_with_a_user() {
    let etcd = etcd_of(run(&[
        "--etcd-endpoints=https://a:2379,https://[::1]:2379,https://c/",
        "--etcd-cafile=/ca",
        "--etcd-certfile=/cert",
        "--etcd-keyfile=/key",
        "--etcd-username=u",
        "--etcd-password=p",
        "--etcd-prefix=/own/",
    ]));
    assert_eq!(etcd.endpoints, ["https://a:2379", "https://[::1]:2379", "https://c/"]);
    assert_eq!(etcd.prefix, "/own");
    assert_eq!(etcd.ca_file, Some(PathBuf::from("/ca")));
    let certificate = etcd.client_certificate.unwrap();
    assert_eq!(certificate.certificate_file, PathBuf::from("/cert"));
    assert_eq!(certificate.key_file, PathBuf::from("/key"));
    let credentials = etcd.credentials.unwrap();
    assert_eq!((credentials.username.as_str(), credentials.password.0.as_str()), ("u", "p"));

    let ca_only = etcd_of(run(&["--etcd-endpoints=https://a:2379", "--etcd-cafile=/ca"]));
    assert!(ca_only.ca_file.is_some() && ca_only.client_certificate.is_none());
}

#[test]
fn an_endpoint_without_a_scheme_is_plain_http() {
    let etcd = etcd_of(run(&["--etcd-endpoints=127.0.0.1:2379,a,[::1]:2379"]));
    assert_eq!(etcd.endpoints, ["http://127.0.0.1:2379", "http://a", "http://[::1]:2379"]);
    for value in ["\"a:2379\"", "--etcd-cafile"] {
        assert_refused(&["--etcd-endpoints=a:2379", "--etcd-cafile=/ca"], value);
    }
    let (message, _) = refused(&["--etcd-endpoints=root:hunter2@a:2379"], &[]);
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn prefixes_are_cleaned_as_flanneld_s_keys() {
    for (text, prefix) in [
        ("/coreos.com/network", "/coreos.com/network"),
        ("/a/", "/a"),
        ("//a///b/./c/../d//", "/a/b/d"),
        ("a/b/", "a/b"),
        ("/", ""),
        ("/../a", "/a"),
    ] {
        assert_eq!(etcd_of(run(&["--etcd-prefix", text])).prefix, prefix, "{text}");
    }
    assert_refused(&["--etcd-prefix="], "--etcd-prefix");
    assert_refused(&["--etcd-prefix=."], "--etcd-prefix");
}

#[test]
fn etcd_options_that_need_each_other() {
    let tls = "--etcd-endpoints=https://a:2379";
    assert_refused(&[tls, "--etcd-certfile=/c"], "--etcd-certfile needs --etcd-keyfile");
    assert_refused(&[tls, "--etcd-keyfile=/k"], "--etcd-keyfile needs --etcd-certfile");
    assert_refused(&["--etcd-username=u"], "--etcd-username needs --etcd-password");
    assert_refused(&["--etcd-password=p"], "--etcd-password needs --etcd-username");
    assert_refused(&["--etcd-cafile=/ca"], "https://");
    let mixed = "--etcd-endpoints=https://a:1,http://b:1";
    for value in ["\"http://b:1\"", "--etcd-certfile"] {
        assert_refused(&[mixed, "--etcd-certfile=/c", "--etcd-keyfile=/k"], value);
    }
}

#[test]
fn endpoints_are_http_urls() {
    for text in [
        "",
        "127.0.0.1:x",
        "127.0.0.1:2379/path",
        "unix:///run/etcd",
        "ftp://a:1",
        "http://",
        "http://:2379",
        "http://a:2379,",
        " http://a:2379",
        "http://a:99999",
        "http://a:0",
        "http://a:x",
        "http://a:",
        "http://a:1/path",
        "http://a:1?q",
        "https://[::1:2379",
        "http://a b:1",
    ] {
        assert_refused(&["--etcd-endpoints", text], "--etcd-endpoints");
    }
    let (message, _) = refused(&["--etcd-endpoints=https://root:hunter2@a:2379"], &[]);
    assert!(!message.contains("hunter2") && message.contains("--etcd-username"), "{message}");
}

#[test]
fn the_password_is_never_shown() {
    let words = ["--etcd-username=root", "--etcd-password=hunter2"];
    let options = run(&words);
    let line = options.log_line();
    assert!(!line.contains('\n'), "{line}");
    let given = ": --etcd-password=*** --etcd-username=root; `weft config`";
    assert!(line.contains(given), "{line}");
    for shown in [line, format!("{options:?}"), format!("{:?}", outcome(&words, &[]))] {
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    let forged = run(&["--iface=x\nI1123 all is well"]).log_line();
    assert!(!forged.contains('\n'), "{forged}");
    let orphan = refused(&[], &[("FLANNELD_ETCD_PASSWORD", "hunter2")]).0;
    assert!(!orphan.contains("hunter2"), "{orphan}");
}

#[test]
fn the_local_store_excludes_etcd() {
    let options = run(&["--local-store=/var/lib/weft"]);
    assert!(
        matches!(options.store, StoreOptions::Local(path) if path.as_os_str() == "/var/lib/weft")
    );
    assert_refused(&["--local-store="], "--local-store");
    for (flag, value) in [
        ("--etcd-endpoints", "http://a:1"),
        ("--etcd-prefix", "/p"),
        ("--etcd-cafile", "/ca"),
        ("--etcd-password", "p"),
    ] {
        assert_refused(&["--local-store=/d", flag, value], flag);
    }
    let (message, _) = refused(&["--local-store=/d"], &[("FLANNELD_ETCD_ENDPOINTS", "http://a:1")]);
    assert!(message.contains("--local-store"), "{message}");
}

#[test]
fn kubernetes_excludes_other_stores_and_warns() {
    let node = [("NODE_NAME", "n1")];
    let run = |words: &[&str]| run_with(&[&["--kube-subnet-mgr"], words].concat(), &node);
    let (options, warnings) = run(&["--kube-api-url=https://k:6443/c/1", "--kubeconfig-file=/k"]);
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(!options.start_from_cache, "goes by a cache of leases");
    let StoreOptions::Kube(kube) = options.store else { panic!("another store") };
    assert_eq!(kube.api_url.as_deref(), Some("https://k:6443/c/1"));
    assert!(kube.clear_network_unavailable && !kube.wait_for_ever);
    for word in [
        "--etcd-endpoints=http://a:1",
        "--etcd-password=p",
        "--subnet-lease-renew-margin=9",
        "--start-from-cache=true",
    ] {
        let (_, warnings) = run(&[word]);
        let flag = word.split('=').next().unwrap();
        assert!(warnings.len() == 1 && warnings[0].starts_with(flag), "{warnings:?}");
    }
    for (word, shown) in [
        ("--local-store=/d", "--local-store"),
        ("--kube-api-url=ftp://k", "--kube-api-url"),
        ("--kube-api-url=https://u:secret@k", "--kube-api-url"),
        ("--kube-annotation-prefix=a/b/c", "--kube-annotation-prefix"),
    ] {
        let (message, _) = refused(&["--kube-subnet-mgr", word], &node);
        assert!(message.contains(shown) && !message.contains("secret"), "{message}");
    }
    let (message, _) = refused(&["--kube-subnet-mgr"], &[]);
    for variable in ["NODE_NAME", "POD_NAME", "POD_NAMESPACE"] {
        assert!(message.contains(variable), "{message}");
    }
}

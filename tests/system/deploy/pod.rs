//! The DaemonSet's own arguments and ConfigMap, in the sandbox of its pod, against a server that
//! speaks the API of Kubernetes.

use std::net::TcpListener;
use std::time::Duration;

use crate::deploy::manifest::{arguments, objects};
use crate::deploy::sandbox::{CAPABILITIES, of_the_pod, process_status};
use crate::deploy::text;
use crate::support::kube_api::{KubeApi, node};
use crate::support::lab::{Lab, Process, SubnetEnv, UNDERLAY, WEFTD, wait_until};
use crate::support::status::Status;

const SOON: Duration = Duration::from_secs(20);

#[test]
fn manifest_arguments_start_weftd_in_pod_sandbox() {
    let (files, lab, sandbox) = (tempfile::tempdir().unwrap(), Lab::two_hosts(), of_the_pod());
    let (dir, host) = (files.path(), &lab.hosts[0]);
    let objects = objects(&text("kubernetes/weft.yml"));
    let net_conf = objects["ConfigMap kube-flannel-cfg"]["data"]["net-conf.json"].as_str();
    std::fs::write(dir.join("net-conf.json"), net_conf.unwrap()).unwrap();
    let api = KubeApi::serve(host.enter(|| TcpListener::bind((UNDERLAY[0], 6443)).unwrap()));
    api.put_node(&node("worker", Some("10.244.3.0/24")));
    // What the pod mounts is below the test's directory, and the API is found without an account.
    let mut argv = vec![
        WEFTD.to_owned(),
        format!("--kube-api-url=http://{}:6443", UNDERLAY[0]),
        format!("--net-config-path={}", dir.join("net-conf.json").display()),
        format!("--subnet-file={}", dir.join("subnet.env").display()),
        format!("--iface={}", UNDERLAY[0]),
    ];
    argv.extend(arguments(&objects));
    let argv: Vec<_> = argv.iter().map(String::as_str).collect();
    let mut command = sandbox.command(&argv);
    command.env("NODE_NAME", "worker").env("XTABLES_LOCKFILE", dir.join("xtables.lock"));
    let mut daemon = sandbox.inside(host, || Process::start(&mut command, "weftd, in its pod"));
    let lease = SubnetEnv::wait(&dir.join("subnet.env"), &mut daemon);
    assert_eq!((lease.subnet.as_str(), lease.mtu_bytes), ("10.244.3.1/24", 1450));
    wait_until(SOON, "the network works and its rules are in place", || {
        Status::try_of(dir).is_some_and(|Status(status)| {
            status["ready"] == true && status["rules"]["in_place"] == true
        })
    });
    wait_until(SOON, "the Node is written", || {
        api.node("worker")["status"]["conditions"].to_string().contains("FlannelIsUp")
    });
    let rules = host.exec(&["iptables-save", "-t", "nat"]);
    assert!(rules.contains("-A FLANNEL-POSTRTG -s 10.244.3.0/24 -d 10.244.0.0/16"), "{rules}");
    host.exec(&["ip", "link", "show", "flannel.1"]);
    let pid = daemon.pid().as_raw_nonzero().get();
    let shown = |name| process_status(pid, name);
    assert_eq!([shown("CapEff"), shown("CapBnd")], [CAPABILITIES; 2], "capabilities of the pod");
    assert_eq!([shown("Seccomp"), shown("NoNewPrivs")], ["2", "1"]);
    let log = daemon.output();
    assert!(!log.contains("not permitted") && !log.contains("Read-only"), "{log}");
}

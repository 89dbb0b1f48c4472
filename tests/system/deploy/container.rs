//! The container file: a linter's findings, whether its sources are complete, and whether the names
//! that it makes work. No image is built: that needs a registry.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::deploy::manifest::objects;
use crate::deploy::{deploy, text, tool};

/// What is copied from the repository, into both stages.
fn copied() -> Vec<String> {
    let file = text("container/Dockerfile");
    let lines = file.lines().filter_map(|line| line.strip_prefix("COPY "));
    let lines = lines.filter(|line| !line.starts_with("--from"));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.flat_map(|words| words[..words.len() - 1].to_vec()).map(str::to_owned).collect()
}

#[test]
fn a_linter_finds_nothing_wrong() {
    let output = Command::new(tool("hadolint"))
        .arg(deploy("container/Dockerfile"))
        .output()
        .expect("hadolint is fetched by scripts/setup --test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn what_is_copied_is_enough_for_cargo() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let stage = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for source in copied().iter().filter(|source| !source.starts_with("deploy/")) {
        assert!(root.join(source).exists(), "the container file copies {source}");
        let status = Command::new("cp").arg("-r").arg(root.join(source)).arg(stage.path()).status();
        assert!(status.unwrap().success());
        seen += 1;
    }
    assert!(seen >= 6, "only {seen} sources are copied");
    // Each target of Cargo.toml has its file, and the lock file fits.
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--locked", "--offline", "--format-version=1"])
        .current_dir(stage.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Nothing that the programs include lies outside.
    let includes = Command::new("grep")
        .args(["-rnE", r#"include_(str|bytes)!\("(\.\./)*(README|deploy|tests|scripts)"#, "src"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(includes.stdout.is_empty(), "{}", String::from_utf8_lossy(&includes.stdout));
}

#[test]
fn the_build_context_holds_what_is_copied() {
    let ignore = text("container/Dockerfile.dockerignore");
    let kept: Vec<_> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for source in copied() {
        let there = kept.iter().any(|kept| {
            *kept == source
                || kept.strip_prefix(source.as_str()).is_some_and(|rest| rest.starts_with('/'))
        });
        assert!(there, "{source} is copied, and the ignore file leaves it out");
    }
}

#[test]
fn the_names_that_flannels_manifests_start_work() {
    let layout = tempfile::tempdir().unwrap();
    let bin = layout.path().join("opt/bin");
    let file = text("container/Dockerfile").replace("\\\n", "");
    for line in file.lines().filter_map(|line| line.strip_prefix("COPY ")) {
        let words: Vec<_> = line.split_whitespace().collect();
        let source = match words[words.len() - 2] {
            "/weft/target/release/weftd" => env!("CARGO_BIN_EXE_weftd").into(),
            "/weft/target/release/weft" => env!("CARGO_BIN_EXE_weft").into(),
            "/weft/target/release/weft-cni" => env!("CARGO_BIN_EXE_weft-cni").into(),
            "deploy/mk-docker-opts.sh" => deploy("mk-docker-opts.sh"),
            _ => continue,
        };
        let place = layout.path().join(words[words.len() - 1].trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        symlink(source, place).unwrap();
    }
    let links = file.lines().find_map(|line| line.strip_prefix("RUN mkdir -p /opt/bin")).unwrap();
    fs::create_dir_all(&bin).unwrap();
    for link in links.split("&& ln").map(str::trim).filter(|link| !link.is_empty()) {
        let words: Vec<_> = link.split_whitespace().collect();
        let ["-s", target, name] = words[..] else { panic!("{link}") };
        symlink(target, layout.path().join(name.trim_start_matches('/'))).unwrap();
    }
    let script = Command::new(bin.join("mk-docker-opts.sh")).arg("-h").output().unwrap();
    assert!(String::from_utf8_lossy(&script.stderr).contains("usage: mk-docker"), "{script:?}");
    let version = Command::new(bin.join("flanneld")).arg("--version").output().unwrap();
    assert!(version.status.success() && !version.stderr.is_empty(), "{version:?}");
    // The plugin, as the runtime asks it before all else.
    let plugin = layout.path().join("opt/cni/bin/flannel");
    let installed = Command::new(layout.path().join("usr/bin/weft"))
        .arg("install-cni")
        .arg(&plugin)
        .output()
        .unwrap();
    assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    let told = Command::new(&plugin).env("CNI_COMMAND", "VERSION").output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert!(told["supportedVersions"].as_array().unwrap().contains(&json!("0.3.1")), "{told}");
    // The two files that the DaemonSet's containers put on a node.
    let data = objects(&text("kubernetes/weft.yml"))["ConfigMap kube-flannel-cfg"]["data"].clone();
    for (key, place) in
        [("cni-conf.json", "cni/10-flannel.conflist"), ("seccomp.json", "kubelet/weft/weftd.json")]
    {
        let (source, place) = (layout.path().join(key), layout.path().join(place));
        fs::write(&source, data[key].as_str().unwrap()).unwrap();
        let copied = Command::new(bin.join("install-conf")).args([&source, &place]).output();
        let copied = copied.unwrap();
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        assert_eq!(fs::read(&source).unwrap(), fs::read(&place).unwrap());
    }
}

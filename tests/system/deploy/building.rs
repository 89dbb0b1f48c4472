//! `.cargo/protoc`, the stand-in for protoc that builds ask: whether it answers as protoc does, and
//! what it does with files that it does not know.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const FILES: [&str; 2] = ["etcd.fds", "etcd.sums"];

fn stand_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(".cargo")
}

/// Where cargo keeps the sources of the etcd-client that `Cargo.lock` names.
fn etcd_client() -> PathBuf {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version=1"])
        // The sources of other systems' crates need not be here.
        .args(["--filter-platform", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut packages = metadata["packages"].as_array().unwrap().iter();
    let package = packages.find(|package| package["name"] == "etcd-client").unwrap();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    manifest.parent().unwrap().to_owned()
}

#[test]
fn the_recorded_answer_is_protocs() {
    let (place, sources) = (tempfile::tempdir().unwrap(), etcd_client());
    let script = place.path().join("protoc");
    fs::copy(stand_in().join("protoc"), &script).unwrap();
    let output = Command::new(&script).arg("--record").arg(&sources).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in FILES {
        let (kept, made) = (stand_in().join(name), place.path().join(name));
        assert!(
            fs::read(kept).unwrap() == fs::read(made).unwrap(),
            "{name} is old: .cargo/protoc --record {}",
            sources.display()
        );
    }
}

#[test]
fn known_files_need_no_protoc_and_others_do() {
    let place = tempfile::tempdir().unwrap();
    let tools = place.path().join("bin");
    fs::create_dir(&tools).unwrap();
    for name in ["sh", "cp", "dirname", "sha256sum"] {
        symlink(Path::new("/bin").join(name), tools.join(name)).unwrap();
    }
    let answer = place.path().join("answer");
    let ask = |directory: &Path| {
        // As prost-build does.
        Command::new(stand_in().join("protoc"))
            .args(["--include_imports", "--include_source_info", "-o"])
            .arg(&answer)
            .args(["-I", "proto", "proto/etcd/api/mvccpb/kv.proto"])
            .current_dir(directory)
            .env("PATH", &tools)
            .output()
            .unwrap()
    };
    let known = ask(&etcd_client());
    assert!(known.status.success(), "{}", String::from_utf8_lossy(&known.stderr));
    assert_eq!(fs::read(&answer).unwrap(), fs::read(stand_in().join("etcd.fds")).unwrap());

    let changed = place.path().join("changed");
    let copied = Command::new("cp").arg("-r").arg(etcd_client()).arg(&changed).status();
    assert!(copied.unwrap().success());
    let file = changed.join("proto/etcd/api/mvccpb/kv.proto");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text + "\nmessage Another {}\n").unwrap();
    fs::remove_file(&answer).unwrap();
    let refused = ask(&changed);
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && !answer.exists(), "an old answer for new files");
    assert!(complaint.contains("no protoc is installed"), "{complaint}");
}

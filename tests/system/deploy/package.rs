//! The Debian package, made of the programs under test, in a system that systemd has booted: what
//! `scripts/release-installed.sh` asks of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::deploy::booted::{boot, prepare};

/// Makes a package of this version from the programs under test.
fn package(files: &Path, version: &str) -> PathBuf {
    let made = Command::new("bash")
        .args(["-euc", MAKE_PACKAGE, "bash"])
        .args([env!("CARGO_MANIFEST_DIR"), env!("CARGO_BIN_EXE_weftd"), env!("CARGO_BIN_EXE_weft")])
        .arg(env!("CARGO_BIN_EXE_weft-cni"))
        .arg(files)
        .env("PACKAGE_VERSION", version)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    PathBuf::from(String::from_utf8(made.stdout).unwrap().trim())
}

/// As scripts/release does, but for the compression.
const MAKE_PACKAGE: &str = r#"
source "$1/scripts/common.sh"
source "$REPO/scripts/release-build.sh"
source "$REPO/scripts/release-package.sh"
export WEFT_PACKAGE_COMPRESSION=none SOURCE_DATE_EPOCH=1700000000
work=$(mktemp -d "$5/package-XXXXXX")
mkdir "$work/bin"
objcopy --strip-all "$2" "$work/bin/weftd"
objcopy --strip-all "$3" "$work/bin/weft"
objcopy --strip-all "$4" "$work/bin/weft-cni"
build_words "$work/bin" "$work/words"
install_tree "$work/bin" "$work/words" "$work/tree"
debian_package "$work/tree" amd64 'nobody <nobody@localhost>' "$5"
rm -r "$work"
"#;

#[test]
fn the_package_upgrades_under_traffic_and_leaves_nothing() {
    let files = tempfile::tempdir().unwrap();
    let probe = "#!/bin/bash\nexec >/out/answers 2>&1\n\
                 /weft/installed /weft/old.deb /weft/new.deb\necho == end\n";
    prepare(files.path(), probe);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/release-installed.sh");
    fs::copy(script, files.path().join("installed")).unwrap();
    fs::rename(package(files.path(), "0.1.0"), files.path().join("old.deb")).unwrap();
    fs::rename(package(files.path(), "0.1.0+next"), files.path().join("new.deb")).unwrap();
    let answers = boot(&files, Vec::new());
    assert!(answers.contains("== all is well\n"), "{answers}");
    println!("{answers}");
}

//! Which files the control plane may write once it serves (landlock(7)). It runs as root in most
//! places and reads what a store sends: whoever takes it over should not get at the rest of the
//! host by way of a file. Reading is left alone: certificates, tokens and the firewall's programs
//! lie anywhere.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};

use super::RightsError;

/// What weftd writes besides: devices and settings of the network. Nothing more of `/dev`, `/proc`,
/// `/run` and `/sys`: root's disks are there, programs that the kernel runs, and what others obey.
const OF_THE_SYSTEM: [&str; 3] = ["/dev/net/tun", "/dev/null", "/proc/sys/net"];

/// Leaves the calling thread, and what it starts from now on, the right to write `own` files and
/// below directories, and what is the system's only. Those have to be there, and what is made again
/// under their name is not the same. False where the kernel has no Landlock.
pub(crate) fn write_below(own: &[PathBuf]) -> Result<bool, RightsError> {
    // To write, make, remove and rename. Later versions limit ioctl, which TUN devices need.
    let writes = AccessFs::from_write(ABI::V3);
    let places = OF_THE_SYSTEM.iter().map(Path::new).chain(own.iter().map(PathBuf::as_path));
    let status = Ruleset::default()
        .handle_access(writes)
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rules(path_beneath_rules(places, writes)))
        .and_then(|rules| rules.restrict_self())
        .map_err(RightsError::Files)?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn other_files_cannot_be_touched_any_more() {
        let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (ours, theirs) = (ours.path().to_owned(), theirs.path().to_owned());
        fs::write(theirs.join("kept"), "kept").unwrap();
        let (own, other) = (ours.clone(), theirs.clone());
        let restrict = move || {
            super::super::keep_for_control().unwrap();
            let has_landlock = write_below(std::slice::from_ref(&own)).unwrap();
            assert!(has_landlock, "this test needs a kernel with Landlock: lsm=landlock,...");
            fs::write(own.join("file"), "1").unwrap();
            fs::rename(own.join("file"), own.join("renamed")).unwrap();
            fs::create_dir(own.join("directory")).unwrap();
            fs::rename(own.join("renamed"), own.join("directory/moved")).unwrap();
            fs::remove_dir_all(own.join("directory")).unwrap();
            fs::write("/dev/null", "1").unwrap();
            assert_eq!(fs::read(other.join("kept")).unwrap(), b"kept", "reading is left alone");
            let kept = other.join("kept");
            let is_refused = |error: std::io::Error| error.raw_os_error() == Some(libc::EACCES);
            assert!(fs::write(&kept, "2").is_err_and(is_refused));
            assert!(fs::write(other.join("new"), "2").is_err_and(is_refused));
            assert!(fs::remove_file(&kept).is_err_and(is_refused));
            assert!(fs::rename(&kept, other.join("x")).is_err_and(is_refused));
            assert!(fs::rename(&kept, own.join("x")).is_err_and(is_refused));
            assert!(fs::create_dir(other.join("new")).is_err_and(is_refused));
            assert!(std::os::unix::fs::symlink("x", other.join("new")).is_err_and(is_refused));
            let touched = Command::new("touch").arg(other.join("new")).output().unwrap();
            assert!(!touched.status.success(), "a program that it starts may");
            let thread = std::thread::spawn(move || fs::write(other.join("new"), "2"));
            assert!(thread.join().unwrap().is_err_and(is_refused), "a thread that it starts may");
        };
        std::thread::spawn(restrict).join().unwrap();
        fs::write(theirs.join("kept"), "another thread may").unwrap();
        fs::remove_dir_all(ours).unwrap();
        fs::remove_dir_all(theirs).unwrap();
    }
}

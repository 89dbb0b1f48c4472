//! Which files the control plane may write once it serves (landlock(7)). It runs as root in most
//! places and reads what a store sends: whoever takes it over should not get at the rest of the
//! host by way of a file. Reading is left alone: certificates, tokens and the firewall's programs
//! lie anywhere.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, BitFlags, PathBeneath, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    RulesetError, RulesetStatus,
};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;

use super::RightsError;

/// What weftd writes besides: devices and settings of the network. Nothing more of `/dev`, `/proc`,
/// `/run` and `/sys`: root's disks are there, programs that the kernel runs, and what others obey.
const OF_THE_SYSTEM: [&str; 3] = ["/dev/net/tun", "/dev/null", "/proc/sys/net"];

/// To write, make, remove and rename. Later versions limit ioctl, which TUN devices need.
const VERSION: ABI = ABI::V3;

/// Files, and directories with all that is below them, as they are now: what is made again under
/// the same name is another one.
///
/// They stay open, because /proc forgets directories that nobody has open, and makes others.
#[derive(Debug)]
pub(crate) struct Writable(Vec<OwnedFd>);

/// A place that is not there to be written.
pub(crate) type Missing = (PathBuf, Errno);

impl Writable {
    /// What the system has for weftd, and `own`; and those of `own` that can't be opened.
    pub(crate) fn open(own: &[PathBuf]) -> (Self, Vec<Missing>) {
        let open = |path: &Path| open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let mut places: Vec<_> =
            OF_THE_SYSTEM.iter().flat_map(|path| open(Path::new(path))).collect();
        let mut missing = Vec::new();
        for path in own {
            match open(path) {
                Ok(place) => places.push(place),
                Err(errno) => missing.push((path.clone(), errno)),
            }
        }
        (Self(places), missing)
    }

    /// That these may be written, and nothing else. Asks each place what it is.
    pub(crate) fn only(&self) -> Result<Only, RightsError> {
        let rules = self
            .0
            .iter()
            .map(|place| Ok::<_, RulesetError>(PathBeneath::new(place.as_fd(), writes_to(place))));
        Ruleset::default()
            .handle_access(AccessFs::from_write(VERSION))
            .and_then(Ruleset::create)
            .and_then(|ruleset| ruleset.add_rules(rules))
            .map(Only)
            .map_err(RightsError::Files)
    }
}

/// What a thread may write.
#[derive(Debug)]
pub(crate) struct Only(RulesetCreated);

impl Only {
    /// Leaves the calling thread, and what it starts from now on, these rights. False where the
    /// kernel has no Landlock.
    pub(crate) fn limit(self) -> Result<bool, RightsError> {
        let status = self.0.restrict_self().map_err(RightsError::Files)?;
        Ok(status.ruleset != RulesetStatus::NotEnforced)
    }
}

/// A file has no others below it.
fn writes_to(place: &OwnedFd) -> BitFlags<AccessFs> {
    let is_directory = fstat(place)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Directory);
    let all = AccessFs::from_write(VERSION);
    if is_directory { all } else { all & AccessFs::from_file(VERSION) }
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
            let absent = own.join("absent");
            let (writable, missing) = Writable::open(&[own.clone(), absent.clone()]);
            assert_eq!(missing, [(absent, Errno::NOENT)], "nobody is told");
            let has_landlock = writable.only().unwrap().limit().unwrap();
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

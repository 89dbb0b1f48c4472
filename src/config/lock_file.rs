//! Lock files: flock(2) on a file that only root and this user may open, so that nobody else can
//! hold the lock. The kernel gives a lock back when its holder dies.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Mode of a lock file. flock(2) needs no more than read access, so nobody else gets any.
const MODE: u32 = 0o600;

/// The file can be replaced between opening and locking only by somebody who removes lock files.
const OPEN_ATTEMPTS_MAX: u32 = 16;

/// A locked file. Dropping it gives the lock back at once, although closing the file might not: a
/// child process between fork(2) and execve(2) has the descriptor as well.
#[derive(Debug)]
pub struct LockFile {
    file: File,
    /// Whether the process that has the duplicate has the lock: dropping this one only closes the
    /// file.
    pub is_left: bool,
}

impl LockFile {
    fn new(file: File) -> Self {
        Self { file, is_left: false }
    }

    /// Goes on with the lock on the file at `path`, which another process has handed over; `None`
    /// if `file` is another one, or somebody else has its lock by now.
    pub fn inherit(file: OwnedFd, path: &Path) -> Option<Self> {
        let file = File::from(file);
        let is_ours = is_still_at(&file, path) && file.try_lock().is_ok();
        is_ours.then(|| Self::new(file))
    }

    /// The same lock, for another process: it lasts until one of the two gives it back, or both
    /// have ended.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// Locks the file again if the process that was to go on with the lock has given it back; false
    /// if somebody else has it.
    pub fn lock_again(&self) -> io::Result<bool> {
        is_free(self.file.try_lock())
    }

    /// Whether the file at `path` is another one by now, or none: then this lock guards nothing.
    /// Not if that cannot be seen.
    pub fn is_replaced(&self, path: &Path) -> bool {
        match fs::symlink_metadata(path) {
            Ok(_) => !is_still_at(&self.file, path),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Makes `content` what the file says, for whoever finds it locked.
    pub fn write(&self, content: &[u8]) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(content, 0)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if !self.is_left
            && let Err(error) = self.file.unlock()
        {
            tracing::debug!("cannot unlock a file that is about to be closed: {error}");
        }
    }
}

/// Locks the file at `path`, which is made if need be. Never waits; `None` if another process has
/// the lock.
///
/// A file that other users can open, as earlier versions left them, is replaced by a new one once
/// nobody has its lock: somebody may have it open already, and could lock it at any time. Where the
/// file system gives all files the same owner or mode, there is no more private file than that.
pub fn try_lock(path: &Path) -> io::Result<Option<LockFile>> {
    for _ in 0..OPEN_ATTEMPTS_MAX {
        let file = open(path)?;
        if !is_free(file.try_lock())? {
            return Ok(None);
        }
        // Somebody may have removed the file meanwhile: then this lock guards nothing.
        if !is_still_at(&file, path) {
            continue;
        }
        if is_private(access(&file.metadata()?), || made_beside(path)) {
            return Ok(Some(LockFile::new(file)));
        }
        fs::remove_file(path)?;
    }
    Err(io::Error::other("it is removed again and again"))
}

/// Whether nobody else had the lock.
fn is_free(locked: Result<(), TryLockError>) -> io::Result<bool> {
    match locked {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(MODE)
        // The directory may be one where others can write: a planted link must not be followed.
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
}

/// Who may open a file: its owner and its mode.
type Access = (u32, u32);

fn access(status: &Metadata) -> Access {
    (status.uid(), status.mode() & 0o777)
}

/// Whether only root and this user may open the file, or it is as any that is `made` there: a
/// server takes root for nobody, or the file system knows no modes.
fn is_private((owner, mode): Access, made: impl FnOnce() -> Option<Access>) -> bool {
    let is_trusted = owner == 0 || owner == rustix::process::geteuid().as_raw();
    mode & !MODE == 0 && is_trusted || made() == Some((owner, mode))
}

/// What becomes of a new file beside `path` with the mode of lock files.
fn made_beside(path: &Path) -> Option<Access> {
    let path = path.with_file_name(format!(".weft.{:016x}", fastrand::u64(..)));
    let file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&path).ok()?;
    fs::remove_file(&path).ok();
    file.metadata().ok().as_ref().map(access)
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn loose_lock_file_becomes_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        drop(try_lock(&path).unwrap().unwrap());
        assert_eq!(mode(&path), 0o600);
        for loose in [0o644, 0o604, 0o660] {
            set_mode(&path, loose);
            let file = try_lock(&path).unwrap().unwrap();
            assert_eq!(mode(&path), 0o600, "a file of mode {loose:o} stays as it is");
            assert!(is_still_at(&file.file, &path));
            assert!(try_lock(&path).unwrap().is_none(), "locked twice");
        }
    }

    #[test]
    fn a_file_system_without_owners_or_modes_is_taken_as_it_is() {
        let own_user = rustix::process::geteuid().as_raw();
        let (ours, squashed) = ((own_user, 0o600), (65_534, 0o600));
        for fixed in [squashed, (own_user, 0o755), (1000, 0o777)] {
            assert!(is_private(fixed, || Some(fixed)), "{fixed:?}: never locked");
            assert!(!is_private(fixed, || Some(ours)), "{fixed:?}: of somebody else");
            assert!(!is_private(fixed, || None), "{fixed:?}");
        }
        assert!(!is_private((65_534, 0o644), || Some(squashed)));
        assert!(is_private(ours, || panic!("it needs no other file")));
        let directory = tempfile::tempdir().unwrap();
        let found = made_beside(&directory.path().join("lock"));
        assert_eq!(found, Some(ours));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "a file is left");
    }

    #[test]
    fn a_lock_ends_with_its_holder_although_a_child_has_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let lock = try_lock(&path).unwrap().unwrap();
        let inherited = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(try_lock(&path).unwrap().is_some(), "the lock outlives its holder");
        drop(inherited);
    }

    #[test]
    fn a_lock_goes_from_one_holder_to_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut first = try_lock(&path).unwrap().unwrap();
        let handed = || first.duplicate().unwrap();
        assert!(LockFile::inherit(handed(), &directory.path().join("other")).is_none());
        assert!(try_lock(&path).unwrap().is_none(), "refusing it gave it back");
        let second = LockFile::inherit(handed(), &path).unwrap();
        assert!(try_lock(&path).unwrap().is_none());
        // The second fails: the first has it again, unless somebody else was faster.
        drop(second);
        assert!(first.lock_again().unwrap());
        let second = LockFile::inherit(handed(), &path).unwrap();
        first.is_left = true;
        drop(first);
        assert!(try_lock(&path).unwrap().is_none(), "the first one took it along");
        drop(second);
        let third = try_lock(&path).unwrap().unwrap();
        assert!(!LockFile::new(open(&path).unwrap()).lock_again().unwrap(), "locked twice");
        drop(third);
    }

    #[test]
    fn a_lock_on_a_loose_file_counts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let file = File::create(&path).unwrap();
        set_mode(&path, 0o644);
        file.lock().unwrap();
        assert!(try_lock(&path).unwrap().is_none(), "the lock of another daemon is ignored");
        assert_eq!(mode(&path), 0o644, "the file of another daemon was replaced");
    }

    #[test]
    fn lock_on_removed_file_does_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let file = open(&path).unwrap();
        assert!(is_still_at(&file, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_still_at(&file, &path));
        let other = open(&path).unwrap();
        assert!(!is_still_at(&file, &path));
        assert!(is_still_at(&other, &path));
    }
}

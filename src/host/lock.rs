//! One daemon per subnet file: a lock file beside it, locked for the life of the process.
//! The kernel's flock(2) decides; the pid inside is for the other daemon's error message.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::config::lock_file::{self, LockFile};
use crate::config::whole_file::{self, FileError, failed};

/// What is appended to the subnet file's name.
const SUFFIX: &str = ".lock";

/// A holder writes its pid microseconds after it took the lock. Until then it is read again: this
/// often, this far apart.
const HOLDER_ATTEMPTS_MAX: u32 = 10;
const HOLDER_ATTEMPT_INTERVAL: Duration = Duration::from_millis(20);

/// The lock of one subnet file. Released when dropped or when the process dies.
#[derive(Debug)]
pub struct DaemonLock {
    file: LockFile,
    path: PathBuf,
}

/// Why this process may not run with its subnet file.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon runs with it.
    #[error(
        "{} already uses the subnet file {} (lock file {}); stop it, or give this one another \
         --subnet-file",
        describe(*pid), subnet_file.display(), path.display()
    )]
    Taken {
        /// The subnet file both want.
        subnet_file: PathBuf,
        /// The lock file.
        path: PathBuf,
        /// The other daemon, if it said so; a number of its own pid namespace.
        pid: Option<i32>,
    },
    /// The lock file cannot be made or locked.
    #[error("{0}; --subnet-file must be in a writable directory")]
    Unusable(#[from] FileError),
    /// The path has no file name.
    #[error("--subnet-file {} names no file", .0.display())]
    NoFileName(PathBuf),
}

fn describe(pid: Option<i32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("the process with pid {pid}"))
}

impl DaemonLock {
    /// Takes the lock that belongs to `subnet_file`, which need not exist; its directory is made.
    /// Never waits for another holder.
    pub fn acquire(subnet_file: &Path) -> Result<Self, LockError> {
        let path = lock_path(subnet_file)?;
        whole_file::make_directory(whole_file::directory_of(&path))?;
        let locked = lock_file::try_lock(&path).map_err(|error| failed("lock", &path, error))?;
        let file = locked.ok_or_else(|| taken(subnet_file, &path))?;
        let lock = Self { file, path };
        lock.write_pid();
        Ok(lock)
    }

    /// Goes on with the lock of a daemon that hands over; `None` if it is that of another subnet
    /// file.
    pub fn inherit(file: OwnedFd, subnet_file: &Path) -> Option<Self> {
        let path = lock_path(subnet_file).ok()?;
        let lock = Self { file: LockFile::inherit(file, &path)?, path };
        lock.write_pid();
        Some(lock)
    }

    /// The same lock, for the daemon that is to go on with it.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.file.duplicate()
    }

    /// The daemon that was to go on with it did not.
    pub fn come_back(&self, subnet_file: &Path) -> Result<(), LockError> {
        let path = &self.path;
        match self.file.lock_again() {
            Ok(true) => {
                self.write_pid();
                Ok(())
            }
            Ok(false) => Err(taken(subnet_file, path)),
            Err(error) => Err(failed("lock", path, error).into()),
        }
    }

    /// Gives the lock back, as the holder's last act, and leaves no file. Whoever had opened it
    /// finds that it is gone, and makes another.
    pub fn remove(self) -> Result<(), LockError> {
        Ok(fs::remove_file(&self.path).map_err(|error| failed("remove", &self.path, error))?)
    }

    /// Leaves the lock to the daemon that has its duplicate.
    pub fn leave(mut self) {
        self.file.is_left = true;
    }

    /// A lock without it, as on a full disk, counts all the same: dropping one that was handed over
    /// would take it from the process that has handed it over, too.
    fn write_pid(&self) {
        let pid = format!("{}\n", std::process::id());
        if let Err(error) = self.file.write(pid.as_bytes()) {
            tracing::debug!("cannot write the pid to {}: {error}", self.path.display());
        }
    }
}

impl Drop for DaemonLock {
    /// Empties the file, so that no stale pid is read. The file itself stays: were it removed,
    /// another daemon could lock a new one of that name while this one still ends. One that is left
    /// to another daemon says that one's.
    fn drop(&mut self) {
        if !self.file.is_left
            && let Err(error) = self.file.write(b"")
        {
            tracing::debug!("cannot empty {}: {error}", self.path.display());
        }
    }
}

/// The lock file that belongs to `subnet_file`; it stays when weftd ends.
pub fn lock_path(subnet_file: &Path) -> Result<PathBuf, LockError> {
    match subnet_file.file_name() {
        Some(_) => Ok(whole_file::with_suffix(subnet_file, SUFFIX)),
        None => Err(LockError::NoFileName(subnet_file.to_owned())),
    }
}

/// The pid in a lock file whose holder lives.
fn holder(path: &Path) -> Option<i32> {
    for attempt in 0..HOLDER_ATTEMPTS_MAX {
        if attempt > 0 {
            std::thread::sleep(HOLDER_ATTEMPT_INTERVAL);
        }
        let text = fs::read_to_string(path).unwrap_or_default();
        let pid = text.trim_end().parse().ok().filter(|pid: &i32| *pid > 0).and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|pid| test_kill_process(*pid) != Err(Errno::SRCH)) {
            return Some(pid.as_raw_pid());
        }
    }
    None
}

fn taken(subnet_file: &Path, path: &Path) -> LockError {
    let pid = holder(path);
    LockError::Taken { subnet_file: subnet_file.to_owned(), path: path.to_owned(), pid }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, Permissions};
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn second_daemon_learns_the_first_ones_pid() {
        let directory = tempfile::tempdir().unwrap();
        let subnet_file = directory.path().join("flannel/subnet.env");
        let first = DaemonLock::acquire(&subnet_file).unwrap();

        let error = DaemonLock::acquire(&subnet_file).unwrap_err();

        let text = error.to_string();
        assert!(text.contains(&format!("pid {}", std::process::id())), "{text}");
        assert!(text.contains("subnet.env"), "{text}");
        drop(first);
        assert!(DaemonLock::acquire(&subnet_file).is_ok());
    }

    #[test]
    fn subnet_files_have_separate_locks() {
        let directory = tempfile::tempdir().unwrap();
        let _first = DaemonLock::acquire(&directory.path().join("a.env")).unwrap();
        assert!(DaemonLock::acquire(&directory.path().join("b.env")).is_ok());
    }

    #[test]
    fn stale_lock_file_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let subnet_file = directory.path().join("subnet.env");
        for content in [&b"1\n"[..], b"not a pid", b"\xff\xfe", &[b'9'; 4096]] {
            fs::write(directory.path().join("subnet.env.lock"), content).unwrap();
            let lock = DaemonLock::acquire(&subnet_file).unwrap();
            let text = fs::read_to_string(&lock.path).unwrap();
            assert_eq!(text, format!("{}\n", std::process::id()));
        }
    }

    #[test]
    fn holder_without_pid_keeps_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("subnet.env.lock");
        let file = File::create(&path).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let error = DaemonLock::acquire(&directory.path().join("subnet.env")).unwrap_err();
        assert!(matches!(error, LockError::Taken { pid: None, .. }), "{error}");
        assert!(error.to_string().starts_with("another process"), "{error}");
    }

    #[test]
    fn a_lock_counts_though_the_pid_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let subnet_file = directory.path().join("subnet.env");
        let path = directory.path().join("subnet.env.lock");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        // Not open for writing.
        let first = File::open(&path).unwrap();
        first.try_lock().unwrap();
        let handed = first.try_clone().unwrap();
        let inherited = DaemonLock::inherit(handed.into(), &subnet_file);
        assert!(DaemonLock::acquire(&subnet_file).is_err(), "the first one's lock was given back");
        assert!(inherited.is_some());
    }

    #[test]
    fn dead_holder_frees_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let subnet_file = directory.path().join("subnet.env");
        let path = directory.path().join("subnet.env.lock");
        let mut holder = std::process::Command::new("flock")
            .args(["--exclusive", "--no-fork"])
            .arg(&path)
            .args(["sh", "-c", "echo held; exec sleep 60"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 5];
        holder.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        assert!(DaemonLock::acquire(&subnet_file).is_err());
        holder.kill().unwrap();
        holder.wait().unwrap();

        let lock = DaemonLock::acquire(&subnet_file);
        assert!(lock.is_ok(), "{lock:?}");
    }

    #[test]
    fn one_of_many_contenders_wins() {
        let directory = tempfile::tempdir().unwrap();
        let subnet_file = directory.path().join("subnet.env");
        let start = std::sync::Barrier::new(8);
        let contend = || {
            start.wait();
            DaemonLock::acquire(&subnet_file)
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(contend)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            if let LockError::Taken { pid: None, .. } = error {
                // The holder had no processor in time to say who it is. By now it has said so.
                let again = DaemonLock::acquire(&subnet_file).unwrap_err();
                assert!(matches!(again, LockError::Taken { pid: Some(_), .. }), "{again}");
            } else {
                assert!(matches!(error, LockError::Taken { .. }), "{error}");
            }
        }
    }

    #[test]
    fn symlink_and_nameless_path_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("target");
        std::os::unix::fs::symlink(&target, directory.path().join("subnet.env.lock")).unwrap();
        let error = DaemonLock::acquire(&directory.path().join("subnet.env")).unwrap_err();
        assert!(matches!(error, LockError::Unusable(_)), "{error}");
        assert!(!target.exists());
        assert!(matches!(DaemonLock::acquire(Path::new("/")), Err(LockError::NoFileName(_))));
    }
}

//! The files of a local store: one lock, atomic writes, bounded reads. Every function here
//! blocks; `local` calls them on threads that may.
//!
//! Writers hold `DIR/.lock` from the read that they base a write on until the write is durable.
//! Readers take no lock: a rename shows them the old file or the new one, never a part.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::fs::Mode;
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::debug;

use crate::config::lock_file::{self, LockFile};
use crate::config::network::CONFIG_BYTES_MAX;
use crate::config::whole_file::{self, FileError, failed};
use crate::control::clock;
use crate::control::error::{StoreError, StoreResult};
use crate::control::lease::{Lease, Lifetime, VALUE_BYTES_MAX};
use crate::control::own_thread::on_own_thread;
use crate::control::rejected::{RejectReason, Rejected};
use crate::control::snapshot::Snapshot;
use crate::failure::{lock, with_causes};
use crate::route::Prefixes;

/// How long a writer waits for the lock. Holding it takes one listing and two fsyncs, 50 ms on a
/// slow disk; a hundred daemons that start at once queue for 5 s then.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);
/// Pause between two tries for the lock; short against a write, long against a system call.
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// How long the directory is waited for: beyond any wait for the lock. Where its server is away
/// (NFS), calls hang until that is back.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Calls at a time, so that those that hang do not gather.
const CALLS_MAX: usize = 4;

/// A temporary file of this age has no writer any more: far beyond any wait for a disk.
const LEFTOVER_AGE: Duration = Duration::from_secs(600);

/// Mode of a lease's file: others may read it.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// Version of a file that has no readable content, such as one that is too long.
const UNREADABLE: i64 = -1;

/// The directory's layout.
#[derive(Clone)]
pub(super) struct Files {
    root: PathBuf,
    calls: Arc<Semaphore>,
    /// The leases that were last listed, in the order of their keys.
    known: Arc<Mutex<Vec<Arc<Lease>>>>,
    /// Which directory was last listed, by device and inode.
    listed: Arc<Mutex<Option<(u64, u64)>>>,
    /// How often this process gave the right to write back.
    writes: Arc<AtomicU64>,
}

/// The right to write, until dropped.
pub(super) struct Locked<'a> {
    files: &'a Files,
    _lock: LockFile,
}

impl Files {
    pub(super) fn new(root: PathBuf) -> Self {
        let calls = Arc::new(Semaphore::new(CALLS_MAX));
        let (known, listed, writes) = Default::default();
        Self { root, calls, known, listed, writes }
    }

    /// Does `work`, which blocks, on a thread of its own; it may go on after a time-out.
    pub(super) async fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> StoreResult<T> + Send + 'static,
    ) -> StoreResult<T> {
        self.within(ANSWER_MAX, work).await
    }

    pub(super) async fn within<T: Send + 'static>(
        &self,
        answer_max: Duration,
        work: impl FnOnce(&Self) -> StoreResult<T> + Send + 'static,
    ) -> StoreResult<T> {
        let files = self.clone();
        let answer = async {
            let call = Arc::clone(&self.calls).acquire_owned().await;
            on_own_thread(move || (work(&files), call).0).await
        };
        let failed = |detail| StoreError::unavailable("local store", detail);
        match timeout(answer_max, answer).await {
            Ok(answer) => answer.map_err(|error| failed(error.to_string()))?,
            Err(_) => Err(failed(format!(
                "{} has not answered for {} s: if it is of another host, is that there?",
                self.root.display(),
                answer_max.as_secs()
            ))),
        }
    }

    /// How many writes of this process have ended: a listing during which one did may be older.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    pub(super) fn subnets_path(&self) -> PathBuf {
        self.root.join("subnets")
    }

    /// Where nodes claim their addresses.
    pub(super) fn claims_path(&self) -> PathBuf {
        self.root.join("weft/nodes")
    }

    /// Creates what is missing. For the start only: later, a directory that is missing was
    /// unmounted or moved, and an empty one in its place would look like a store without leases.
    pub(super) fn prepare(&self) -> StoreResult<()> {
        let path = self.subnets_path();
        fs::create_dir_all(&path).map_err(|source| failed("create", &path, source))?;
        if let Err(error) = self.sweep(&path) {
            debug!("what was left in {} stays: {error}", path.display());
        }
        Ok(())
    }

    /// Removes what writers have left that were killed. If one writes now, a later start does.
    fn sweep(&self, path: &Path) -> io::Result<()> {
        let Some(_lock) = lock_file::try_lock(&self.root.join(".lock"))? else { return Ok(()) };
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name();
            let of = name.to_str().and_then(whole_file::temporary_of);
            // A link is looked at itself, and is none of ours.
            let status = entry.metadata()?;
            let age = clock::unix_seconds().saturating_sub(status.mtime().max(0).cast_unsigned());
            let is_old = age >= LEFTOVER_AGE.as_secs() && status.is_file();
            if is_old && of.is_some_and(|key| Prefixes::from_key(key).is_some()) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    pub(super) fn read_config(&self) -> StoreResult<Vec<u8>> {
        let path = self.root.join("config");
        let config = whole_file::read(&path, CONFIG_BYTES_MAX as u64)?;
        config.ok_or_else(|| StoreError::NoConfig(path.display().to_string()))
    }

    /// All files below `subnets/`, in the order of their names, so that equal sets compare as
    /// equal. That the directory is another one than before is an error once: what it lacks was
    /// not removed.
    pub(super) fn list(&self) -> StoreResult<Snapshot> {
        let path = self.subnets_path();
        let mut snapshot = Snapshot::default();
        self.check_identity(&path)?;
        let entries = fs::read_dir(&path).map_err(|source| failed("list", &path, source))?;
        for entry in entries {
            let name = entry.map_err(|source| failed("list", &path, source))?.file_name();
            // Temporary files, of this program and of editors, are no leases.
            if !name.as_bytes().starts_with(b".") {
                let entry = self.read_lease(name.as_bytes())?;
                entry.into_iter().for_each(|entry| snapshot.add(entry));
            }
        }
        // What was read after another one took its place is missing.
        self.check_identity(&path)?;
        snapshot.rejected.sort_by(|a, b| a.key.cmp(&b.key));
        snapshot.leases.sort_by(|a, b| a.key.cmp(&b.key));
        let mut known = lock(&self.known);
        for lease in &mut snapshot.leases {
            let at = known.binary_search_by(|known| known.key.cmp(&lease.key));
            lease.share(at.ok().map(|at| &known[at]));
        }
        known.clone_from(&snapshot.leases);
        Ok(snapshot)
    }

    fn check_identity(&self, path: &Path) -> StoreResult<()> {
        let found = fs::metadata(path).map_err(|source| failed("list", path, source))?;
        let found = (found.dev(), found.ino());
        let mut listed = lock(&self.listed);
        if listed.replace(found).is_none_or(|known| known == found) {
            return Ok(());
        }
        let detail = format!("{} was replaced by another directory", path.display());
        Err(StoreError::unavailable("listing the local store", detail))
    }

    /// As `read_entry`, but a lease that has ended counts as gone.
    fn read_lease(&self, name: &[u8]) -> StoreResult<Option<Result<Lease, Rejected>>> {
        let has_ended = |lease: &Lease| {
            let Lifetime::Leased { expires_unix, .. } = lease.lifetime else { return false };
            expires_unix.is_some_and(|ends| ends <= clock::unix_seconds())
        };
        let found = self.read_entry(name)?;
        Ok(found.filter(|found| !found.as_ref().is_ok_and(has_ended)))
    }

    /// One file; `None` if it is gone by now.
    fn read_entry(&self, name: &[u8]) -> StoreResult<Option<Result<Lease, Rejected>>> {
        let path = self.subnets_path().join(std::ffi::OsStr::from_bytes(name));
        let decode = |value: Vec<u8>| Lease::decode(name, &value, fingerprint(&value));
        // One unreadable file says nothing about the others.
        let (reason, error) = match whole_file::read(&path, VALUE_BYTES_MAX as u64) {
            Ok(found) => return Ok(found.map(decode)),
            Err(error) if is_outage(&error) => return Err(error.into()),
            Err(error @ FileError::Refused { .. }) => (RejectReason::TooLarge, error),
            Err(error @ FileError::Io { .. }) => (RejectReason::BadValue, error),
        };
        let (key, detail) = (String::from_utf8_lossy(name).into_owned(), with_causes(&error));
        Ok(Some(Err(Rejected { key, reason, detail, revision: UNREADABLE })))
    }

    pub(super) fn lock(&self) -> StoreResult<Locked<'_>> {
        let path = self.root.join(".lock");
        let deadline = Instant::now() + LOCK_WAIT_MAX;
        loop {
            match lock_file::try_lock(&path) {
                Ok(Some(file)) => return Ok(Locked { files: self, _lock: file }),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOCK_RETRY),
                Ok(None) => {
                    return Err(failed("lock", &path, io::ErrorKind::WouldBlock).into());
                }
                Err(source) => return Err(failed("lock", &path, source).into()),
            }
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.files.writes.fetch_add(1, Ordering::AcqRel);
    }
}

impl Locked<'_> {
    /// The file of `held` has to be as of its revision, and so has the one that it `replaces`;
    /// without one, no other file may have the subnets.
    pub(super) fn expect_unchanged(
        &self,
        held: &Lease,
        replaces: Option<&Lease>,
    ) -> StoreResult<()> {
        let is_unchanged = if held.revision == 0 {
            // What covers it may be another network's; the caller knows its own.
            let takes = |other: &Arc<Lease>| {
                let is_replaced = replaces.is_some_and(|before| before.key == other.key);
                !is_replaced && other.subnets.within(held.subnets).is_some()
            };
            !self.files.list()?.leases.iter().any(takes)
                && self.files.read_lease(held.key.as_bytes())?.is_none()
                && replaces.map_or(Ok(true), |before| self.is_as_of(before))?
        } else {
            self.is_as_of(held)?
        };
        if is_unchanged { Ok(()) } else { Err(StoreError::Conflict(held.key.clone())) }
    }

    /// Removes the files of leases that have ended and had one of these subnets: their owners must
    /// not find them again.
    pub(super) fn remove_ended(&self, subnets: Prefixes) -> StoreResult<()> {
        let path = self.files.subnets_path();
        for entry in fs::read_dir(&path).map_err(|source| failed("list", &path, source))? {
            let name = entry.map_err(|source| failed("list", &path, source))?.file_name();
            let key = name
                .to_str()
                .filter(|key| Prefixes::from_key(key).is_some_and(|found| found.overlaps(subnets)));
            if let Some(key) = key
                && self.files.read_entry(key.as_bytes())?.is_some_and(|found| found.is_ok())
                && self.files.read_lease(key.as_bytes())?.is_none()
            {
                self.remove(key)?;
            }
        }
        Ok(())
    }

    /// Whether the file of `held` is as of its revision, if its lease has ended as well.
    fn is_as_of(&self, held: &Lease) -> StoreResult<bool> {
        let found = self.files.read_entry(held.key.as_bytes())?;
        Ok(found.is_some_and(|found| {
            found.map_or_else(|it| it.revision, |lease| lease.revision) == held.revision
        }))
    }

    /// Replaces the file, durably, and returns its version. `key` has been parsed or is
    /// a subnet's own spelling, so it names no other directory.
    pub(super) fn write(&self, key: &str, value: &[u8]) -> StoreResult<i64> {
        whole_file::write_shared(&self.files.subnets_path().join(key), value, FILE_MODE)?;
        Ok(fingerprint(value))
    }

    pub(super) fn remove(&self, key: &str) -> StoreResult<()> {
        let path = self.files.subnets_path().join(key);
        match fs::remove_file(&path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(failed("remove", &path, source).into()),
        }
    }
}

/// Whether this process or host is short of something, or the file system's server is away, which
/// says nothing of the file.
fn is_outage(error: &FileError) -> bool {
    let FileError::Io { source, .. } = error else { return false };
    let errno = Errno::from_io_error(source);
    let is_short = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM));
    let no_server = [Errno::STALE, Errno::NOTCONN, Errno::TIMEDOUT, Errno::HOSTDOWN];
    is_short || errno.is_some_and(|errno| no_server.contains(&errno))
}

/// A file's content as version: two writers that compare it cannot both win under the lock, and
/// equal content is the same lease with the same end. Only compared within one process, so it may
/// differ between builds.
fn fingerprint(value: &[u8]) -> i64 {
    // A hasher without a random key, so that a second look computes the same.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_directory_that_hangs_is_an_outage_and_takes_few_threads() {
        let files = Files::new(PathBuf::from("/nonexistent"));
        let (hangs, is_back) = std::sync::mpsc::channel::<()>();
        let is_back = Arc::new(Mutex::new(is_back));
        let begun = Arc::new(AtomicU64::new(0));
        for _ in 0..2 * CALLS_MAX {
            let (is_back, begun) = (Arc::clone(&is_back), Arc::clone(&begun));
            let hang = move |_: &Files| {
                begun.fetch_add(1, Ordering::Relaxed);
                is_back.lock().unwrap().recv().unwrap_err();
                Ok(())
            };
            let error = files.within(Duration::from_millis(20), hang).await.unwrap_err();
            assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
        }
        assert!(begun.load(Ordering::Relaxed) <= CALLS_MAX as u64);
        drop(hangs);
        files.apart(|_| Ok(())).await.expect("it answers again");
    }

    #[test]
    fn what_the_host_lacks_is_no_fault_of_a_lease() {
        let error = |errno: Errno| FileError::Io {
            operation: "open",
            path: PathBuf::from("10.5.1.0-24"),
            source: errno.into(),
        };
        let outages = [
            [Errno::MFILE, Errno::NFILE, Errno::NOMEM].as_slice(),
            &[Errno::STALE, Errno::NOTCONN, Errno::TIMEDOUT, Errno::HOSTDOWN],
        ];
        assert!(outages.concat().into_iter().all(|errno| is_outage(&error(errno))));
        assert!(![Errno::IO, Errno::ACCESS].into_iter().any(|errno| is_outage(&error(errno))));
    }
}

//! The local store: `DIR/config` and one file per lease in `DIR/subnets`, with the keys and
//! values of etcd. Several daemons, people and scripts may use one directory at once.
//!
//! A lease's file says when it ends in an extra key, `"Expires":"2026-11-21T08:30:00Z"`, which
//! flannel's readers ignore; a file without it is a reservation. The end is wall-clock time,
//! because other programs, and other boots, must be able to read it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::local_claim::FileClaims;
use super::local_files::{ANSWER_MAX, Files};
use crate::config::whole_file::failed;
use crate::control::clock;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::Phase;
use crate::control::lease::{Lease, Lifetime};
use crate::control::snapshot::{Change, Granted, Snapshot, Vacancy};

/// Between two readings of the directory: a peer's new address takes as long. The kernel's reports
/// of changes (inotify) would bring those of this host sooner, and those of other hosts never.
const READ_PERIOD: Duration = Duration::from_secs(1);
/// What each lease adds to that: a hundred times what it takes to read it, so that ten thousand of
/// them cost a hundredth of a processor.
const READ_PAUSE_PER_LEASE: Duration = Duration::from_micros(500);

/// How long a start waits for the directory before it goes on without, as it does without etcd.
const OPEN_MAX: Duration = Duration::from_secs(1);

/// A directory of leases.
pub struct LocalStore {
    files: Files,
    pub(super) claims: FileClaims,
    /// Whether what was missing in the directory is there.
    is_prepared: AtomicBool,
}

/// Changes of the directory, each as a whole snapshot.
pub(super) struct LocalWatch {
    files: Files,
    /// When the directory is read next.
    due: Instant,
    /// What was shown last, and after how many writes of this process.
    last: Option<(u64, Snapshot)>,
}

impl LocalStore {
    /// Opens `directory` and creates what is missing: when the configuration is read, if the
    /// directory does not answer now.
    pub async fn open(directory: PathBuf) -> StoreResult<Self> {
        let store = Self::new(directory);
        match store.prepare(OPEN_MAX).await {
            Ok(()) | Err(StoreError::Unavailable { .. }) => Ok(store),
            Err(error) => Err(error),
        }
    }

    fn new(directory: PathBuf) -> Self {
        let files = Files::new(directory);
        Self { claims: FileClaims::new(&files), files, is_prepared: AtomicBool::new(false) }
    }

    async fn prepare(&self, answer_max: Duration) -> StoreResult<()> {
        if !self.is_prepared.load(Ordering::Relaxed) {
            self.files.within(answer_max, Files::prepare).await?;
            self.is_prepared.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    pub(super) async fn config(&self) -> StoreResult<Vec<u8>> {
        self.prepare(ANSWER_MAX).await?;
        self.files.apart(Files::read_config).await
    }

    pub(super) async fn list(&self) -> StoreResult<Snapshot> {
        self.files.apart(Files::list).await
    }

    pub(super) async fn write(
        &self,
        lease: &Lease,
        ttl: Duration,
        _phase: Phase,
    ) -> StoreResult<Granted> {
        self.put(lease.clone(), None, ttl).await
    }

    pub(super) async fn create(
        &self,
        lease: &Lease,
        vacancy: &Vacancy,
        ttl: Duration,
        _phase: Phase,
    ) -> StoreResult<Granted> {
        self.put(vacancy.entry(lease), vacancy.replaces.clone(), ttl).await
    }

    /// Writes `lease`, and then removes the entry that it `replaces`: whoever reads in between sees
    /// this node twice, and never without a subnet.
    async fn put(
        &self,
        lease: Lease,
        replaces: Option<Lease>,
        ttl: Duration,
    ) -> StoreResult<Granted> {
        let write = move |files: &Files| {
            let locked = files.lock()?;
            locked.expect_unchanged(&lease, replaces.as_ref())?;
            let ttl = (lease.lifetime != Lifetime::Reservation).then_some(ttl);
            let expires = ttl.map(|ttl| clock::boot_time() + ttl);
            // Whole seconds, rounded up: the file must not end before the lease does for its owner.
            let ends = |ttl: Duration| clock::unix_seconds().saturating_add(ttl.as_secs() + 1);
            let expires_unix = ttl.map(ends);
            let value = lease.attributes.to_json_until(expires_unix)?;
            if lease.revision == 0 {
                locked.remove_ended(lease.subnets)?;
            }
            let revision = locked.write(&lease.key, &value)?;
            if let Some(before) = &replaces {
                locked.remove(&before.key)?;
            }
            let lifetime = Lifetime::until(expires_unix);
            Ok(Granted { lease: Lease { revision, lifetime, ..lease }, expires })
        };
        self.files.apart(write).await
    }

    pub(super) async fn delete(&self, held: &Lease) -> StoreResult<()> {
        let held = held.clone();
        let delete = move |files: &Files| {
            let locked = files.lock()?;
            locked.expect_unchanged(&held, None)?;
            locked.remove(&held.key)
        };
        self.files.apart(delete).await
    }

    pub(super) async fn watch(&self) -> StoreResult<LocalWatch> {
        let look = |files: &Files| {
            let path = files.subnets_path();
            Ok(path.metadata().map_err(|source| failed("watch", &path, source)).map(drop)?)
        };
        self.files.apart(look).await?;
        Ok(LocalWatch { files: self.files.clone(), due: Instant::now(), last: None })
    }
}

impl LocalWatch {
    pub(super) async fn next(&mut self) -> StoreResult<Vec<Change>> {
        loop {
            sleep_until(self.due).await;
            let writes = self.files.writes();
            let snapshot = self.files.apart(Files::list).await?;
            if self.files.writes() != writes {
                // Our own last write was answered meanwhile: what was read before it would look as
                // if somebody had replaced it.
                continue;
            }
            let leases = u32::try_from(snapshot.leases.len()).unwrap_or(u32::MAX);
            self.due = Instant::now() + READ_PERIOD + READ_PAUSE_PER_LEASE * leases;
            // After a write of ours the same is news: what we wrote is gone again.
            if self.last.as_ref().map(|(then, last)| (then, last)) != Some((&writes, &snapshot)) {
                let before = self.last.replace((writes, snapshot.clone()));
                // Live comes last: what vanished before the first reading was not watched.
                let live = before.is_none().then_some(Change::Live { revision: 0 });
                return Ok([Change::Everything(snapshot)].into_iter().chain(live).collect());
            }
        }
    }
}

#[cfg(test)]
mod tests;

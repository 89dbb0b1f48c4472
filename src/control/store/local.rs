//! The local store: `DIR/config` and one file per lease in `DIR/subnets`, with the keys and
//! values of etcd. Several daemons, people and scripts may use one directory at once.
//!
//! A lease's file says when it ends in an extra key, `"Expires":"2026-11-21T08:30:00Z"`, which
//! flannel's readers ignore; a file without it is a reservation. The end is wall-clock time,
//! because other programs, and other boots, must be able to read it.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use futures_util::{FutureExt, StreamExt};
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::local_claim::{self, FileClaims};
use super::local_files::{Files, Listing, Locked, failed};
use crate::control::clock;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::{NodeIdentity, Phase};
use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
use crate::control::snapshot::{Change, Granted, Snapshot};
use crate::failure::LogOnce;
use crate::route::Prefix;

/// How long after a change the directory is read: a burst of writes becomes one reading, and
/// nobody notices a twentieth of a second.
const SETTLE: Duration = Duration::from_millis(50);
/// How often the directory is read while the kernel reports no changes of it: a peer's new address
/// takes as long, and 10,000 leases a hundredth of a processor.
const UNWATCHED_PERIOD: Duration = Duration::from_secs(5);
/// Longest sleep towards the end of a lease: the wall clock may be set meanwhile.
const EXPIRY_CHECK_MAX: Duration = Duration::from_secs(60);
/// Room for one batch of inotify events: about 60 of our names.
const EVENT_BUFFER_BYTES: usize = 4096;

/// Most events taken before one reading: as many as the kernel queues (`max_queued_events`), so
/// that a busy writer cannot put the reading off for ever.
const QUEUED_EVENTS_MAX: usize = 16_384;

/// A directory of leases.
pub struct LocalStore {
    files: Files,
    /// Nobody claims anything without.
    claims: Option<Arc<FileClaims>>,
}

/// Changes of the directory, each as a whole snapshot.
#[derive(Default)]
pub(super) struct LocalWatch {
    files: Files,
    /// Nothing while the kernel has no watch to give.
    events: Option<Events>,
    told: LogOnce,
    live: bool,
    /// Set when the directory has to be read, to the time when it may be.
    due: Option<Instant>,
    next_expiry_unix: Option<u64>,
    last: Option<Snapshot>,
    #[cfg(test)]
    readings: u32,
}

impl LocalStore {
    /// Opens `directory` and creates what is missing.
    pub fn open(directory: PathBuf) -> StoreResult<Self> {
        let files = Files::new(directory);
        files.prepare()?;
        Ok(Self { files, claims: None })
    }

    pub(super) fn claim_as(&mut self, node: NodeIdentity) {
        self.claims = Some(Arc::new(FileClaims::new(node, self.files.claims_path())));
    }

    pub(super) async fn claim(&self, public_ip: Ipv4Addr) -> StoreResult<()> {
        let Some(claims) = self.claims.clone() else { return Ok(()) };
        self.files.apart(move |_| claims.claim(public_ip)).await
    }

    pub(super) async fn config(&self) -> StoreResult<Vec<u8>> {
        self.files.apart(Files::read_config).await
    }

    pub(super) async fn list(&self) -> StoreResult<Snapshot> {
        Ok(self.files.apart(Files::list).await?.snapshot)
    }

    /// Without `ttl` for ever.
    pub(super) async fn create(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
        ttl: Option<Duration>,
        _phase: Phase,
    ) -> StoreResult<Granted> {
        let value = value.clone();
        let create = move |files: &Files| {
            let locked = files.lock()?;
            let key = subnet.key();
            let snapshot = locked.list_and_tidy(&key)?;
            // What covers it may be another network's; the caller knows its own.
            let taken = snapshot.leases.iter().any(|lease| subnet.covers(lease.subnet));
            if taken || locked.revision(&key).is_some() {
                return Err(StoreError::Conflict(key));
            }
            write(&locked, subnet, key, value, ttl)
        };
        self.files.apart(create).await
    }

    pub(super) async fn claimed_by(&self, public_ip: Ipv4Addr) -> StoreResult<Option<String>> {
        let holder = move |files: &Files| local_claim::holder(&files.claims_path(), public_ip);
        self.files.apart(holder).await
    }

    pub(super) async fn update(
        &self,
        lease: &Lease,
        ttl: Duration,
        _phase: Phase,
    ) -> StoreResult<Granted> {
        let lease = lease.clone();
        let update = move |files: &Files| {
            let locked = files.lock()?;
            expect_unchanged(&locked, &lease)?;
            let ttl = (lease.lifetime != Lifetime::Reservation).then_some(ttl);
            write(&locked, lease.subnet, lease.key, lease.attributes, ttl)
        };
        self.files.apart(update).await
    }

    pub(super) async fn delete(&self, held: &Lease) -> StoreResult<()> {
        let held = held.clone();
        let delete = move |files: &Files| {
            let locked = files.lock()?;
            expect_unchanged(&locked, &held)?;
            locked.remove(&held.key)
        };
        self.files.apart(delete).await
    }

    pub(super) async fn watch(&self) -> StoreResult<LocalWatch> {
        let path = self.files.subnets_path();
        path.metadata().map_err(|source| failed("watch", &path, source))?;
        let (files, due) = (self.files.clone(), Some(Instant::now()));
        Ok(LocalWatch { files, due, ..LocalWatch::default() })
    }
}

type Events = EventStream<[u8; EVENT_BUFFER_BYTES]>;

fn open_events(path: &Path) -> io::Result<Events> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CLOSE_WRITE
        | WatchMask::MOVE
        | WatchMask::DELETE
        | WatchMask::ATTRIB
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF;
    inotify.watches().add(path, mask)?;
    inotify.into_event_stream([0; EVENT_BUFFER_BYTES])
}

fn expect_unchanged(locked: &Locked<'_>, held: &Lease) -> StoreResult<()> {
    if locked.revision(&held.key) == Some(held.revision) {
        return Ok(());
    }
    Err(StoreError::Conflict(held.key.clone()))
}

fn write(
    locked: &Locked<'_>,
    subnet: Prefix,
    key: String,
    attributes: LeaseAttributes,
    ttl: Option<Duration>,
) -> StoreResult<Granted> {
    let expires = ttl.map(|ttl| clock::boot_time() + ttl);
    // Whole seconds, rounded up: the file must not end before the lease does for its owner.
    let expires_unix = ttl.map(|ttl| clock::unix_seconds().saturating_add(ttl.as_secs() + 1));
    let revision = locked.write(&key, &attributes.to_json_until(expires_unix)?)?;
    let lifetime = Lifetime::until(expires_unix);
    let lease = Lease { subnet, key, attributes, revision, created_revision: 0, lifetime };
    Ok(Granted { lease, expires })
}

impl LocalWatch {
    pub(super) async fn next(&mut self) -> StoreResult<Vec<Change>> {
        loop {
            if let Some(due) = self.due {
                sleep_until(due).await;
                // Before the reading, so that no change falls between the two.
                self.watch();
                self.drain()?;
                let listing = self.files.apart(Files::list).await?;
                self.due = self.events.is_none().then(|| Instant::now() + UNWATCHED_PERIOD);
                let news = self.news(listing).map(Change::Everything);
                // Live comes last: what vanished before the first reading was not watched.
                let live = !std::mem::replace(&mut self.live, true);
                let live = live.then_some(Change::Live { revision: 0 });
                let events: Vec<_> = news.into_iter().chain(live).collect();
                if !events.is_empty() {
                    return Ok(events);
                }
            }
            if self.due.is_none() {
                self.wait_for_change().await?;
            }
        }
    }

    /// Has the kernel report changes, as soon as it can.
    fn watch(&mut self) {
        if self.events.is_some() {
            return;
        }
        let path = self.files.subnets_path();
        match open_events(&path) {
            Ok(events) => {
                self.events = Some(events);
                if self.told.forget() {
                    info!("Changes of {} are reported again", path.display());
                }
            }
            Err(error) => self.told.once(&error.to_string(), |text| {
                let seconds = UNWATCHED_PERIOD.as_secs();
                warn!(
                    "The kernel reports no changes of {}: {text}; reading it every {seconds} s. If \
                     it has no watch left, raise fs.inotify.max_user_instances and \
                     fs.inotify.max_user_watches",
                    path.display()
                );
            }),
        }
    }

    fn news(&mut self, listing: Listing) -> Option<Snapshot> {
        #[cfg(test)]
        {
            self.readings += 1;
        }
        self.next_expiry_unix = listing.next_expiry_unix;
        let mut snapshot = listing.snapshot;
        // The order of a directory means nothing; sorted, equal sets compare as equal.
        snapshot.leases.sort_by(|a, b| a.key.cmp(&b.key));
        snapshot.rejected.sort_by(|a, b| a.key.cmp(&b.key));
        if self.last.as_ref() == Some(&snapshot) {
            return None;
        }
        self.last = Some(snapshot.clone());
        Some(snapshot)
    }

    async fn wait_for_change(&mut self) -> StoreResult<()> {
        tokio::select! {
            Some(event) = OptionFuture::from(self.events.as_mut().map(StreamExt::next)) => {
                if is_change(event)? {
                    self.due = Some(Instant::now() + SETTLE);
                }
            }
            () = until_expiry(self.next_expiry_unix) => self.due = Some(Instant::now()),
        }
        Ok(())
    }

    /// Takes what is queued: the reading that follows shows it all.
    fn drain(&mut self) -> StoreResult<()> {
        for _ in 0..QUEUED_EVENTS_MAX {
            let event = self.events.as_mut().and_then(|events| events.next().now_or_never());
            let Some(event) = event else { break };
            is_change(event)?;
        }
        Ok(())
    }
}

/// Whether the event may have changed a lease; an error if it ends the watch.
fn is_change(event: Option<io::Result<inotify::EventOwned>>) -> StoreResult<bool> {
    let lost = |detail: &str| StoreError::unavailable("watching the local store", detail);
    match event {
        Some(Ok(event)) if event.mask.contains(EventMask::IGNORED) => {
            Err(lost("its directory was removed, unmounted or replaced"))
        }
        Some(Ok(event)) if event.mask.contains(EventMask::MOVE_SELF) => {
            Err(lost("its directory was renamed"))
        }
        // Temporary files, of this program and of editors, are no leases.
        Some(Ok(event)) => {
            Ok(!event.name.is_some_and(|name| name.as_encoded_bytes().starts_with(b".")))
        }
        Some(Err(error)) => Err(lost(&error.to_string())),
        None => Err(lost("inotify ended")),
    }
}

async fn until_expiry(expires_unix: Option<u64>) {
    let Some(expires) = expires_unix else { return std::future::pending().await };
    loop {
        let left = expires.saturating_sub(clock::unix_seconds());
        if left == 0 {
            return;
        }
        sleep(Duration::from_secs(left).min(EXPIRY_CHECK_MAX)).await;
    }
}

#[cfg(test)]
mod tests;

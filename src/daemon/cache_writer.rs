//! Keeps the cache beside the subnet file up to date: written when peers change, and each hour to
//! refresh its time. A reader never sees a partial file.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use rustix::fs::Mode;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::config::network::NetworkConfig;
use crate::config::options::Options;
use crate::config::whole_file;
use crate::control::cache::{self, Known};
use crate::control::changes::next_change;
use crate::control::own_thread::on_own_thread;
use crate::control::peers::same_ways;
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, lock, with_causes};

/// What is appended to the subnet file's name.
const SUFFIX: &str = ".cache";
/// Mode of the file: other users must neither read nor change the peers.
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
/// Shortest time between two writes: a large cluster that starts, or whose nodes keep changing,
/// costs a few megabytes every few seconds at most.
const PAUSE: Duration = Duration::from_secs(5);
/// Between two tries to write; disks that were full get room in minutes.
const RETRY: Duration = Duration::from_secs(30);
/// How old the file may become while nothing changes: little compared with the day for which
/// it is valid.
const REFRESH_SECONDS: u64 = 60 * 60;

/// How far the lease's end moves before the file is written for that: little compared with a day.
const END_SECONDS: u64 = 60;

/// How long a weftd that hands over waits for its last write: a disk writes a few megabytes in
/// less, and one that hangs must not keep the next weftd waiting, which gives up after 30 s.
const SAVE_MAX: Duration = Duration::from_secs(2);

/// Path of the cache that belongs to this subnet file.
pub(crate) fn cache_path(subnet_file: &Path) -> PathBuf {
    whole_file::with_suffix(subnet_file, SUFFIX)
}

/// The writer of one cache.
#[derive(Debug)]
pub(super) struct CacheWriter {
    path: PathBuf,
    store: String,
    config: NetworkConfig,
    status: Arc<ControlStatus>,
    /// Locked while the file is written; true once it must not be written any more.
    is_closed: Mutex<bool>,
    pause: Duration,
    retry: Duration,
}

impl CacheWriter {
    /// A writer of what the store holds for the network of `config`, if a start may use it.
    pub(super) fn of(
        options: &Options,
        config: &NetworkConfig,
        status: Arc<ControlStatus>,
    ) -> Option<Arc<Self>> {
        let path = cache_path(&options.subnet_file);
        let (store, config) = (options.store.identity(), config.clone());
        let is_closed = Mutex::default();
        let writer = Self { path, store, config, status, is_closed, pause: PAUSE, retry: RETRY };
        options.start_from_cache.then(|| Arc::new(writer))
    }

    /// Writes what is `known` when that is due, for ever.
    pub(super) async fn keep(
        self: Arc<Self>,
        mut known: watch::Receiver<Option<Arc<Known>>>,
    ) -> Infallible {
        let mut written: Option<Arc<Known>> = None;
        let mut failures = LogOnce::default();
        loop {
            let next = known.borrow_and_update().clone();
            if let Some(next) = next.filter(|next| is_due(written.as_deref(), next)) {
                let succeeded = self.write(Arc::clone(&next), &mut failures).await;
                if succeeded {
                    written = Some(next);
                }
                sleep(if succeeded { self.pause } else { self.retry }).await;
            } else {
                next_change(&mut known).await;
            }
        }
    }

    /// Writes what is `known` now, for a weftd that takes over: the last changes may be younger
    /// than the time between two writes. A failure leaves the file as it is.
    pub(super) async fn save(self: &Arc<Self>, known: Arc<Known>) {
        let written = timeout(SAVE_MAX, self.counted(known)).await.map_err(anyhow::Error::from);
        if let Err(error) = written.flatten() {
            let path = self.path.display();
            warn!(
                "the weftd that takes over may find the cache {path} some seconds old: {error:#}"
            );
        }
    }

    /// Whether it was written.
    async fn write(self: &Arc<Self>, known: Arc<Known>, failures: &mut LogOnce) -> bool {
        let result = self.counted(known).await;
        let path = self.path.display();
        match &result {
            Ok(()) if failures.forget() => info!("Wrote the cache {path} again"),
            Ok(()) => debug!("Wrote the cache {path}"),
            Err(error) => failures.once(&with_causes(error.as_ref()), |text| {
                let seconds = self.retry.as_secs();
                warn!(
                    "Failed to write the cache {path}: {text}. A start without the store would use \
                     an older one, or wait; retrying every {seconds} s"
                );
            }),
        }
        result.is_ok()
    }

    async fn counted(self: &Arc<Self>, known: Arc<Known>) -> anyhow::Result<()> {
        let writer = Arc::clone(self);
        // A disk that is out of order can keep a write for seconds; the lease must not wait.
        let written = on_own_thread(move || writer.write_now(&known)).await;
        let result = written.map_err(anyhow::Error::from).flatten();
        let mut state = self.status.edit();
        state.cache.writes += u64::from(result.is_ok());
        state.cache.failures += u64::from(result.is_err());
        result
    }

    /// Removes the file for good: the subnet in it is not ours any more.
    pub(super) fn forget(&self) {
        let mut is_closed = lock(&self.is_closed);
        *is_closed = true;
        let path = &self.path;
        if let Err(error) = std::fs::remove_file(path)
            && error.kind() != ErrorKind::NotFound
        {
            warn!(
                "cannot remove {}: {error}; remove it, because the subnet in it is lost",
                path.display()
            );
        }
    }

    fn write_now(&self, known: &Known) -> anyhow::Result<()> {
        let bytes =
            cache::render(&self.store, &self.config, known).context("the cache cannot be made")?;
        let is_closed = lock(&self.is_closed);
        if !*is_closed {
            whole_file::write(&self.path, &bytes, FILE_MODE)?;
        }
        Ok(())
    }
}

/// Whether `next` is worth a new file.
fn is_due(written: Option<&Known>, next: &Known) -> bool {
    let Some(written) = written else { return true };
    written.own.key != next.own.key
        || written.own.attributes != next.own.attributes
        || written.cluster != next.cluster
        // Small changes of the lease's end come from the clock; a reservation has none.
        || written.ends_unix.unwrap_or(0).abs_diff(next.ends_unix.unwrap_or(0)) >= END_SECONDS
        || !same_ways(&written.peers, &next.peers)
        // Also after the clock was set back.
        || next.as_of_unix.abs_diff(written.as_of_unix) >= REFRESH_SECONDS
}

#[cfg(test)]
#[path = "cache_writer_tests.rs"]
mod tests;

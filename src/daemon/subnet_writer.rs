//! Keeps `subnet.env` true: written at start, again when the overlay's MTU changes, and tried again
//! for as long as the disk refuses. A file that is there stays whole meanwhile.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::backend::status::PlaneState;
use crate::config::subnet_file::SubnetFile;
use crate::config::whole_file::FileError;
use crate::failure::with_causes;

/// Pause between two tries to write the subnet file; disks that were full get room in minutes.
const RETRY: Duration = Duration::from_secs(5);

/// The writer of one subnet file.
pub struct SubnetWriter<'a> {
    path: &'a Path,
    file: SubnetFile,
    is_written: watch::Sender<bool>,
    failures: Arc<AtomicU64>,
}

impl<'a> SubnetWriter<'a> {
    /// Will write `file` to `path`.
    #[must_use]
    pub fn new(path: &'a Path, file: SubnetFile) -> Self {
        Self { path, file, is_written: watch::Sender::new(false), failures: Arc::default() }
    }

    /// Failed tries so far.
    #[must_use]
    pub fn failures(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.failures)
    }

    /// Whether what is on the disk is true, and each change of that.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<bool> {
        self.is_written.subscribe()
    }

    /// The try at start, before anybody is told that the backend runs.
    pub fn write_first(&self) {
        let result = self.file.write(self.path);
        self.count(&result);
        self.tell(&result);
    }

    /// Tries on until the file is written, and writes it again whenever the plane's MTU changes.
    pub async fn keep(mut self, mut plane: watch::Receiver<PlaneState>) -> Infallible {
        loop {
            let mtu_bytes = plane.borrow_and_update().mtu_bytes;
            let is_news = mtu_bytes != self.file.mtu_bytes;
            let is_written = *self.is_written.borrow();
            if is_news || !is_written {
                self.file.mtu_bytes = mtu_bytes;
                self.write_again(is_news || is_written).await;
            }
            let changed = if *self.is_written.borrow() {
                plane.changed().await
            } else {
                timeout(RETRY, plane.changed()).await.unwrap_or(Ok(()))
            };
            if changed.is_err() {
                // The backend was dropped, and so will be this.
                std::future::pending::<()>().await;
            }
        }
    }

    /// A failure is told when it is news; a success always is.
    async fn write_again(&self, tell_failure: bool) {
        let (path, file) = (self.path.to_owned(), self.file);
        // A disk that is out of order can keep a write for seconds; the lease must not wait.
        let Ok(result) = tokio::task::spawn_blocking(move || file.write(&path)).await else {
            self.is_written.send_replace(false);
            return;
        };
        self.count(&result);
        if result.is_ok() || tell_failure {
            self.tell(&result);
        } else {
            self.is_written.send_replace(false);
        }
    }

    fn count(&self, result: &Result<(), FileError>) {
        self.failures.fetch_add(u64::from(result.is_err()), Ordering::Relaxed);
    }

    fn tell(&self, result: &Result<(), FileError>) {
        self.is_written.send_replace(result.is_ok());
        match result {
            Ok(()) => info!("Wrote subnet file to {}", self.path.display()),
            Err(error) => warn!(
                "Failed to write subnet file: {}; trying again every {} s",
                with_causes(error),
                RETRY.as_secs()
            ),
        }
    }
}

//! That this host has another address: connections to a store are bound to the one that they were
//! made from, and would stay silent for as long as their timeouts.

use tokio::sync::watch;

use crate::control::error::StoreError;

/// Counts the moves of this host.
#[derive(Debug, Default)]
pub(super) struct Moves(watch::Sender<u64>);

impl Moves {
    /// The host has moved: what is under way ends, and what is open counts as of before.
    pub(super) fn add(&self) {
        self.0.send_modify(|count| *count += 1);
    }

    /// How often it has moved.
    pub(super) fn count(&self) -> u64 {
        *self.0.borrow()
    }

    /// Waits until it has moved more than `count` times.
    pub(super) async fn beyond(&self, count: u64) {
        // It cannot fail: the sender is here.
        self.0.subscribe().wait_for(|now| *now > count).await.ok();
    }

    /// Carries out `request`, unless the host moves meanwhile.
    pub(super) async fn unless_moved<T>(
        &self,
        operation: &'static str,
        request: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        tokio::select! {
            result = request => result,
            () = self.beyond(self.count()) => Err(moved(operation)),
        }
    }
}

/// The error of what was under way.
pub(super) fn moved(operation: &'static str) -> StoreError {
    StoreError::unavailable(operation, "this host has another address now; connecting from there")
}

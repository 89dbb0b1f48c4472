//! Whether this host got another address during a call to a store. Connections are bound to the one
//! that they were made from, and would stay silent for as long as their timeouts.

use tokio::sync::watch;

use crate::control::error::{StoreError, StoreResult};

/// Of one store.
#[derive(Debug, Default)]
pub(in crate::control) struct Calls {
    /// How often this host has moved.
    moves: watch::Sender<u64>,
}

impl Calls {
    /// The host has moved: what is under way ends, and what is open counts as of before.
    pub(super) fn moved(&self) {
        self.moves.send_modify(|count| *count += 1);
    }

    /// How often it has moved.
    pub(super) fn moves(&self) -> u64 {
        *self.moves.borrow()
    }

    /// Waits until it has moved more than `count` times.
    pub(super) async fn moved_beyond(&self, count: u64) {
        // It cannot fail: the sender is here.
        self.moves.subscribe().wait_for(|now| *now > count).await.ok();
    }

    /// Carries out `request`, unless the host moves meanwhile.
    pub(super) async fn unless_moved<T>(
        &self,
        operation: &'static str,
        request: impl Future<Output = StoreResult<T>>,
    ) -> StoreResult<T> {
        tokio::select! {
            result = request => result,
            () = self.moved_beyond(self.moves()) => Err(moved(operation)),
        }
    }
}

/// The error of what was under way.
pub(super) fn moved(operation: &'static str) -> StoreError {
    StoreError::unavailable(operation, "this host has another address now; connecting from there")
}

//! Changes of what others publish.

use std::future::pending;

use tokio::sync::watch::Receiver;

/// Waits for the next change. Once nobody makes any, because what made them was dropped, it waits
/// for ever: whoever waits here will be dropped as well, or goes on with what is. Cancel-safe.
pub(crate) async fn next_change<T>(published: &mut Receiver<T>) {
    if published.changed().await.is_err() {
        pending().await
    }
}

/// As [`next_change`], and gives what is published now.
pub(crate) async fn next_value<T: Clone>(published: &mut Receiver<T>) -> T {
    next_change(published).await;
    published.borrow_and_update().clone()
}

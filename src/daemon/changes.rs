//! Changes of what others publish.

use std::future::pending;

use tokio::sync::watch;

/// Waits for the next change. Once nobody makes any, because what made them was dropped, it waits
/// for ever: whoever waits here will be dropped as well. Cancel-safe.
pub(super) async fn next_change<T>(published: &mut watch::Receiver<T>) {
    if published.changed().await.is_err() {
        pending().await
    }
}

//! What weftd does about a panic outside its workers: it is logged in one line and counted, the
//! workers go on, and the control plane starts again. No input is known to cause one.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use tracing::error;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// How many there were.
pub(super) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Has each panic logged and counted from here on. Workers handle theirs themselves.
pub(super) fn hook_panics() {
    panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let what = info.to_string().replace('\n', " ");
        error!("Internal error in weftd, please report this line: {what}");
    }));
}

/// What `work` results in, unless it panics.
pub(super) async fn unless_it_panics<T>(work: impl Future<Output = T>) -> Option<T> {
    // What it shares with the outside is behind mutexes, which take poison for no harm, or is
    // handed over in one step.
    AssertUnwindSafe(work).catch_unwind().await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_what_it_happens_in_and_no_more() {
        assert_eq!(unless_it_panics(async { 7 }).await, Some(7));
        assert_eq!(unless_it_panics(async { panic!("on purpose") }).await, None::<()>);
    }
}

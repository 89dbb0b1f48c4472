//! Work that blocks, such as reading and writing files, on a thread of its own.
//!
//! Not on a pool of the runtime: that panics where the host has no thread to give, has new work
//! wait behind work that hangs, and keeps threads that began with more rights.

use std::io;
use std::thread::Builder;

use tokio::sync::oneshot;

/// What the threads are called.
const NAME: &str = "files";

/// Does `work`, which goes on if nobody waits for it any more. An error if the host has no thread
/// to give, or if `work` panicked.
pub async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, done) = oneshot::channel();
    let thread = Builder::new().name(NAME.to_owned()).spawn(move || drop(sender.send(work())));
    thread.map_err(|error| {
        io::Error::new(error.kind(), format!("this host has no thread to give: {error}"))
    })?;
    done.await.map_err(|_panicked| io::Error::other("it panicked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_it_returns_comes_back_and_a_panic_is_an_error() {
        assert_eq!(on_own_thread(|| 7).await.unwrap(), 7);
        on_own_thread(|| panic!("on purpose")).await.unwrap_err();
    }
}

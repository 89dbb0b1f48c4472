//! Work that blocks, such as reading and writing files, on a thread of its own.
//!
//! Not on a pool of the runtime: that panics where the host has no thread to give, has new work
//! wait behind work that hangs, and keeps threads that began with more rights.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread::Builder;

use hyper_util::client::legacy::connect::dns::Name;
use tokio::sync::oneshot;
use tower::Service;

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

/// Looks up names for HTTP so: hyper's own resolver panics where the host has no thread to give.
#[derive(Debug, Clone, Copy)]
pub struct Resolver;

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let look_up = move || (name.as_str(), 0).to_socket_addrs();
        Box::pin(async { on_own_thread(look_up).await.flatten() })
    }
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

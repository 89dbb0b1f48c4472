//! The stop signal: a flag that a busy worker reads every turn, and an eventfd that wakes a
//! sleeping one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// A stop signal, shared between a worker and its owner.
#[derive(Debug, Clone)]
pub struct Stop(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    requested: AtomicBool,
    wake: OwnedFd,
}

impl Stop {
    /// A signal that nobody has given yet.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(Inner { requested: AtomicBool::new(false), wake })))
    }

    /// Gives the signal.
    pub fn request(&self) {
        self.0.requested.store(true, Ordering::Release);
        // The counter can't overflow from here, and the flag alone stops a busy worker.
        rustix::io::write(&self.0.wake, &1u64.to_ne_bytes()).ok();
    }

    /// Whether the signal was given.
    pub fn requested(&self) -> bool {
        self.0.requested.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

//! The descriptors that a service manager passes to a process (sd_listen_fds(3)).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::check;

/// The first of them (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;

/// Takes the first `count` descriptors behind the standard ones, which the process was started
/// with, and has them closed on exec. EBADF if one of them isn't open, EBUSY for a second call.
///
/// To be called before anything else opens a descriptor: what lies in their place then belongs to
/// nobody.
pub fn take(count: u16) -> io::Result<Vec<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    let passed = FIRST..FIRST + RawFd::from(count);
    for descriptor in passed.clone() {
        // SAFETY: F_SETFD takes its argument by value and touches no memory of ours.
        check(unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    // SAFETY: each is open, as fcntl has just said. Nobody else in this process owns it: the caller
    // has opened nothing yet, and no second call comes this far.
    Ok(passed.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) }).collect())
}

//! The only module with unsafe code: one wrapper per kernel interface, one system call each.
//!
//! No policy lives here: no retry, no fallback, no logging. Wrappers take slices and ranges,
//! check them, and return the kernel's answer.
#![allow(
    unsafe_code,
    reason = "system calls that no safe crate wraps; each block says why it holds"
)]

use std::ffi::c_int;
use std::io;

pub mod bpf;
pub mod echo;
pub mod ethtool;
pub mod inherited;
pub mod link;
pub mod memory;
pub mod reuseport;
pub mod ring;
pub mod schedule;
pub mod steering;
pub mod tun;
pub mod tun_io;
pub mod udp;

/// How equal slots lie in an arena: slot `i` is the `slot_bytes` from `i * stride` on.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Distance between the first bytes of two slots.
    pub stride: usize,
}

impl Slots {
    /// Whether the first `count` slots lie apart from each other and within `arena`.
    fn hold(self, arena: &[u8], count: usize) -> bool {
        let last_end = count.saturating_sub(1) * self.stride + self.slot_bytes;
        count == 0 || self.slot_bytes <= self.stride && last_end <= arena.len()
    }
}

/// What the kernel said of one operation: a count, or a negated errno, as io_uring reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Answer(i32);

/// What stands for an answer until the kernel gives it.
const UNANSWERED: Answer = Answer(-libc::EIO);

impl Answer {
    /// The calling thread's errno.
    fn last() -> Self {
        Self(-io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// The count, or the error.
    fn result(self) -> io::Result<usize> {
        usize::try_from(self.0).map_err(|_negative| io::Error::from_raw_os_error(-self.0))
    }
}

/// An empty request to the kernel about the network device `name`.
fn request_for(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is plain old data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// The kernel's answer to a call that returns a count, or nothing but its success.
fn check(result: c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_negative| io::Error::last_os_error())
}

fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

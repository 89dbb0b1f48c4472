//! The only module with unsafe code: one wrapper per kernel interface, one system call each.
//!
//! No policy lives here: no retry, no fallback, no logging. Wrappers take slices and ranges,
//! check them, and return the kernel's answer.
#![allow(
    unsafe_code,
    reason = "system calls that no safe crate wraps; each block says why it holds"
)]

pub mod tun;
pub mod udp;

/// A range of a buffer, by first byte and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

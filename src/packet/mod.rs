//! Views and edits of IPv4, IPv6, TCP, UDP and ICMP bytes: parse, checksum, TTL, error messages.
//!
//! Everything here is a pure function over slices. Bytes from outside are validated once, at the
//! parse; nothing here performs I/O, reads a clock, allocates per packet, or panics on any input.

// What arrives decides what is read here, so nothing may be read that might not be there.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::string_slice, clippy::panic))]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::unwrap_used, clippy::unreachable))]

mod address;
pub mod checksum;
pub mod echo;
pub mod ecn;
pub mod header;
pub mod icmp;
pub mod ipv4;
pub mod ipv6_header;
pub mod limiter;
mod span;
pub mod transport;

pub use address::IpAddress;
pub use header::{Family, Header};
pub use span::Span;

//! Views and edits of IPv4, TCP, UDP and ICMP bytes: parse, checksum, TTL, error messages.
//!
//! Everything here is a pure function over slices. Bytes from outside are judged once, at the
//! parse; nothing here performs I/O, reads a clock, allocates per packet, or panics on any input.

pub mod address;
pub mod checksum;
pub mod echo;
pub mod icmp;
pub mod ipv4;
pub mod limiter;
pub mod transport;

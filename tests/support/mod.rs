//! Helpers that several test programs share.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

pub mod etcd;
pub mod proxy;

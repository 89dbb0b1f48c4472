//! Helpers that several test programs share.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]

pub mod etcd;
pub mod proxy;

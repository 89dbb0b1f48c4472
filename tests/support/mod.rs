//! What several integration tests share. Every test file compiles its own copy.

#![allow(dead_code, reason = "each test file uses its own part of this")]

pub(crate) mod cluster;
pub(crate) mod lab;
pub(crate) mod overlay;
pub(crate) mod packet;
pub(crate) mod status;
pub(crate) mod traffic;

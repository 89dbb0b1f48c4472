//! WireGuard, whoever runs it: keys, and what its devices are told and tell of their peers. Pure.

pub mod difference;
pub mod keys;
pub mod peer;

//! Wiring of weftd: start order, signals, health, exit codes.

pub mod log;
pub mod notify;

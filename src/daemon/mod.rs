//! Wiring of weftd: start order, signals, health, exit codes.

pub mod health;
pub mod log;
pub mod notify;
pub mod status;

mod http;

//! WireGuard, whoever runs it: keys, what its devices are told and tell of their peers, and the
//! protocol itself, for hosts whose kernel has none. No I/O, no clock, no threads.

mod activity;
mod association;
mod cookie;
pub mod difference;
pub mod interface;
pub mod keys;
pub mod message;
mod noise;
mod numbers;
pub mod peer;
pub mod session;
pub mod sessions;
mod strangers;
mod window;

pub use activity::Activity;
pub use cookie::Randomness;
pub use interface::{Interface, Now};
pub use session::Session;
pub use sessions::Sessions;

//! Leases: acquire, renew, watch. The only part of weft that talks to a store.
//!
//! From the bottom: the types of a lease; above them, independent of each other, the pure lease
//! machine and the stores; on top `manager`, `acquire` and `run`, which drive both. `FLOORS` in
//! `tests/tidy/main.rs` has the order.
//! Nothing here touches routes, devices or the packet path: the daemon receives the peer set and
//! decides what it means.

pub mod acquire;
pub mod backoff;
pub mod by_hand;
pub mod cache;
pub(crate) mod changes;
pub mod choose;
mod claim;
pub mod clock;
mod config_check;
pub mod error;
pub mod identity;
pub mod lease;
mod machine;
pub mod manager;
pub mod own_thread;
pub mod peers;
pub mod rejected;
pub mod run;
pub mod snapshot;
pub mod status;
pub mod store;
pub mod timing;

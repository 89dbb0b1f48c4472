//! Leases: acquire, renew, watch. The only part of weft that talks to a store.
//!
//! `lease`, `choose`, `peers` and `machine` are pure; `store` holds the adapters; `manager`,
//! `acquire` and `run` drive them. Nothing here touches routes, devices or the packet path: the
//! daemon receives the peer set and decides what it means.

pub mod acquire;
pub mod backoff;
pub mod cache;
pub mod choose;
pub mod claim;
pub mod clock;
mod config_check;
pub mod lease;
mod machine;
pub mod manager;
pub mod peers;
pub mod run;
pub mod status;
pub mod store;

pub use acquire::AcquireError;
pub use claim::NodeIdentity;
pub use lease::{Lease, LeaseAttributes, Lifetime, Peers};
pub use manager::{OwnLease, SubnetManager, Timing};
pub use run::End;
pub use status::{ControlStatus, RejectReason};

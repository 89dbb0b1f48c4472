//! The host's own network state: interfaces, addresses, routes, and the locks that keep a
//! second daemon out.
//!
//! Pure decisions (`interface::select`, `overlay::diff`, `mtu`) work on the snapshots of `state`;
//! only `netlink` talks to the kernel. Nothing here knows leases, peers or packets.

pub mod follower;
pub mod interface;
pub mod listing;
pub mod lock;
pub mod mtu;
pub mod netlink;
pub mod node_lock;
pub mod overlay;
pub mod pod_links;
pub mod state;
pub mod tables;

//! What a lease means on this host, per backend kind: a closed set.

pub mod extension;
pub mod handover;
mod host_gw;
pub mod kernel;
pub mod running;
pub mod setup;
pub mod status;
pub mod udp;
mod vxlan;

//! What a lease means on this host, per backend kind: a closed set.

mod closure;
#[cfg_attr(
    not(all(feature = "aws-vpc", feature = "gce", feature = "ali-vpc", feature = "tencent-vpc")),
    allow(
        dead_code,
        unused_imports,
        unused_variables,
        reason = "what the clouds that are built do not need"
    )
)]
pub mod cloud;
pub mod error;
pub mod extension;
pub mod family;
pub mod flaws;
pub mod handover;
mod host_gw;
mod ipip;
pub mod ipsec;
pub mod kernel;
mod kernel_health;
mod kernel_tables;
pub mod peer;
mod queues;
pub mod running;
pub mod setup;
pub mod status;
mod team;
pub mod tunnel_device;
pub mod udp;
mod vxlan;
mod wireguard;

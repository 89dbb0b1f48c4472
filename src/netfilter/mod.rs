//! Masquerade and forward rules, in the chains that flannel has: what is wanted, what the kernel
//! has, and the one transaction that makes up the difference. IPv4 only.
//!
//! `rules`, `diff`, `iptables` and `nftables` are pure: text and values in, text and values out.
//! Only `program` starts processes, never by way of a shell, and `reconciler` decides when. Nothing
//! here knows leases, peers or packets.

pub mod diff;
pub mod iptables;
pub mod nftables;
pub mod program;
pub mod reconciler;
pub mod rules;

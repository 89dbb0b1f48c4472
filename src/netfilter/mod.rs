//! Masquerade and forward rules, in the chains that flannel has, and the guard of the tunnel's
//! port: what is wanted, what the kernel has, and the one transaction that makes up the difference.
//! The rules are for both families, the guard is for IPv4 only.
//!
//! `rules`, `diff`, `iptables`, `nftables` and `guard` are pure: text and values in, text and
//! values out. Only `program` starts processes, never by way of a shell; `reconciler` and
//! `guard_keeper` decide when. Nothing here knows leases or packets.

pub mod diff;
pub mod guard;
pub mod guard_keeper;
pub mod iptables;
pub mod nftables;
pub mod program;
pub mod reconciler;
pub mod rules;

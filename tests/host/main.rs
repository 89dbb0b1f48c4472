//! weft on real kernels: workers on real devices, the host's tables, the rules, the backends, and
//! what a network does to all of them. Needs root, for every test makes network namespaces.
#![allow(clippy::duplicate_mod, reason = "a suite runs once for each engine")]

mod address_changes;
mod change_of_backend;
mod clouds;
mod combinations;
mod dead_hosts;
mod dual_stack;
mod engine_errno;
mod engine_io_uring;
mod engine_mmsg;
mod engine_tiny_ring;
mod fast_path;
mod faults;
mod forged_io_uring;
mod forged_mmsg;
mod guard;
mod ipsec;
mod ipv6_underlay;
mod kernel_backends;
mod namespace;
mod netns;
mod networks;
mod path_mtu;
mod peer_health;
mod plain_peer;
mod rights;
mod route_changes;
mod rules;
mod shortage;
mod source_ports;
mod steering;
#[path = "../support/mod.rs"]
mod support;
mod told;
mod wireguard;
mod workers;

//! weft on a real etcd: one member and three, with and without pods' traffic. Needs root, for
//! members and hosts are in network namespaces, and etcd.

mod cluster;
mod faults;
mod scale;
mod store;
#[path = "../support/mod.rs"]
mod support;
mod to_kubernetes;
mod traffic;
mod warm_start;

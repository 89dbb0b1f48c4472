//! The etcd store against a real etcd: flannel's schema to the byte, storms of daemons, and every
//! way in which etcd can misbehave that fits into a test. What needs hours is compressed by short
//! leases.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![expect(clippy::print_stdout, reason = "measured times belong into the report of the run")]

mod acquire;
mod claim;
mod families;
mod faults;
mod keep;
mod security;

use crate::support::control::{
    PREFIX, Running, SOON, addresses, manager, manager_at, network, node, options, path,
    short_leases, subnet_path,
};

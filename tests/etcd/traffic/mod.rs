//! Pods that talk while their nodes' etcd fails in every way that the promise covers: real daemons,
//! a real etcd, 10,000 datagrams a second each way and twenty TCP flows between two hosts.
//! What takes a day in life takes seconds here: most tests run weftd itself, those that wait for a
//! lease to end run it with brief leases (`benches/brief_leases.rs`).

#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured times belong into the report of the run")]

mod clock;
mod crowd;
mod members;
mod networks;
mod outage;
mod owner;
mod site;
mod start;
mod twin;
mod watch;
mod wiped;

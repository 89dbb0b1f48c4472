//! weftd beside a real kube-apiserver, with a real etcd behind it and, if there is one, a real
//! kube-controller-manager beside it. `scripts/beside-apiserver` runs this; `cargo test` does not,
//! because no machine has the programs by itself.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured figures belong into the report of the run")]

mod faults;
mod manifest;
mod network;
mod plane;
mod requests;
mod scale;
mod site;
#[path = "../../support/mod.rs"]
mod support;
mod tokens;

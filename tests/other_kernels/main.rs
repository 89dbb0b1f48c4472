//! What this machine's kernel may lack. `scripts/kernels` runs this on kernels that have it;
//! `cargo test` does not, because a test that is skipped proves nothing.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured times belong into the report of the run")]

mod change_of_backend;
mod ipip;
#[path = "../support/mod.rs"]
mod support;

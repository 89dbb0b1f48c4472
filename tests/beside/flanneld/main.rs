//! weftd beside flanneld: both at work in one cluster, one in place of the other, and what our
//! documents say of flanneld held against flanneld itself. `scripts/beside-flanneld` runs this;
//! `cargo test` does not, because no machine has the program by itself.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured figures belong into the report of the run")]

mod cases;
mod claims;
mod families;
mod handover;
mod mixed;
mod same;
mod site;
#[path = "../../support/mod.rs"]
mod support;
#[path = "../../pure/golden/table.rs"]
#[allow(dead_code, reason = "what weftd makes of the cases is tests/pure/golden's")]
mod table;

//! What needs the process, or the machine, for itself: a counting allocator, descriptors and memory
//! that are counted, a machine-wide sysctl. One test at a time (`alone`), and `scripts/test` runs
//! nothing beside this program. Needs root.

mod allocations;
mod fallback;
mod leases;
mod ring_leaks;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Each test of this program holds this as long as it runs.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

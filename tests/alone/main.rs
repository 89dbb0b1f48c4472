//! What needs the process, or the machine, for itself: a counting allocator, a machine-wide sysctl,
//! descriptors that are counted, daemons whose use of the processor is measured. One test at a time
//! (`alone`), and `scripts/test` runs nothing beside this program. Needs root.

mod allocations;
mod evil_load;
mod fallback;
mod footprint;
#[path = "../../benches/evil/packets.rs"]
mod packets;
#[path = "../../benches/evil/pour.rs"]
#[allow(dead_code, reason = "the program reports what was sent")]
mod pour;
mod ring_leaks;
#[path = "../../fuzz/bodies/slow_twin.rs"]
mod slow_twin;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Each test of this program holds this as long as it runs.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

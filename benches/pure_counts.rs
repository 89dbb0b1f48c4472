//! Instructions of the packet path, counted by valgrind: steadier than time on a shared machine.
//!
//! `scripts/instructions` runs this program under callgrind, which counts inside [`measured`]
//! only. Alone it just forwards the batch, which proves that it can.

#[path = "pure/batches.rs"]
mod batches;
#[path = "../fuzz/bodies/slow_twin.rs"]
mod slow_twin;
#[path = "pure/world.rs"]
#[allow(dead_code, reason = "only the routes that the batches need are made here")]
mod world;

use std::hint::black_box;
use std::io::{Write, stdout};

use anyhow::Result;

use batches::{Batch, CASES};

const USAGE: &str = "\
usage: pure-counts --list | CASE
--list prints for each case how many packets a run forwards, and the name of the case.
";

/// Instructions are the same from run to run, so a few passes do.
const PASSES: usize = 100;

/// As many as there are different ones.
const WARM_UP_PASSES: usize = batches::ROUNDS;

fn main() -> Result<()> {
    let argument = std::env::args().nth(1).unwrap_or_default();
    if argument == "--list" {
        for (name, make) in CASES {
            let mut batch = make();
            batch.refresh();
            measured(&mut *batch);
            writeln!(stdout(), "{}\t{name}", PASSES * batch.packets())?;
        }
        return Ok(());
    }
    let Some((_, make)) = CASES.iter().find(|(name, _)| *name == argument) else {
        return Ok(stdout().write_all(USAGE.as_bytes())?);
    };
    let mut batch = make();
    // So that the caches hold what they can.
    for _ in 0..WARM_UP_PASSES {
        batch.refresh();
        batch.pass();
    }
    for _ in 0..PASSES {
        batch.refresh();
        black_box(measured(&mut *batch));
    }
    Ok(())
}

/// What is counted.
#[inline(never)]
fn measured(batch: &mut dyn Batch) -> usize {
    batch.pass()
}

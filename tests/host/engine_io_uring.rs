//! The suite of `engine_suite` on the io_uring engine.

#[path = "engine_suite/mod.rs"]
mod on_io_uring;

use weft::engine::{Engine, RING_ENTRIES};

use crate::support::dataplane::Options;

const OPTIONS: Options = Options::ALL.on(Engine::IoUring, RING_ENTRIES);

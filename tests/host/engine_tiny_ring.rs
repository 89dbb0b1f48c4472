//! The suite of `engine_suite` on an io_uring of two entries, which is full all the time.

#[path = "engine_suite/mod.rs"]
mod on_tiny_ring;

use weft::engine::Engine;

use crate::support::dataplane::Options;

const OPTIONS: Options = Options::ALL.on(Engine::IoUring, 2);

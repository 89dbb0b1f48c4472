//! The suite of `engine_suite` on the mmsg engine.

#[path = "engine_suite/mod.rs"]
mod on_mmsg;

use weft::engine::{Engine, RING_ENTRIES};

use crate::support::dataplane::Options;

const OPTIONS: Options = Options::ALL.on(Engine::Mmsg, RING_ENTRIES);

//! The suite of `engine_suite` on the mmsg engine.

#[path = "engine_suite/mod.rs"]
mod on_mmsg;

use crate::support::dataplane::Options;
use weft::engine::{Engine, RING_ENTRIES};

const OPTIONS: Options = Options::ALL.on(Engine::Mmsg, RING_ENTRIES);

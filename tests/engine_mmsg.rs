//! The suite of `engine_suite` on the mmsg engine.

mod dataplane;
#[path = "engine_suite/mod.rs"]
mod on_mmsg;
mod support;

use dataplane::Options;
use weft::engine::{Engine, RING_ENTRIES};

const OPTIONS: Options = Options::ALL.on(Engine::Mmsg, RING_ENTRIES);

//! The suite of `forged` on the mmsg engine.

#[path = "forged/mod.rs"]
mod on_mmsg;

const ENGINE_FLAG: &str = "--engine=mmsg";

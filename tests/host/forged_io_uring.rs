//! The suite of `forged` on the io_uring engine.

#[path = "forged/mod.rs"]
mod on_io_uring;

const ENGINE_FLAG: &str = "--engine=io_uring";

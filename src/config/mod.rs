//! Everything an operator writes, parsed once into types.

pub mod network;
pub mod options;

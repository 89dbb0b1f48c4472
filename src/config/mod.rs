//! Everything an operator writes, parsed once into types.

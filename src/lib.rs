//! weft: an overlay network daemon, wire- and store-compatible with flannel's `udp` backend.
//!
//! The library is the whole product; `weftd` and `weft` are thin programs over it, and the
//! benchmark harness and the fuzz targets call the same modules. ARCHITECTURE.md has the map;
//! `tests/tidy/main.rs` holds which module may import which.
//!
//! Above the pure line (`stats`, `packet`, `route`, `offload`, `forward`, `wireguard`) nothing
//! performs I/O, reads a clock or allocates per packet. Only `sys` contains `unsafe`.

pub mod packet;
pub mod route;
pub mod stats;

pub mod forward;
pub mod offload;
pub mod wireguard;

pub mod device;
pub mod engine;
pub mod fast_path;
pub mod sys;

pub mod backend;
pub mod backend_kind;
pub mod config;
pub mod control;
pub mod daemon;
mod failure;
pub mod host;
pub mod netfilter;
pub mod rights;
pub mod status;
pub mod tool;
mod words;

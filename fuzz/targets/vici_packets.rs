//! Fuzz target; the body says what one input means.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/vici_packets.rs"]
mod body;

fuzz_target!(|data: &[u8]| body::run(data));

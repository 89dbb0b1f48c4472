//! Fuzz target; the body says what one input means.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/forward_walk.rs"]
mod body;
#[path = "../bodies/packets.rs"]
mod packets;
#[path = "../bodies/slow_twin.rs"]
mod slow_twin;

fuzz_target!(|data: &[u8]| body::run(data));

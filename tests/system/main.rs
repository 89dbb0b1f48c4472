//! weft as its users see it: command line, start and stop, resources, faults, two hosts, and the
//! files in `deploy/`. Needs root, for every host is a network namespace.

mod check;
mod cleanup;
mod cli;
mod deploy;
mod drops;
mod evil_load;
mod families;
mod fast_path;
mod faults;
mod footprint;
mod handover;
mod hanging_store;
mod lab_selfcheck;
mod lease;
mod life_cycle;
#[path = "../../benches/evil/packets.rs"]
mod packets;
mod peers;
#[path = "../../benches/evil/pour.rs"]
#[allow(dead_code, reason = "the program reports what was sent")]
mod pour;
mod recipes;
mod restarts;
mod second_daemon;
#[path = "../../fuzz/bodies/slow_twin.rs"]
mod slow_twin;
#[path = "../support/mod.rs"]
mod support;
mod two_hosts;
mod watchdog;
mod wireguard_updates;

//! weft as its users meet it: the command line, a daemon's life, two hosts, what is in `deploy/`.
//! Needs root, for every host is a network namespace.

mod cli;
mod deploy;
mod lab_selfcheck;
mod life_cycle;
mod recipes;
mod second_daemon;
#[path = "../support/mod.rs"]
mod support;
mod two_hosts;

//! The files below `deploy/` for Docker, systemd, Kubernetes and CNI, run or read by the programs
//! that they are for, as far as those are available here.

#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
#![allow(clippy::print_stdout, reason = "measured figures belong into the report of the run")]

mod booted;
mod building;
mod chart;
mod container;
mod docker_opts;
mod manifest;
mod package;
mod pod;
mod prometheus;
mod sandbox;
mod unit;

use std::path::PathBuf;

/// A file below `deploy/`.
fn deploy(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

/// Its text.
#[track_caller]
fn text(path: &str) -> String {
    std::fs::read_to_string(deploy(path)).unwrap_or_else(|error| panic!("deploy/{path}: {error}"))
}

/// A program that `scripts/setup --test` fetches, or the one on the path.
fn tool(name: &str) -> PathBuf {
    let target = std::env::current_exe().expect("the running test has a path");
    let fetched = target.ancestors().nth(3).map(|dir| dir.join("tools").join(name));
    fetched.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(name))
}

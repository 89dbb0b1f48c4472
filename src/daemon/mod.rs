//! Wiring of weftd: start order, signals, health, logs, status, exit codes.

mod begin;
pub(crate) mod cache_writer;
mod configured;
mod contain;
mod descriptors;
mod drop_samples;
mod health;
mod http;
mod identity;
mod lately;
pub(crate) mod limits;
mod log;
mod metrics;
mod node_guard;
mod notify;
mod peer_rows;
mod port_guard;
pub(crate) mod process;
mod report;
mod rules;
mod run;
mod running;
pub mod status;
mod subnet_writer;
mod take_over;
mod verdict;
mod warm_start;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use tracing::{debug, info, warn};

use crate::backend::ipsec::charon::run_keeper;
use crate::config::flags::{self, Outcome, Variable};
use crate::config::options::Options;
use crate::control::timing::Timing;

/// The whole of `weftd`: parses `arguments`, the program's name first, and the environment that
/// `variable` reads, then runs until stopped. By `adjust` tests change durations, so that a day
/// passes within seconds; the program changes nothing.
pub fn main(
    arguments: impl Iterator<Item = OsString>,
    variable: Variable<'_>,
    adjust: impl FnOnce(&mut Timing),
) -> ExitCode {
    let arguments: Vec<_> = arguments.collect();
    if let Some(code) = run_keeper(&arguments) {
        return code;
    }
    let passed = descriptors::passed();
    crate::sys::memory::keep_little();
    let (options, warnings) = match flags::parse(arguments, variable) {
        Outcome::Run(options, warnings) => (options, warnings),
        Outcome::End(text, code) => {
            io::stderr().write_all(text.as_bytes()).ok();
            return ExitCode::from(code);
        }
    };
    let Options { renew_margin, stale_hold, .. } = *options;
    let mut timing = Timing { renew_margin, stale_hold, ..Timing::default() };
    adjust(&mut timing);
    let _log = match log::start(options.log_is_json, options.verbosity) {
        Ok(guard) => guard,
        Err(error) => {
            writeln!(io::stderr(), "weftd: {error:#}").ok();
            return ExitCode::FAILURE;
        }
    };
    contain::hook_panics();
    info!("weftd {}", env!("CARGO_PKG_VERSION"));
    info!("{}", options.log_line());
    debug!("Options as understood: {options:?}");
    for warning in warnings {
        warn!("{warning}");
    }
    run::run(*options, timing, passed)
}

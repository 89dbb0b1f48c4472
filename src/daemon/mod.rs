//! Wiring of weftd: start order, signals, health, logs, status, exit codes.

pub mod health;
mod http;
mod identity;
pub mod log;
pub mod notify;
pub mod report;
pub mod run;
pub mod status;
pub mod subnet_writer;
pub mod tool;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use tracing::{info, warn};

use crate::config::flags::{self, Outcome};

/// The whole of `weftd`: parses `arguments`, the program's name first, and the environment that
/// `variable` reads, then runs until stopped.
pub fn main(
    arguments: impl Iterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> ExitCode {
    let outcome = flags::parse(arguments, variable);
    if let Some((text, code)) = outcome.ending("weftd", env!("CARGO_PKG_VERSION")) {
        io::stderr().write_all(text.as_bytes()).ok();
        return ExitCode::from(code);
    }
    let Outcome::Run(options, warnings) = outcome else { return ExitCode::FAILURE };
    let _log = match log::start(options.log_format, options.verbosity) {
        Ok(guard) => guard,
        Err(error) => {
            writeln!(io::stderr(), "weftd: {error}").ok();
            return ExitCode::FAILURE;
        }
    };
    info!("weftd {}", env!("CARGO_PKG_VERSION"));
    info!("{}", options.log_line());
    for warning in warnings {
        warn!("{warning}");
    }
    run::run(*options)
}

//! `weft bugreport`: all that the tool can find out, as one text to send to somebody. It is made of
//! what the other commands print, and those know no passwords.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::control::clock::{format_rfc3339, unix_seconds};
use crate::tool::arguments::{Answered, CheckArguments, Daemon};
use crate::tool::{ask, check};

/// What weftd is asked for.
const PAGES: [&str; 5] = ["/config", "/status", "/peers", "/log", "/metrics"];

/// The report.
pub(super) fn run(daemon: Daemon, subnet_file: PathBuf) -> anyhow::Result<String> {
    let socket = daemon.socket.clone();
    let answered = Answered { daemon, output: None };
    let check =
        CheckArguments { answered, subnet_file, verbose: true, ..CheckArguments::default() };
    let kernel = rustix::system::uname();
    let mut report = format!(
        "weft {} at {}, kernel {} {}\n\n== weft check --verbose\n{}",
        env!("CARGO_PKG_VERSION"),
        format_rfc3339(unix_seconds()),
        kernel.release().to_string_lossy(),
        kernel.machine().to_string_lossy(),
        check::run(check)?.0,
    );
    for page in PAGES {
        let text = ask::page(&socket, page).unwrap_or_else(|error| format!("{error:#}\n"));
        write!(report, "\n== {page}\n{text}").ok();
    }
    Ok(report)
}

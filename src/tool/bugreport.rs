//! `weft bugreport`: all that the tool can find out, as one text to send to somebody. It is made of
//! what the other commands print, and those know no passwords.

use std::fmt::Write as _;
use std::path::Path;

use crate::control::clock::{format_rfc3339, unix_seconds};
use crate::daemon::status::fetch_unix;

/// What weftd is asked for.
const PAGES: [&str; 5] = ["/config", "/status", "/peers", "/log", "/metrics"];

/// The report; `check` is what `weft check --verbose` says.
pub(super) fn of(socket: &Path, check: &str) -> String {
    let kernel = rustix::system::uname();
    let mut report = format!(
        "weft {} at {}, kernel {} {}\n",
        env!("CARGO_PKG_VERSION"),
        format_rfc3339(unix_seconds()),
        kernel.release().to_string_lossy(),
        kernel.machine().to_string_lossy(),
    );
    section(&mut report, "weft check --verbose", check);
    for page in PAGES {
        let text = match fetch_unix(socket, page) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => format!("{error:#}\n"),
        };
        section(&mut report, page, &text);
    }
    report
}

fn section(report: &mut String, title: &str, text: &str) {
    write!(report, "\n== {title}\n{text}").ok();
}

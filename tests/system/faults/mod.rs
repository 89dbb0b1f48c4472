//! Faults as operators meet them, and that `weft status` or `weft check` names the cause of each.
//! The table in docs/operations.md is made of these.

mod running;
mod starting;
mod store;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::check::check;
use super::support::lab::Namespace;
use super::support::pace::Stopwatch;

/// A silent peer is known after nine seconds, a worker that hangs after fifteen, and a store that
/// does not answer after a few tries of five.
const KNOWN: Duration = Duration::from_secs(90);

/// Between two looks at a screen.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// Which command shows the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Screen {
    Status,
    Check,
    /// Of the address that it is given.
    Ping,
}

impl Screen {
    fn words(self) -> &'static str {
        match self {
            Self::Status => "weft status",
            Self::Check => "weft check",
            Self::Ping => "weft ping",
        }
    }

    /// What the command shows on `host`, whose files are in `dir`, complaints on stderr included;
    /// of the status only what a screen of 24 lines has.
    fn show(self, host: &Namespace, dir: &Path, more: &[&str]) -> String {
        let output = match self {
            Self::Status | Self::Ping => {
                let socket = dir.join("weft.sock").display().to_string();
                let command = if self == Self::Ping { "ping" } else { "status" };
                let words = [env!("CARGO_BIN_EXE_weft"), command, "--socket", &socket];
                host.command(&[&words, more].concat()).output().expect("weft runs")
            }
            Self::Check => check(host, dir, more),
        };
        let both = [output.stdout, output.stderr].concat();
        let lines: Vec<_> = String::from_utf8_lossy(&both).lines().map(str::to_owned).collect();
        let shown = if self == Self::Status { 24 } else { usize::MAX };
        lines.into_iter().take(shown).collect::<Vec<_>>().join("\n")
    }
}

/// A fault, as the table has it.
#[derive(Debug, Clone, Copy)]
struct Fault {
    name: &'static str,
    screen: Screen,
    /// Words that name the cause.
    says: &'static str,
}

/// Waits until the fault's screen names its cause; gives what it shows then.
#[track_caller]
fn assert_named(fault: Fault, host: &Namespace, dir: &Path, more: &[&str]) -> String {
    let Fault { name, screen, says } = fault;
    let watch = Stopwatch::start();
    loop {
        let shown = screen.show(host, dir, more);
        if shown.contains(says) {
            return shown;
        }
        let words = screen.words();
        assert!(!watch.is_over(KNOWN), "{name}: {words} does not say {says:?}:\n{shown}");
        std::thread::sleep(LOOK_PAUSE);
    }
}

/// Runs a line of shell, with `variables`, in a namespace.
#[track_caller]
fn shell(host: &Namespace, variables: &[(&str, String)], line: &str) {
    let mut command: Command = host.command(&["sh", "-ec", line]);
    command.envs(variables.iter().map(|(name, value)| (*name, value)));
    let output = command.output().expect("sh runs");
    assert!(output.status.success(), "{line}: {output:?}");
}

/// The table, a row for each fault.
fn rows() -> String {
    let all = running::faults().chain(starting::faults()).chain(store::faults());
    let row = |fault: Fault| {
        format!("| {} | `{}` | `{}` |\n", fault.name, fault.screen.words(), fault.says)
    };
    all.map(row).collect()
}

#[test]
fn the_table_of_faults_is_in_the_documents() {
    let rows = rows();
    assert!(rows.lines().count() >= 30, "too few faults are tried");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md");
    let page = std::fs::read_to_string(page).expect("the document is there");
    assert!(page.contains(&rows), "docs/operations.md needs these rows:\n{rows}");
}

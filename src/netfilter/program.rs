//! Runs one of the firewall's programs: never through a shell, with bounded time. Knows
//! nothing of rules.

use std::io;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::failure::rights_hint;

/// For how long `iptables-restore` waits for another program's lock, in seconds.
pub const LOCK_WAIT_S: u32 = 5;

/// For how long a program may run, its wait for a lock included. A table of 100,000 rules takes
/// iptables about a second.
const RUN_TIMEOUT: Duration = Duration::from_secs(LOCK_WAIT_S as u64 + 10);

/// How much of a program's standard error is told.
const COMPLAINT_CHARS_MAX: usize = 2048;

/// What programs get of weftd's own environment, which holds etcd's password: where they are, and
/// iptables' own lock and extensions (iptables(8), xtables.c).
const INHERITED: [&str; 3] = ["PATH", "XTABLES_LOCKFILE", "XTABLES_LIBDIR"];

/// A program of the firewall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// Its name, looked up in `PATH`.
    pub name: &'static str,
    /// The package that brings it, under the same name in all distributions.
    pub package: &'static str,
}

/// The programs of iptables for one family.
#[derive(Debug, Clone, Copy)]
pub struct Iptables {
    /// Prints its version, and the rules of a chain.
    pub list: Program,
    /// Prints the rules of a table.
    pub save: Program,
    /// Takes a transaction.
    pub restore: Program,
}

/// Those of IPv4.
pub const IPTABLES: Iptables = Iptables {
    list: of_iptables("iptables"),
    save: of_iptables("iptables-save"),
    restore: of_iptables("iptables-restore"),
};
/// Those of IPv6.
pub const IP6TABLES: Iptables = Iptables {
    list: of_iptables("ip6tables"),
    save: of_iptables("ip6tables-save"),
    restore: of_iptables("ip6tables-restore"),
};
/// Does all of it for nftables.
pub const NFT: Program = Program { name: "nft", package: "nftables" };

const fn of_iptables(name: &'static str) -> Program {
    Program { name, package: "iptables" }
}

/// Why a program failed.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not installed.
    #[error("{} is not in PATH: install the package {}", .0.name, .0.package)]
    Missing(Program),
    /// It could not be started or talked to.
    #[error("cannot run {0}")]
    Run(&'static str, #[source] io::Error),
    /// Another program holds the lock of xtables.
    #[error(
        "another program holds the lock of iptables (/run/xtables.lock) for more than \
         {LOCK_WAIT_S} s"
    )]
    Locked,
    /// It did not end.
    #[error("{0} was ended, because it took more than {limit} s", limit = RUN_TIMEOUT.as_secs())]
    TimedOut(&'static str),
    /// It failed.
    #[error("{program} failed ({status}): {complaint}{}", hint(complaint))]
    Refused {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote on standard error.
        complaint: String,
    },
}

/// Programs that weftd runs while it serves have no more rights than it has then.
fn hint(complaint: &str) -> &'static str {
    let refusals = ["Permission denied", "Operation not permitted"];
    if refusals.iter().any(|it| complaint.contains(it)) { rights_hint() } else { "" }
}

impl ProgramError {
    /// Whether the same request may well succeed a moment later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Locked | Self::TimedOut(_) => true,
            // Short of processes or memory.
            Self::Run(_, source) => {
                matches!(source.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory)
            }
            Self::Missing(_) | Self::Refused { .. } => false,
        }
    }

    /// Whether nft was asked for something that is not there: it has one exit code for all
    /// failures.
    pub(super) fn is_absence(&self) -> bool {
        let nothing = "No such file or directory";
        matches!(self, Self::Refused { complaint, .. } if complaint.contains(nothing))
    }
}

impl Program {
    /// Runs it to its end with `arguments` and `input`, and gives what it prints.
    ///
    /// It is killed when the future is dropped: each of them changes the kernel's rules in one
    /// step or not at all.
    pub async fn run(self, arguments: &[&str], input: &str) -> Result<String, ProgramError> {
        let failed = |source| ProgramError::Run(self.name, source);
        let mut command = Command::new(self.name);
        command.args(arguments).env_clear().env("LC_ALL", "C");
        command.envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                return ProgramError::Missing(self);
            }
            failed(source)
        })?;
        let Output { status, stdout, stderr } = timeout(RUN_TIMEOUT, talk(child, input))
            .await
            .map_err(|_elapsed| ProgramError::TimedOut(self.name))?
            .map_err(failed)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        let complaint = String::from_utf8_lossy(&stderr);
        let complaint = complaint.split_whitespace().collect::<Vec<_>>().join(" ");
        let complaint: String = complaint.chars().take(COMPLAINT_CHARS_MAX).collect();
        // xtables' own code for what it could not get (RESOURCE_PROBLEM in xtables.h).
        if status.code() == Some(4) && complaint.contains("xtables lock") {
            return Err(ProgramError::Locked);
        }
        Err(ProgramError::Refused { program: self.name, status, complaint })
    }
}

/// All three streams at once, so that neither side waits for the other.
async fn talk(mut child: Child, input: &str) -> io::Result<Output> {
    let stdin = child.stdin.take();
    let write = async {
        let Some(mut stdin) = stdin else { return Ok(()) };
        match stdin.write_all(input.as_bytes()).await {
            // Its exit status says why it stopped reading.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    };
    let (output, ()) = tokio::try_join!(child.wait_with_output(), write)?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work)
    }

    fn run(name: &'static str, arguments: &[&str], input: &str) -> Result<String, String> {
        let program = Program { name, package: "coreutils" };
        enter(program.run(arguments, input)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_shortage_passes_and_a_missing_right_does_not() {
        let run = |errno: i32| {
            let source = io::Error::from_raw_os_error(errno);
            ProgramError::Run("nft", source).is_passing()
        };
        // EAGAIN, ENOMEM, EACCES.
        assert_eq!([11, 12, 13].map(run), [true, true, false]);
        assert!(!ProgramError::Missing(NFT).is_passing());
    }

    #[test]
    fn large_input_and_output_pass_through() {
        let input = "a line\n".repeat(100_000);
        assert_eq!(run("cat", &[], &input), Ok(input));
    }

    #[test]
    fn error_quotes_standard_error() {
        let error = run("cat", &["/nowhere"], "never read").unwrap_err();
        assert!(error.contains("cat failed (exit status: 1)"), "{error}");
        assert!(error.contains("cat: /nowhere: "), "{error}");
    }

    #[test]
    fn arguments_reach_no_shell() {
        let said = run("echo", &["$(id)", ";", "`id`"], "");
        assert_eq!(said, Ok("$(id) ; `id`\n".to_owned()));
    }

    #[test]
    fn only_listed_variables_are_inherited() {
        let said = run("env", &[], "").unwrap();
        let names: Vec<_> = said.lines().filter_map(|line| line.split('=').next()).collect();
        assert!(names.contains(&"PATH") && names.contains(&"LC_ALL"), "{names:?}");
        // The test itself runs with CARGO and more.
        let is_known = |name: &&str| INHERITED.contains(name) || *name == "LC_ALL";
        assert!(names.iter().all(is_known), "{names:?}");
    }

    #[test]
    fn missing_program_names_its_package() {
        let error = run("weft-no-such-program", &[], "").unwrap_err();
        assert!(error.contains("weft-no-such-program") && error.contains("coreutils"), "{error}");
    }
}

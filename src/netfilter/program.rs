//! Runs one of the firewall's programs: never through a shell, with bounded time and output. Knows
//! nothing of rules.

use std::ffi::OsString;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// For how long `iptables-restore` waits for another program's lock, in seconds.
pub const LOCK_WAIT_S: u32 = 5;

/// For how long a program may run, its wait for a lock included. A table of 100,000 rules takes
/// iptables about a second.
const RUN_TIMEOUT: Duration = Duration::from_secs(LOCK_WAIT_S as u64 + 10);

/// How much of a program's standard error is kept.
const COMPLAINT_BYTES_MAX: usize = 2048;

/// Variables that the programs read: where they are, and iptables' own lock and extensions
/// (iptables(8), xtables.c).
const INHERITED: [&str; 3] = ["PATH", "XTABLES_LOCKFILE", "XTABLES_LIBDIR"];

/// The unit of reading; the size of a pipe.
const CHUNK_BYTES: usize = 64 * 1024;

/// A program of the firewall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// Its name, looked up in `PATH`.
    pub name: &'static str,
    /// The package that brings it, under the same name in all distributions.
    pub package: &'static str,
}

/// Prints its version.
pub const IPTABLES: Program = Program { name: "iptables", package: "iptables" };
/// Prints the rules of a table.
pub const IPTABLES_SAVE: Program = Program { name: "iptables-save", package: "iptables" };
/// Takes a transaction.
pub const IPTABLES_RESTORE: Program = Program { name: "iptables-restore", package: "iptables" };
/// Does both for nftables.
pub const NFT: Program = Program { name: "nft", package: "nftables" };

/// Why a program failed.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not installed.
    #[error("{} is not in PATH: install the package {}", .0.name, .0.package)]
    Missing(Program),
    /// It could not be started or talked to.
    #[error("cannot run {program}")]
    Run {
        /// Its name.
        program: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// Another program holds the lock of xtables.
    #[error(
        "another program holds the lock of iptables (/run/xtables.lock) for more than \
         {LOCK_WAIT_S} s"
    )]
    Locked,
    /// It did not end.
    #[error("{program} was ended, because it took more than {} s", RUN_TIMEOUT.as_secs())]
    TimedOut {
        /// Its name.
        program: &'static str,
    },
    /// It failed.
    #[error("{program} failed ({status}): {complaint}")]
    Refused {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote on standard error.
        complaint: String,
    },
}

impl ProgramError {
    /// Whether the same request may well succeed a moment later.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Locked | Self::TimedOut { .. } => true,
            Self::Missing(_) | Self::Run { .. } | Self::Refused { .. } => false,
        }
    }
}

impl Program {
    /// Runs it to its end with `arguments` and `input`, and gives what it prints to `take`.
    ///
    /// It is killed when the future is dropped: each of them changes the kernel's rules in one
    /// step or not at all.
    pub async fn run(
        self,
        arguments: &[&str],
        input: &str,
        take: impl FnMut(&[u8]),
    ) -> Result<(), ProgramError> {
        let mut command = Command::new(self.name);
        command.args(arguments).env_clear().envs(inherited()).env("LC_ALL", "C");
        command.kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                return ProgramError::Missing(self);
            }
            ProgramError::Run { program: self.name, source }
        })?;
        let (status, complaint) = match timeout(RUN_TIMEOUT, talk(child, input, take)).await {
            Ok(result) => {
                result.map_err(|source| ProgramError::Run { program: self.name, source })?
            }
            Err(_elapsed) => return Err(ProgramError::TimedOut { program: self.name }),
        };
        if status.success() {
            return Ok(());
        }
        let complaint = String::from_utf8_lossy(&complaint).split_whitespace().fold(
            String::new(),
            |all, word| {
                if all.is_empty() { word.to_owned() } else { all + " " + word }
            },
        );
        // xtables' own code for what it could not get (RESOURCE_PROBLEM in xtables.h).
        if status.code() == Some(4) && complaint.contains("xtables lock") {
            return Err(ProgramError::Locked);
        }
        Err(ProgramError::Refused { program: self.name, status, complaint })
    }
}

/// What a program gets of weftd's own environment, which holds etcd's password.
fn inherited() -> impl Iterator<Item = (&'static str, OsString)> {
    INHERITED.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

/// All three streams at once, so that neither side waits for the other.
async fn talk(
    mut child: Child,
    input: &str,
    take: impl FnMut(&[u8]),
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut stdin), Some(stdout), Some(stderr)) = streams else {
        return Err(io::Error::other("its streams are missing"));
    };
    let write = async move {
        match stdin.write_all(input.as_bytes()).await {
            // Its exit status says why it stopped reading.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    };
    let mut complaint = Vec::new();
    let keep = |chunk: &[u8]| {
        let room = COMPLAINT_BYTES_MAX - complaint.len();
        complaint.extend_from_slice(&chunk[..chunk.len().min(room)]);
    };
    tokio::try_join!(write, drain(stdout, take), drain(stderr, keep))?;
    Ok((child.wait().await?, complaint))
}

async fn drain(mut stream: impl AsyncRead + Unpin, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut chunk).await? {
            0 => return Ok(()),
            length => take(&chunk[..length]),
        }
    }
}

/// Splits output into lines. Lines longer than 16 KiB are never ours and are dropped, which bounds
/// the memory.
#[derive(Debug, Default)]
pub struct Lines {
    rest: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// Several times what iptables can say in one rule.
    const LENGTH_MAX: usize = 16 * 1024;

    /// Takes the next part of the output and gives its whole lines to `line`.
    pub fn take(&mut self, chunk: &[u8], mut line: impl FnMut(&str)) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let is_whole = part.ends_with(b"\n");
            self.is_too_long |= self.rest.len() + part.len() > Self::LENGTH_MAX;
            if !self.is_too_long {
                self.rest.extend_from_slice(part);
            }
            if is_whole {
                if !self.is_too_long {
                    line(String::from_utf8_lossy(&self.rest).trim_end_matches('\n'));
                }
                self.rest.clear();
                self.is_too_long = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &'static str, arguments: &[&str], input: &str) -> (Result<(), String>, Vec<u8>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut said = Vec::new();
        let program = Program { name, package: "coreutils" };
        let result =
            runtime.block_on(program.run(arguments, input, |chunk| said.extend_from_slice(chunk)));
        (result.map_err(|error| error.to_string()), said)
    }

    #[test]
    fn large_input_and_output_pass_through() {
        let input = "a line\n".repeat(100_000);
        let (result, said) = run("cat", &[], &input);
        assert_eq!((result, said.len()), (Ok(()), input.len()));
    }

    #[test]
    fn error_quotes_standard_error() {
        let (result, _) = run("cat", &["/nowhere"], "never read");
        let error = result.unwrap_err();
        assert!(error.contains("cat failed (exit status: 1)"), "{error}");
        assert!(error.contains("/nowhere: No such file or directory"), "{error}");
    }

    #[test]
    fn arguments_reach_no_shell() {
        let (result, said) = run("echo", &["$(id)", ";", "`id`"], "");
        assert_eq!((result, said), (Ok(()), b"$(id) ; `id`\n".to_vec()));
    }

    #[test]
    fn only_listed_variables_are_inherited() {
        let (result, said) = run("env", &[], "");
        assert_eq!(result, Ok(()));
        let said = String::from_utf8(said).unwrap();
        let names: Vec<_> = said.lines().filter_map(|line| line.split('=').next()).collect();
        assert!(names.contains(&"PATH") && names.contains(&"LC_ALL"), "{names:?}");
        // The test itself runs with CARGO and more.
        let is_known = |name: &&str| INHERITED.contains(name) || *name == "LC_ALL";
        assert!(names.iter().all(is_known), "{names:?}");
    }

    #[test]
    fn missing_program_names_its_package() {
        let (result, _) = run("weft-no-such-program", &[], "");
        let expected = "weft-no-such-program is not in PATH: install the package coreutils";
        assert_eq!(result, Err(expected.to_owned()));
    }

    #[test]
    fn split_lines_join_and_long_ones_drop() {
        let text = format!("one\n{}\nthree\nrest", "x".repeat(Lines::LENGTH_MAX));
        for step in [1, 7, text.len()] {
            let (mut lines, mut found) = (Lines::default(), Vec::new());
            for chunk in text.as_bytes().chunks(step) {
                lines.take(chunk, |line| found.push(line.to_owned()));
            }
            assert_eq!(found, ["one", "three"], "in parts of {step} bytes");
        }
    }
}

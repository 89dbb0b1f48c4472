//! Runs one of the firewall's programs: never through a shell, with bounded time and output. Knows
//! nothing of rules.

use std::ffi::OsString;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::failure::rights_hint;

/// For how long `iptables-restore` waits for another program's lock, in seconds.
pub const LOCK_WAIT_S: u32 = 5;

/// For how long a program may run, its wait for a lock included. A table of 100,000 rules takes
/// iptables about a second.
const RUN_TIMEOUT: Duration = Duration::from_secs(LOCK_WAIT_S as u64 + 10);

/// How much of a program's standard error is kept.
const COMPLAINT_BYTES_MAX: u64 = 2048;

/// Longest line that is read: nft prints our table, or the names of all, as one.
const LINE_BYTES_MAX: usize = 4 << 20;

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
    let is_refused = ["Permission denied", "Operation not permitted"]
        .iter()
        .any(|refusal| complaint.contains(refusal));
    if is_refused { rights_hint() } else { "" }
}

impl ProgramError {
    /// Whether the same request may well succeed a moment later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Locked | Self::TimedOut { .. } => true,
            Self::Missing(_) | Self::Run { .. } | Self::Refused { .. } => false,
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
    /// What it prints, run with `arguments`.
    pub async fn print(self, arguments: &[&str]) -> Result<String, ProgramError> {
        let mut text = String::new();
        self.run(arguments, "", |line| text.push_str(line)).await?;
        Ok(text)
    }

    /// Runs it to its end with `arguments` and `input`, and gives `take` each line that it prints.
    ///
    /// It is killed when the future is dropped: each of them changes the kernel's rules in one
    /// step or not at all.
    pub async fn run(
        self,
        arguments: &[&str],
        input: &str,
        take: impl FnMut(&str),
    ) -> Result<(), ProgramError> {
        let failed = |source| ProgramError::Run { program: self.name, source };
        let mut command = Command::new(self.name);
        command.args(arguments).env_clear().envs(inherited()).env("LC_ALL", "C");
        command.kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                return ProgramError::Missing(self);
            }
            failed(source)
        })?;
        let (status, complaint) = timeout(RUN_TIMEOUT, talk(child, input, take))
            .await
            .map_err(|_elapsed| ProgramError::TimedOut { program: self.name })?
            .map_err(failed)?;
        if status.success() {
            return Ok(());
        }
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
    take: impl FnMut(&str),
) -> io::Result<(ExitStatus, String)> {
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
    let ((), (), complaint) = tokio::try_join!(write, lines(stdout, take), complaint(stderr))?;
    Ok((child.wait().await?, complaint))
}

/// Gives each line of `stream` to `take`. Those of [`LINE_BYTES_MAX`] and more are never ours and
/// are dropped, which bounds the memory.
async fn lines(stream: impl AsyncRead + Unpin, mut take: impl FnMut(&str)) -> io::Result<()> {
    let mut stream = BufReader::with_capacity(CHUNK_BYTES, stream);
    let (mut line, mut is_continued) = (Vec::new(), false);
    while let length @ 1.. =
        (&mut stream).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line).await?
    {
        let is_whole = length < LINE_BYTES_MAX || line.ends_with(b"\n");
        if is_whole && !is_continued {
            take(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        }
        is_continued = !is_whole;
        line.clear();
    }
    Ok(())
}

/// The beginning of what `stream` brings, in one line. The rest is read as well, so that the
/// program does not wait for its reader.
async fn complaint(mut stream: impl AsyncRead + Unpin) -> io::Result<String> {
    let mut text = Vec::new();
    (&mut stream).take(COMPLAINT_BYTES_MAX).read_to_end(&mut text).await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    Ok(String::from_utf8_lossy(&text).split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work)
    }

    fn run(
        name: &'static str,
        arguments: &[&str],
        input: &str,
    ) -> (Result<(), String>, Vec<String>) {
        let mut said = Vec::new();
        let program = Program { name, package: "coreutils" };
        let result = enter(program.run(arguments, input, |line| said.push(line.to_owned())));
        (result.map_err(|error| error.to_string()), said)
    }

    #[test]
    fn large_input_and_output_pass_through() {
        let input = "a line\n".repeat(100_000);
        let (result, said) = run("cat", &[], &input);
        assert_eq!((result, said.len()), (Ok(()), 100_000));
    }

    #[test]
    fn error_quotes_standard_error() {
        let (result, _) = run("cat", &["/nowhere"], "never read");
        let error = result.unwrap_err();
        assert!(error.contains("cat failed (exit status: 1)"), "{error}");
        assert!(error.contains("cat: /nowhere: "), "{error}");
    }

    #[test]
    fn arguments_reach_no_shell() {
        let (result, said) = run("echo", &["$(id)", ";", "`id`"], "");
        assert_eq!((result, said), (Ok(()), vec!["$(id) ; `id`".to_owned()]));
    }

    #[test]
    fn only_listed_variables_are_inherited() {
        let (result, said) = run("env", &[], "");
        assert_eq!(result, Ok(()));
        let names: Vec<_> = said.iter().filter_map(|line| line.split('=').next()).collect();
        assert!(names.contains(&"PATH") && names.contains(&"LC_ALL"), "{names:?}");
        // The test itself runs with CARGO and more.
        let is_known = |name: &&str| INHERITED.contains(name) || *name == "LC_ALL";
        assert!(names.iter().all(is_known), "{names:?}");
    }

    #[test]
    fn missing_program_names_its_package() {
        let (result, _) = run("weft-no-such-program", &[], "");
        let error = result.unwrap_err();
        assert!(error.contains("weft-no-such-program") && error.contains("coreutils"), "{error}");
    }

    #[test]
    fn overlong_lines_are_dropped() {
        for length in [LINE_BYTES_MAX, 3 * LINE_BYTES_MAX] {
            let text = format!("one\n{}\nthree\nrest", "x".repeat(length));
            let mut found = Vec::new();
            enter(lines(text.as_bytes(), |line| found.push(line.to_owned()))).unwrap();
            assert_eq!(found, ["one", "three", "rest"], "of {length} bytes");
        }
    }
}

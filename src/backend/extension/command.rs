//! A configured command: split into words as flanneld does, run without a shell, for a limited
//! time, with limited output.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command as Process};
use tokio::time::timeout;

use crate::config::network::CommandLine;

/// A command that takes longer is taken to hang. Adding a route takes milliseconds, and the slowest
/// cloud APIs answer within half a minute.
pub(super) const RUN_TIME_MAX: Duration = Duration::from_secs(60);

/// More output is dropped. A lease holds 4096 bytes altogether.
const OUTPUT_BYTES_MAX: usize = 16 * 1024;

/// Processes that a command leaves running may keep its output open; they are not waited for.
const OUTPUT_GRACE: Duration = Duration::from_millis(100);

/// Characters of output that a log line or an error quotes.
const QUOTED_CHARACTERS_MAX: usize = 300;

/// Variables that other programs do not get: secrets, and the socket of systemd.
pub(in crate::backend) const WITHHELD: [&str; 3] =
    ["FLANNELD_ETCD_PASSWORD", "FLANNELD_ETCD_USERNAME", "NOTIFY_SOCKET"];

/// Variables that a command gets besides weftd's own environment.
pub(super) type Variables = Vec<(&'static str, String)>;

/// A command could not be started, or exited with an error, or was killed.
#[derive(Debug, thiserror::Error)]
#[error("failed to run command: {what}")]
pub struct CommandError {
    /// As configured; if it was run, how it ended and what it wrote, shortened.
    what: String,
    /// Why nothing was run.
    source: Option<io::Error>,
}

/// Runs `command` with `variables` and `stdin` for `time_max`, and gives what it wrote, trimmed.
pub(super) async fn run(
    command: &CommandLine,
    variables: &Variables,
    stdin: &str,
    time_max: Duration,
) -> Result<String, CommandError> {
    let words = words(&command.0, &|name| {
        let own = variables.iter().find(|(own, _)| *own == name);
        own.map(|(_, value)| value.clone()).or_else(|| inherited(name))
    });
    let start = |source| CommandError { what: command.to_string(), source: Some(source) };
    let (mut child, mut output) = spawn(&words, variables).map_err(start)?;
    // After the child, so that it is dropped before: what is left of the group is known by it.
    let group = Group(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
    let mut written = Vec::new();
    let ended = {
        let mut end = std::pin::pin!(timeout(time_max, feed_and_wait(&mut child, stdin)));
        tokio::select! {
            biased;
            ended = &mut end => ended,
            // A command may close its output and work on.
            () = read(&mut output, &mut written) => end.await,
        }
    };
    let status = match ended {
        Ok(status) => {
            let status = status.map_err(start)?;
            // What the command left running on purpose is left alone.
            std::mem::forget(group);
            Some(status)
        }
        Err(_elapsed) => {
            drop(group);
            // One that the kernel cannot end, as in a dead file system, is not waited for.
            timeout(OUTPUT_GRACE, child.wait()).await.ok();
            None
        }
    };
    timeout(OUTPUT_GRACE, read(&mut output, &mut written)).await.ok();
    let output = String::from_utf8_lossy(&written).trim().to_owned();
    let end = match status {
        Some(status) if status.success() => return Ok(output),
        Some(status) => status.to_string(),
        None => format!("killed after {} s", time_max.as_secs()),
    };
    let what = format!("{command} Err: {end} Output: {}", quote(&output));
    Err(CommandError { what, source: None })
}

/// The process group of a command that has not ended. It is killed as a whole: a script's `sleep`
/// would outlive the script.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Without a process in it there is nothing to kill.
            kill_process_group(leader, Signal::KILL).ok();
        }
    }
}

fn spawn(words: &[String], variables: &Variables) -> io::Result<(Child, pipe::Receiver)> {
    let Some((program, arguments)) = words.split_first() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command is empty"));
    };
    // One pipe for both, so that what is written keeps its order.
    let (reader, writer) = io::pipe()?;
    let mut process = Process::new(program);
    process
        .args(arguments)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0)
        .kill_on_drop(true);
    for name in WITHHELD {
        process.env_remove(name);
    }
    let child = process.spawn()?;
    Ok((child, pipe::Receiver::from_owned_fd(reader.into())?))
}

async fn feed_and_wait(child: &mut Child, text: &str) -> io::Result<ExitStatus> {
    if let Some(mut stdin) = child.stdin.take() {
        // A command need not read what it is given.
        stdin.write_all(text.as_bytes()).await.ok();
        stdin.write_all(b"\n").await.ok();
    }
    child.wait().await
}

/// Reads to the end; keeps what there is room for.
async fn read(output: &mut pipe::Receiver, written: &mut Vec<u8>) {
    let mut chunk = [0; 1024];
    while let Ok(count @ 1..) = output.read(&mut chunk).await {
        let room = OUTPUT_BYTES_MAX.saturating_sub(written.len());
        written.extend_from_slice(&chunk[..count.min(room)]);
    }
}

fn inherited(name: &str) -> Option<String> {
    if WITHHELD.contains(&name) { None } else { std::env::var(name).ok() }
}

/// Splits at blanks, then expands variables: their values never change the number of words.
fn words(command: &str, value: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    command.split_whitespace().map(|word| expand(word, value)).collect()
}

/// Expands `$NAME` and `${NAME}` as Go's `os.Expand` does; unset variables are empty.
fn expand(word: &str, value: &dyn Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        let (name, more) = match after.strip_prefix('{') {
            Some(braced) => braced.split_once('}').unwrap_or(("", braced)),
            None => {
                let end = after
                    .find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
                    .unwrap_or(after.len());
                if end == 0 {
                    text.push('$');
                }
                after.split_at(end)
            }
        };
        text.push_str(&value(name).unwrap_or_default());
        rest = more;
    }
    text + rest
}

/// `output` in one line of bounded length.
pub(super) fn quote(output: &str) -> String {
    let mut text: String = output
        .chars()
        .take(QUOTED_CHARACTERS_MAX)
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .collect();
    if output.chars().nth(QUOTED_CHARACTERS_MAX).is_some() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    fn value(name: &str) -> Option<String> {
        match name {
            "SUBNET" => Some("10.5.1.0/24".to_owned()),
            "HOSTILE" => Some("a; reboot $(reboot) `reboot`".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn words_split_before_variables_expand() {
        let split = |command: &str| words(command, &value);
        assert_eq!(split("ip route  add $SUBNET"), ["ip", "route", "add", "10.5.1.0/24"]);
        assert_eq!(split("x ${SUBNET}y $SUBNET.z"), ["x", "10.5.1.0/24y", "10.5.1.0/24.z"]);
        assert_eq!(
            split("echo $HOSTILE '; |"),
            ["echo", "a; reboot $(reboot) `reboot`", "';", "|"],
            "a value makes no words, and no letter means anything"
        );
        assert_eq!(split("a $NONE b$ ${} ${SUBNET"), ["a", "", "b$", "", "SUBNET"]);
        assert!(split("  ").is_empty());
    }

    async fn run(
        text: &str,
        variables: &Variables,
        stdin: &str,
        time_max: Duration,
    ) -> Result<String, CommandError> {
        super::run(&CommandLine(text.to_owned()), variables, stdin, time_max).await
    }

    #[test]
    fn errors_show_no_arguments() {
        for text in ["false s3cret", "/nonexistent/of/weft --token=s3cret"] {
            let error = enter(run(text, &Variables::new(), "", RUN_TIME_MAX)).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(said.contains(text.split(' ').next().unwrap()), "{said}");
            assert!(!said.contains("s3cret"), "{said}");
        }
    }

    fn enter<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work)
    }

    #[test]
    fn output_is_trimmed_and_bounded() {
        let variables = vec![("SUBNET", "10.5.1.0/24".to_owned())];
        enter(async {
            let text = run("printenv SUBNET", &variables, "", RUN_TIME_MAX).await.unwrap();
            assert_eq!(text, "10.5.1.0/24");
            let text = run("cat", &variables, "what\nis given", RUN_TIME_MAX).await.unwrap();
            assert_eq!(text, "what\nis given");
            let error =
                run("ls /nonexistent/of/weft", &variables, "", RUN_TIME_MAX).await.unwrap_err();
            assert!(error.to_string().contains("ls: "), "{error}");
            let error =
                run("/nonexistent/of/weft", &variables, "", RUN_TIME_MAX).await.unwrap_err();
            assert!(error.to_string().contains("/nonexistent/of/weft"), "{error}");
            let long =
                run("head -c 1000000 /dev/zero", &variables, "", RUN_TIME_MAX).await.unwrap();
            assert_eq!(long.len(), OUTPUT_BYTES_MAX, "output fills the memory");
        });
    }

    /// Whether a process runs; one that only waits for its parent to hear of its end does not.
    fn runs(id: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
    }

    #[test]
    fn children_die_only_with_an_unfinished_command() {
        let dir = tempfile::tempdir().unwrap();
        let (script, told) = (dir.path().join("script"), dir.path().join("child"));
        // Written in one step, so that a reader never finds half a number.
        let text =
            "sleep 600 >/dev/null 2>&1 & echo $! > $2.new; mv $2.new $2; [ $1 = leave ] || wait";
        std::fs::write(&script, text).unwrap();
        let command = |what: &str| format!("sh {} {what} {}", script.display(), told.display());
        let child = || std::fs::read_to_string(&told).unwrap().trim().to_owned();
        let pause = || sleep(Duration::from_millis(5));
        let soon = Duration::from_secs(30);
        enter(async {
            let (command, none) = (command("hang"), Variables::new());
            let begun = async {
                while !told.exists() {
                    pause().await;
                }
            };
            tokio::select! {
                result = run(&command, &none, "", RUN_TIME_MAX) => {
                    panic!("it does not hang: {result:?}")
                }
                begun = timeout(soon, begun) => begun.expect("the script begins"),
            }
            let gone = async {
                while runs(&child()) {
                    pause().await;
                }
            };
            let gone = timeout(soon, gone).await;
            assert!(gone.is_ok(), "a stop leaves the children of a script behind");
        });
        enter(async {
            run(&command("leave"), &Variables::new(), "", RUN_TIME_MAX).await.unwrap();
            assert!(runs(&child()), "what a command started for good is killed");
            let left = child().parse().ok().and_then(Pid::from_raw).unwrap();
            rustix::process::kill_process(left, Signal::KILL).unwrap();
        });
    }

    #[test]
    fn hanging_command_is_killed() {
        enter(async {
            let limit = Duration::from_millis(200);
            let begun = std::time::Instant::now();
            let error = run("sleep 600", &Variables::new(), "", limit).await.unwrap_err();
            assert!(error.to_string().contains("killed after"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        });
    }
}

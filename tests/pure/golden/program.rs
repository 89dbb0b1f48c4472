//! weftd's outcome for a command line and an environment.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::golden::table::Case;

const WEFTD: &str = env!("CARGO_BIN_EXE_weftd");

/// Begins the line of all options as weftd understood them, which it logs if asked to log more.
const RECORD: &str = "Options as understood: ";

/// How often weftd is started at most until it says something. At its end it waits 300 ms for the
/// thread that writes its log, which on a busy machine may have had no processor by then.
const RUNS_MAX: u32 = 3;

/// How a start ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    /// Standard error; quotes in lines of JSON are as in those of text.
    pub(crate) said: String,
}

/// Starts weftd far enough to see how it took its flags. Another process holds the subnet file's
/// lock, which ends it before it touches the host or asks a store.
pub(crate) fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let dir = TempDir::new().expect("a directory for the test");
    let path = dir.path().join("subnet.env.lock");
    let mut options = OpenOptions::new();
    let lock = options.write(true).create(true).truncate(false).mode(0o600).open(path);
    let lock = lock.expect("it is writable");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("nobody else locks");
    let asks = |word: &str| word.starts_with("-v") || word.starts_with("--v");
    let is_asked = arguments.iter().any(|word| asks(word))
        || variables.iter().any(|(name, _)| *name == "FLANNELD_V");
    let run = || {
        Command::new(WEFTD)
            .args((!is_asked).then_some("-v=1"))
            .arg(format!("-subnet-file={}", dir.path().join("subnet.env").display()))
            .args(arguments)
            .env_clear()
            .env("NODE_NAME", "n1")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .output()
            .expect("weftd can be started")
    };
    let mut output = run();
    for _ in 1..RUNS_MAX {
        if output.stderr.is_empty() {
            output = run();
        }
    }
    assert!(output.stdout.is_empty(), "{arguments:?} writes on standard output");
    let said = String::from_utf8_lossy(&output.stderr).replace("\\\"", "\"");
    Ended { code: output.status.code(), said }
}

impl Ended {
    /// Whether its flags were fine.
    pub(crate) fn runs(&self) -> bool {
        self.said.contains(RECORD)
    }

    /// What the record of the options holds as `field`.
    pub(crate) fn field(&self, field: &str) -> Option<&str> {
        let (_, record) = self.said.split_once(RECORD)?;
        let (_, value) = record.split_once(&format!(" {field}: "))?;
        let (mut depth, mut quoted) = (0, false);
        let end = value.find(|character| {
            match character {
                '"' => quoted = !quoted,
                '(' | '[' | '{' if !quoted => depth += 1,
                ')' | ']' if !quoted => depth -= 1,
                '}' if depth > 0 && !quoted => depth -= 1,
                ',' | '}' | '\n' => return depth == 0 && !quoted,
                _ => {}
            }
            false
        });
        Some(value[..end.unwrap_or(value.len())].trim_end())
    }
}

/// The outcome of a `run`: `given` has variables, then arguments.
pub(crate) fn outcome(case: &Case) -> String {
    let is_variable = |word: &&str| word.starts_with(|c: char| c.is_ascii_uppercase());
    let words: Vec<_> = case.given.split(' ').collect();
    let variables: Vec<_> =
        words.iter().copied().take_while(is_variable).filter_map(|w| w.split_once('=')).collect();
    let ended = start(&words[variables.len()..], &variables);
    if ended.runs() {
        // As the case has it: `runs, field: value`.
        let (_, asked) = case.expected().split_once(", ").unwrap_or_default();
        let field = asked.split(':').next().unwrap_or_default();
        let warns = ended.said.lines().any(|line| line.starts_with('W'));
        let warning = if warns { " with a warning" } else { "" };
        return format!("runs{warning}, {field}: {}", ended.field(field).unwrap_or("not shown"));
    }
    let said = ended.said.replace(WEFTD, "<program>");
    let (first, rest) = said.split_once('\n').unwrap_or((&said, ""));
    let first = if first == env!("CARGO_PKG_VERSION") { "<version>" } else { first };
    let also = match rest.split(' ').next().unwrap_or_default() {
        "" => "",
        "Usage:" => " + usage",
        "Try" => " + hint",
        _ if first.starts_with("Usage:") => "",
        _ => " + more",
    };
    let code = ended.code.map_or_else(|| "a signal".to_owned(), |code| code.to_string());
    format!("exit {code}: {first}{also}")
}

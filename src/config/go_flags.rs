//! Go's `flag` package as flanneld's users know it: syntax of arguments, of booleans and of
//! integers, the environment rule, and the usage text. Knows types and places, never meanings.

use std::ffi::OsString;
use std::fmt;
use std::fmt::Write as _;

use crate::config::flag_table::{FLAGS, Flag, Setting, Settings, Slot, Source};
use crate::config::options::Secret;

/// Why the arguments stop a start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SyntaxError {
    /// `-h` or `--help`: not an error, but it ends parsing.
    #[error("help requested")]
    Help,
    /// No name after the dashes.
    #[error("bad flag syntax: {0}")]
    Malformed(String),
    /// No such flag.
    #[error("flag provided but not defined: -{0}")]
    Unknown(String),
    /// The last argument is a flag that takes a value.
    #[error("flag needs an argument: -{0}")]
    NoValue(&'static str),
    /// A value that its flag cannot hold.
    #[error("invalid value {value:?} for flag -{flag}: {problem}")]
    Value {
        /// The flag's name.
        flag: &'static str,
        /// The text given.
        value: String,
        /// What is wrong with it.
        problem: ValueProblem,
    },
    /// A value that is no boolean, worded as in Go.
    #[error("invalid boolean value {value:?} for -{flag}: {}", ValueProblem::Syntax)]
    Boolean {
        /// The flag's name.
        flag: &'static str,
        /// The text given.
        value: String,
    },
    /// Bytes that are no text. Holds the flag, never the value, which may be a secret.
    #[error("the argument or value of {0} is not UTF-8")]
    NotUtf8(String),
}

/// What is wrong with a value; worded as in Go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ValueProblem {
    /// Not the syntax of the type.
    #[error("parse error")]
    Syntax,
    /// An integer beyond 64 bits.
    #[error("value out of range")]
    Range,
}

/// Reads the arguments after the program's name into `settings`.
///
/// Parsing stops at the first word that is no flag, or after `--`; what follows is ignored.
pub(super) fn read_arguments(
    arguments: impl IntoIterator<Item = OsString>,
    settings: &mut Settings,
) -> Result<Option<Ignored>, SyntaxError> {
    let mut arguments = arguments.into_iter().enumerate();
    while let Some((index, argument)) = arguments.next() {
        let stop = |rest: usize| Ok(Some(Ignored { position: index + 1, arguments: rest + 1 }));
        let argument = match argument.into_string() {
            Ok(argument) => argument,
            Err(raw) if raw.as_encoded_bytes().starts_with(b"-") => {
                let text = raw.to_string_lossy();
                let name = text.split('=').next().unwrap_or_default();
                return Err(SyntaxError::NotUtf8(name.to_owned()));
            }
            Err(_) => return stop(arguments.count()),
        };
        let Some(body) = flag_body(&argument) else { return stop(arguments.count()) };
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(SyntaxError::Malformed(argument));
        }
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) else {
            return Err(match name {
                "help" | "h" => SyntaxError::Help,
                _ => SyntaxError::Unknown(name.to_owned()),
            });
        };
        let value = match (inline, flag.slot) {
            (Some(value), _) => value,
            (None, Slot::Bool(_)) => "true".to_owned(),
            (None, Slot::Text(_) | Slot::Secret(_) | Slot::List(_) | Slot::Int(_)) => arguments
                .next()
                .ok_or(SyntaxError::NoValue(flag.name))?
                .1
                .into_string()
                .map_err(|_value| SyntaxError::NotUtf8(format!("-{}", flag.name)))?,
        };
        assign(flag, settings, value, Source::CommandLine)?;
    }
    Ok(None)
}

/// Arguments that Go's flag package leaves unread, and so do we. They are counted and not kept:
/// one of them may be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ignored {
    /// Which argument ended the flags, counted from 1.
    position: usize,
    /// How many are ignored, that one included.
    arguments: usize,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { position, arguments } = self;
        write!(
            f,
            "argument {position} is no flag, so the last {arguments} of the command line are \
             ignored, as flanneld does; a boolean flag takes its value only with =, as in \
             --ip-masq=false"
        )
    }
}

/// Reads `FLANNELD_*` for every flag that the command line left alone. A value that does not
/// parse leaves the default; the complaint is returned for the log.
pub(super) fn read_environment(
    variable: impl Fn(&str) -> Option<OsString>,
    settings: &mut Settings,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for flag in FLAGS.iter().filter(|flag| flag.name != "version") {
        if is_given(flag, settings) {
            continue;
        }
        let name = environment_name(flag.name);
        let Some(value) = variable(&name).filter(|value| !value.is_empty()) else { continue };
        let outcome = value
            .into_string()
            .map_err(|_value| SyntaxError::NotUtf8(format!("-{}", flag.name)))
            .and_then(|value| assign(flag, settings, value, Source::Environment));
        if let Err(error) = outcome {
            complaints.push(format!("failed to set flag from {name}, ignoring it: {error}"));
        }
    }
    complaints
}

/// The variable that stands for a flag.
pub(super) fn environment_name(flag: &str) -> String {
    format!("FLANNELD_{}", flag.to_ascii_uppercase().replace('-', "_"))
}

/// Go's usage text.
pub(super) fn usage(program: &str) -> String {
    let mut text = format!("Usage: {program} [OPTION]...\n");
    let mut defaults = Settings::default();
    for flag in FLAGS {
        let (value_name, help) = unquote(flag);
        let mut line = format!("  -{}", flag.name);
        if !value_name.is_empty() {
            line.push(' ');
            line.push_str(value_name);
        }
        line.push_str(if line.len() <= 4 { "\t" } else { "\n    \t" });
        text.push_str(&line);
        text.push_str(&help);
        text.push_str(&default_note(flag, &mut defaults));
        text.push('\n');
    }
    text
}

/// What follows the dashes; `None` if the word is no flag or ends the flags.
fn flag_body(argument: &str) -> Option<&str> {
    let body = argument.strip_prefix('-')?;
    match body {
        "" | "-" => None,
        _ => Some(body.strip_prefix('-').unwrap_or(body)),
    }
}

fn is_given(flag: &Flag, settings: &mut Settings) -> bool {
    match flag.slot {
        Slot::Text(at) => at(settings).is_given(),
        Slot::Secret(at) => at(settings).is_given(),
        Slot::List(at) => at(settings).is_given(),
        Slot::Bool(at) => at(settings).is_given(),
        Slot::Int(at) => at(settings).is_given(),
    }
}

fn assign(
    flag: &Flag,
    settings: &mut Settings,
    value: String,
    source: Source,
) -> Result<(), SyntaxError> {
    let refuse = |problem| SyntaxError::Value { flag: flag.name, value: value.clone(), problem };
    match flag.slot {
        Slot::Text(at) => at(settings).set(value, source),
        Slot::Secret(at) => at(settings).set(Secret(value), source),
        Slot::List(at) => {
            let Setting { value: list, source: at_source } = at(settings);
            list.push(value);
            *at_source = source;
        }
        Slot::Bool(at) => {
            let Some(parsed) = parse_bool(&value) else {
                return Err(SyntaxError::Boolean { flag: flag.name, value });
            };
            at(settings).set(parsed, source);
        }
        Slot::Int(at) => {
            let parsed = parse_int(&value).map_err(refuse)?;
            at(settings).set(parsed, source);
        }
    }
    Ok(())
}

/// Go's `strconv.ParseBool`.
fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Go's `strconv.ParseInt` with base 0: sign, base prefix, underscores between digits.
fn parse_int(text: &str) -> Result<i64, ValueProblem> {
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match unsigned.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &unsigned[2..]),
        [b'0', b'o' | b'O', ..] => (8, &unsigned[2..]),
        [b'0', b'b' | b'B', ..] => (2, &unsigned[2..]),
        [b'0', _, ..] => (8, &unsigned[1..]),
        _ => (10, unsigned),
    };
    let after_prefix = digits.len() < unsigned.len();
    let digits = without_underscores(digits, after_prefix).ok_or(ValueProblem::Syntax)?;
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(ValueProblem::Syntax);
    }
    let sign = if negative { "-" } else { "" };
    i64::from_str_radix(&format!("{sign}{digits}"), radix)
        .map_err(|_out_of_i64| ValueProblem::Range)
}

/// Underscores may only separate digits, or a base prefix from the first digit.
fn without_underscores(digits: &str, after_prefix: bool) -> Option<String> {
    let misplaced = digits.ends_with('_')
        || digits.contains("__")
        || (digits.starts_with('_') && !after_prefix);
    (!misplaced).then(|| digits.replace('_', ""))
}

/// Splits the help into the value's name and the sentence, as Go's `UnquoteUsage`.
fn unquote(flag: &Flag) -> (&'static str, String) {
    let mut parts = flag.help.splitn(3, '`');
    if let (Some(before), Some(name), Some(after)) = (parts.next(), parts.next(), parts.next()) {
        return (name, format!("{before}{name}{after}"));
    }
    let by_type = match flag.slot {
        Slot::Text(_) | Slot::Secret(_) => "string",
        Slot::List(_) => "value",
        Slot::Bool(_) => "",
        Slot::Int(_) => "int",
    };
    (by_type, flag.help.to_owned())
}

fn default_note(flag: &Flag, defaults: &mut Settings) -> String {
    let mut note = String::new();
    let written = match flag.slot {
        Slot::Text(at) if !at(defaults).value.is_empty() => {
            write!(note, " (default {:?})", at(defaults).value)
        }
        Slot::Bool(at) if at(defaults).value => write!(note, " (default true)"),
        Slot::Int(at) if at(defaults).value != 0 => {
            write!(note, " (default {})", at(defaults).value)
        }
        Slot::Text(_) | Slot::Secret(_) | Slot::List(_) | Slot::Bool(_) | Slot::Int(_) => Ok(()),
    };
    debug_assert!(written.is_ok(), "writing to a string cannot fail");
    note
}

#[cfg(test)]
#[path = "go_flags_tests.rs"]
mod tests;

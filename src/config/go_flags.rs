//! Go's `flag` package as flanneld's users know it: syntax of arguments, of booleans and of
//! integers, the environment rule, and the usage text. Knows syntax, not meaning.

use std::ffi::OsString;

use crate::config::flag_table::{FLAGS, Flag, Settings};
use crate::config::setting::{Source, ValueProblem};

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

/// Reads the arguments after the program's name into `settings`.
///
/// Parsing stops at the first word that is no flag, or after `--`; what follows is ignored.
pub(super) fn read_arguments(
    arguments: impl IntoIterator<Item = OsString>,
    settings: &mut Settings,
) -> Result<Option<String>, SyntaxError> {
    let mut arguments = arguments.into_iter().enumerate();
    while let Some((index, argument)) = arguments.next() {
        let stop = |rest: usize| Ok(Some(ignored(index + 1, rest + 1)));
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
        let value = match inline {
            Some(value) => value,
            None if (flag.setting)(settings).type_name().is_empty() => "true".to_owned(),
            None => arguments
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

/// The warning about arguments that Go's flag package leaves unread, and so do we. They are counted
/// and not shown: one of them may be a secret. Positions count from 1.
fn ignored(position: usize, arguments: usize) -> String {
    format!(
        "argument {position} is no flag, so the last {arguments} of the command line are ignored, \
         as flanneld does; a boolean flag takes its value only with =, as in --ip-masq=false"
    )
}

/// Reads `FLANNELD_*` for every flag that the command line left alone. A value that does not
/// parse leaves the default; the complaint is returned for the log.
pub(super) fn read_environment(
    variable: impl Fn(&str) -> Option<OsString>,
    settings: &mut Settings,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for flag in FLAGS.iter().filter(|flag| flag.name != "version") {
        if flag.given(settings).is_some() {
            continue;
        }
        let name = flag.variable();
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

/// Go's usage text.
pub(super) fn usage(program: &str) -> String {
    let mut text = format!("Usage: {program} [OPTION]...\n");
    let mut defaults = Settings::default();
    for flag in FLAGS {
        let setting = (flag.setting)(&mut defaults);
        let (value_name, help) = unquote(flag, setting.type_name());
        let mut line = format!("  -{}", flag.name);
        if !value_name.is_empty() {
            line.push(' ');
            line.push_str(value_name);
        }
        line.push_str(if line.len() <= 4 { "\t" } else { "\n    \t" });
        text.push_str(&line);
        text.push_str(&help);
        let default = setting.shown();
        if !default.is_empty() {
            text.push_str(&format!(" (default {default})"));
        }
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

fn assign(
    flag: &Flag,
    settings: &mut Settings,
    value: String,
    source: Source,
) -> Result<(), SyntaxError> {
    let setting = (flag.setting)(settings);
    let flag = flag.name;
    match setting.assign(&value, source) {
        Ok(()) => Ok(()),
        Err(_) if setting.type_name().is_empty() => Err(SyntaxError::Boolean { flag, value }),
        Err(problem) => Err(SyntaxError::Value { flag, value, problem }),
    }
}

/// Splits the help into the value's name and the sentence, as Go's `UnquoteUsage`.
fn unquote(flag: &Flag, type_name: &'static str) -> (&'static str, String) {
    let mut parts = flag.help.splitn(3, '`');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(name), Some(after)) => (name, format!("{before}{name}{after}")),
        _ => (type_name, flag.help.to_owned()),
    }
}

#[cfg(test)]
#[path = "go_flags_tests.rs"]
mod tests;

//! Go's `flag` package as flanneld's users know it: syntax of arguments, of booleans and of
//! integers, the environment rule, and the usage text. Knows syntax, not meaning.

use std::ffi::OsString;

use crate::config::flag_table::{FLAGS, Flag, Settings};

/// Why the arguments stop a start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SyntaxError {
    /// `-h` or `--help`: not an error, but it ends parsing.
    #[error("help requested")]
    Help,
    /// What is wrong, in Go's words where Go has some.
    #[error("{0}")]
    Complaint(String),
}

/// Reads the arguments after the program's name into `settings`.
///
/// Parsing stops at the first word that is not a flag, or after `--`; what follows is ignored.
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
                return Err(not_utf8(name));
            }
            Err(_) => return stop(arguments.count()),
        };
        let Some(body) = flag_body(&argument) else { return stop(arguments.count()) };
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(SyntaxError::Complaint(format!("bad flag syntax: {argument}")));
        }
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) else {
            return Err(match name {
                "help" | "h" => SyntaxError::Help,
                _ => SyntaxError::Complaint(format!("flag provided but not defined: -{name}")),
            });
        };
        let value = match inline {
            Some(value) => value,
            None if (flag.value)(settings).type_name().is_empty() => "true".to_owned(),
            None => match arguments.next() {
                Some((_, value)) => text_of(flag, value)?,
                None => {
                    let complaint = format!("flag needs an argument: -{name}");
                    return Err(SyntaxError::Complaint(complaint));
                }
            },
        };
        assign(flag, settings, &value, format!("--{name}"))?;
    }
    Ok(None)
}

/// The warning about arguments that Go's flag package leaves unread, and so do we. They are counted
/// and not shown: one of them may be a secret. Positions count from 1.
fn ignored(position: usize, arguments: usize) -> String {
    format!(
        "argument {position} is not a flag, so the last {arguments} of the command line are \
         ignored, as flanneld does; a boolean flag takes its value only with =, as in \
         --ip-masq=false"
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
        if settings.given.contains_key(flag.name) {
            continue;
        }
        let name = format!("FLANNELD_{}", flag.name.to_ascii_uppercase().replace('-', "_"));
        let Some(value) = variable(&name).filter(|value| !value.is_empty()) else { continue };
        let outcome =
            text_of(flag, value).and_then(|value| assign(flag, settings, &value, name.clone()));
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
        let value = (flag.value)(&mut defaults);
        let (value_name, help) = unquote(flag, value.type_name());
        let mut line = format!("  -{}", flag.name);
        if !value_name.is_empty() {
            line.push(' ');
            line.push_str(value_name);
        }
        line.push_str(if line.len() <= 4 { "\t" } else { "\n    \t" });
        text.push_str(&line);
        text.push_str(&help);
        let default = value.shown();
        if !default.is_empty() {
            text.push_str(&format!(" (default {default})"));
        }
        text.push('\n');
    }
    text
}

/// What follows the dashes; `None` if the word is not a flag or ends the flags.
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
    text: &str,
    given: String,
) -> Result<(), SyntaxError> {
    let (name, value) = (flag.name, (flag.value)(settings));
    value.read(text).map_err(|problem| {
        SyntaxError::Complaint(if value.type_name().is_empty() {
            format!("invalid boolean value {text:?} for -{name}: {problem}")
        } else {
            format!("invalid value {text:?} for flag -{name}: {problem}")
        })
    })?;
    settings.given.insert(name, given);
    Ok(())
}

fn text_of(flag: &Flag, value: OsString) -> Result<String, SyntaxError> {
    value.into_string().map_err(|_secret| not_utf8(&format!("-{}", flag.name)))
}

/// Names the flag, never the value, which may be a secret.
fn not_utf8(flag: &str) -> SyntaxError {
    SyntaxError::Complaint(format!("the argument or value of {flag} is not UTF-8"))
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

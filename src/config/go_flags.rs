//! Go's `flag` package as flanneld's users know it: syntax of arguments, of booleans and of
//! integers, the environment rule, and the usage text. Knows syntax, not meaning.

use std::ffi::OsString;

use crate::config::checked::Variable;
use crate::config::flag_table::{FLAGS, Flag, FlagValues};
use crate::config::value::Place;

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

/// Reads the arguments after the program's name into `values`.
///
/// Parsing stops at the first word that is not a flag, or after `--`; what follows is ignored.
pub(super) fn read_arguments(
    arguments: impl IntoIterator<Item = OsString>,
    values: &mut FlagValues,
) -> Result<Option<String>, SyntaxError> {
    let words: Vec<_> =
        arguments.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let body = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
        let Some(body) = body.filter(|body| !body.is_empty()) else {
            return Ok(Some(ignored(words.len() - rest.len(), rest.len() + 1)));
        };
        if body.starts_with(['-', '=']) {
            return Err(SyntaxError::Complaint(format!("bad flag syntax: {word}")));
        }
        let (name, inline) =
            body.split_once('=').map_or((body, None), |(name, value)| (name, Some(value)));
        let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) else {
            return Err(match name {
                "help" | "h" => SyntaxError::Help,
                _ => SyntaxError::Complaint(format!("flag provided but not defined: -{name}")),
            });
        };
        let value = match inline {
            Some(value) => value,
            None if matches!((flag.place)(values), Place::Switch(_)) => "true",
            None => rest.next().ok_or_else(|| {
                SyntaxError::Complaint(format!("flag needs an argument: -{name}"))
            })?,
        };
        assign(flag, values, value, format!("--{name}"))?;
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
pub(super) fn read_environment(variable: Variable<'_>, values: &mut FlagValues) -> Vec<String> {
    let mut complaints = Vec::new();
    for flag in FLAGS.iter().filter(|flag| flag.name != "version") {
        if values.given.contains_key(flag.name) {
            continue;
        }
        let name = format!("FLANNELD_{}", flag.name.to_ascii_uppercase().replace('-', "_"));
        let Some(value) = variable(&name).filter(|value| !value.is_empty()) else { continue };
        if let Err(error) = assign(flag, values, &value.to_string_lossy(), name.clone()) {
            complaints.push(format!("failed to set flag from {name}, ignoring it: {error}"));
        }
    }
    complaints
}

/// Go's usage text.
pub(super) fn usage(program: &str) -> String {
    let mut text = format!("Usage: {program} [OPTION]...\n");
    let mut defaults = FlagValues::default();
    for flag in FLAGS {
        let value = (flag.place)(&mut defaults);
        let (value_name, help) = unquote(flag, value.type_name());
        let line = format!("  -{} {value_name}", flag.name);
        let line = line.trim_end();
        let gap = if line.len() <= 4 { "\t" } else { "\n    \t" };
        text.push_str(&format!("{line}{gap}{help}{}\n", value.default_text()));
    }
    text
}

/// Gives a flag the value `text`. That it is not UTF-8 is said without it: it may be a secret.
fn assign(
    flag: &Flag,
    values: &mut FlagValues,
    text: &str,
    given: String,
) -> Result<(), SyntaxError> {
    let (name, place) = (flag.name, (flag.place)(values));
    let is_switch = matches!(place, Place::Switch(_));
    let (kind, dash) = if is_switch { ("boolean value", "-") } else { ("value", "flag -") };
    // What is not UTF-8 has been read as this character.
    if text.contains(char::REPLACEMENT_CHARACTER) {
        let complaint = format!("the argument or value of -{name} is not UTF-8");
        return Err(SyntaxError::Complaint(complaint));
    }
    place.read(text).map_err(|problem| {
        SyntaxError::Complaint(format!("invalid {kind} {text:?} for {dash}{name}: {problem}"))
    })?;
    values.given.insert(name, given);
    Ok(())
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

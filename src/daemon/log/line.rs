//! One line of the log, in klog's form or as a JSON object. Pure: a record in, text out; whatever
//! the record holds, the text is one line without control characters.

use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use derive_more::Display;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

use crate::config::options::LogFormat;
use crate::control::clock::{format_rfc3339, timestamp};
use crate::failure::with_causes;
use crate::words::visible;

/// Form and constant parts of the lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) format: LogFormat,
    pub(super) process_id: u32,
    /// Whether each line begins with its priority, which the journal takes for itself
    /// (sd-daemon(3)).
    pub(super) has_priority: bool,
}

/// What an event says.
#[derive(Debug, Default)]
pub(super) struct Fields {
    message: String,
    others: Vec<(&'static str, String)>,
}

/// A log call in the program. It shows as file and line, without the directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Display)]
#[display("{}:{line}", file.rsplit('/').next().unwrap_or(file))]
pub(super) struct Place {
    pub(super) level: Level,
    /// The file of the program, with its directories.
    pub(super) file: &'static str,
    pub(super) line: u32,
}

impl Place {
    pub(super) fn of(metadata: &'static Metadata<'static>) -> Self {
        let (file, line) = (metadata.file().unwrap_or("unknown"), metadata.line().unwrap_or(0));
        Self { level: *metadata.level(), file, line }
    }
}

impl Style {
    /// The line, with its end.
    pub(super) fn line(self, time: SystemTime, place: Place, fields: Fields) -> String {
        let time = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = match self.format {
            LogFormat::Text => self.text(time, place, &fields),
            LogFormat::Json => json(time, place, fields),
        };
        let (_, priority) = letter_and_priority(place.level);
        if self.has_priority { format!("<{priority}>{line}") } else { line }
    }

    /// klog's `Lmmdd hh:mm:ss.uuuuuu PID file:line] message`, then `key=value`.
    fn text(self, time: Duration, place: Place, fields: &Fields) -> String {
        let date_and_time = timestamp(time.as_secs()).strftime("%m%d %H:%M:%S");
        let (letter, _) = letter_and_priority(place.level);
        let (microseconds, process) = (time.subsec_micros(), self.process_id);
        let message = visible(&fields.message);
        let mut line =
            format!("{letter}{date_and_time}.{microseconds:06} {process:>7} {place}] {message}");
        for (key, value) in &fields.others {
            let is_quoted = value.is_empty()
                || value.contains(|c: char| c.is_whitespace() || c == '"' || c == '=');
            let value = if is_quoted { format!("{value:?}") } else { visible(value) };
            line.push_str(&format!(" {key}={value}"));
        }
        line + "\n"
    }
}

/// klog's letter of a level, and syslog's number (syslog(3)).
fn letter_and_priority(level: Level) -> (char, u8) {
    match level {
        Level::ERROR => ('E', 3),
        Level::WARN => ('W', 4),
        Level::INFO => ('I', 6),
        Level::DEBUG | Level::TRACE => ('I', 7),
    }
}

fn json(time: Duration, place: Place, fields: Fields) -> String {
    let fraction = format!(".{:06}Z", time.subsec_micros());
    let mut object = Map::new();
    for (key, text) in [
        ("time", format_rfc3339(time.as_secs()).replace('Z', &fraction)),
        ("level", place.level.as_str().to_ascii_lowercase()),
        ("source", place.to_string()),
        ("message", fields.message),
    ]
    .into_iter()
    .chain(fields.others)
    {
        // An event's own field of such a name moves aside rather than vanish.
        let is_taken = object.contains_key(key);
        let key = if is_taken { format!("field_{key}") } else { key.to_owned() };
        object.insert(key, Value::String(text));
    }
    format!("{}\n", Value::Object(object))
}

impl Fields {
    /// A plain message.
    pub(super) fn message(message: String) -> Self {
        Self { message, others: Vec::new() }
    }

    fn push(&mut self, field: &Field, text: String) {
        match field.name() {
            "message" => self.message = text,
            name => self.others.push((name, text)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.to_owned());
    }

    /// An error with its causes.
    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.push(field, with_causes(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: u64, microseconds: u32) -> SystemTime {
        UNIX_EPOCH + Duration::new(seconds, microseconds * 1000)
    }

    fn fields(message: &str, others: &[(&'static str, &str)]) -> Fields {
        let others = others.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        Fields { message: message.to_owned(), others }
    }

    fn place(level: Level) -> Place {
        Place { level, file: "src/daemon/run.rs", line: 7 }
    }

    #[test]
    fn klogs_header() {
        let style = Style { format: LogFormat::Text, process_id: 4321, has_priority: false };
        let at = time(951_782_400 + 5 * 3600 + 4 * 60 + 3, 42);
        for (level, letter) in [
            (Level::ERROR, 'E'),
            (Level::WARN, 'W'),
            (Level::INFO, 'I'),
            (Level::DEBUG, 'I'),
            (Level::TRACE, 'I'),
        ] {
            assert_eq!(
                style.line(at, place(level), fields("Exiting cleanly...", &[])),
                format!("{letter}0229 05:04:03.000042    4321 run.rs:7] Exiting cleanly...\n")
            );
        }
    }

    #[test]
    fn the_journal_gets_priorities() {
        let line = |format, level| {
            let style = Style { format, process_id: 1, has_priority: true };
            style.line(time(951_782_400, 0), place(level), fields("m", &[]))
        };
        for (level, priority) in
            [(Level::ERROR, "<3>E"), (Level::WARN, "<4>W"), (Level::INFO, "<6>I")]
        {
            assert!(line(LogFormat::Text, level).starts_with(priority), "{level}");
        }
        assert!(line(LogFormat::Json, Level::DEBUG).starts_with("<7>{"));
    }

    #[test]
    fn values_follow_the_message_and_forge_nothing() {
        let style = Style { format: LogFormat::Text, process_id: 1, has_priority: false };
        let record = fields(
            "bad value\nE0101 forged \x1b[2J",
            &[("plain", "eth0"), ("spaced", "a \"b\"\n"), ("empty", "")],
        );
        let line = style.line(time(0, 0), place(Level::INFO), record);
        assert_eq!(
            line,
            "I0101 00:00:00.000000       1 run.rs:7] bad value\\nE0101 forged \\u{1b}[2J \
             plain=eth0 spaced=\"a \\\"b\\\"\\n\" empty=\"\"\n"
        );
    }

    #[test]
    fn json_is_one_object_a_line() {
        let style = Style { format: LogFormat::Json, process_id: 1, has_priority: false };
        let record = fields("two\nlines", &[("peers", "3"), ("level", "own")]);
        let line = style.line(time(1_700_000_000, 5), place(Level::WARN), record);
        assert_eq!(line.matches('\n').count(), 1);
        let object: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            object,
            serde_json::json!({
                "time": "2023-11-14T22:13:20.000005Z",
                "level": "warn",
                "source": "run.rs:7",
                "message": "two\nlines",
                "peers": "3",
                "field_level": "own",
            })
        );
    }
}

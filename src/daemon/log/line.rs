//! One line of the log, in klog's form or as a JSON object. Pure: a record in, text out; whatever
//! the record holds, the text is one line without control characters.

use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

use crate::config::flags::visible;
use crate::config::options::LogFormat;
use crate::control::clock::{format_rfc3339, timestamp};
use crate::failure::with_causes;

/// Form and constant parts of the lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    format: LogFormat,
    process_id: u32,
    /// Whether each line begins with its priority, for the journal.
    has_priority: bool,
}

/// What an event says.
#[derive(Debug, Default)]
pub(super) struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Style {
    pub(super) fn new(format: LogFormat, process_id: u32) -> Self {
        Self { format, process_id, has_priority: false }
    }

    /// For the journal, which takes a priority in front of a line for itself (sd-daemon(3)).
    pub(super) fn for_journal(self) -> Self {
        Self { has_priority: true, ..self }
    }

    /// The line, with its end. `source` is file and line of the program.
    pub(super) fn line(
        self,
        time: SystemTime,
        level: Level,
        source: &str,
        fields: Fields,
    ) -> String {
        let time = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = match self.format {
            LogFormat::Text => self.text(time, level, source, fields),
            LogFormat::Json => json(time, level, source, fields),
        };
        if self.has_priority { format!("<{}>{line}", priority(level)) } else { line }
    }

    /// klog's `Lmmdd hh:mm:ss.uuuuuu PID file:line] message`, then `key=value`.
    fn text(self, time: Duration, level: Level, source: &str, fields: Fields) -> String {
        let date_and_time = timestamp(time.as_secs()).strftime("%m%d %H:%M:%S");
        let letter = match level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        };
        let mut line = format!(
            "{letter}{date_and_time}.{:06} {:>7} {source}] ",
            time.subsec_micros(),
            self.process_id
        );
        line.push_str(&visible(&fields.message));
        for (key, value) in fields.others {
            line.push(' ');
            line.push_str(key);
            line.push('=');
            match value.as_str() {
                Some(text) if needs_quotes(text) => {
                    line.push('"');
                    line.push_str(&visible(&text.replace('\\', "\\\\").replace('"', "\\\"")));
                    line.push('"');
                }
                Some(text) => line.push_str(&visible(text)),
                None => line.push_str(&visible(&value.to_string())),
            }
        }
        line.push('\n');
        line
    }
}

/// syslog's number of a level (syslog(3)).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Where in the program an event comes from, without the directories.
pub(super) fn source_of(metadata: &Metadata<'_>) -> String {
    let path = metadata.file().unwrap_or("unknown");
    let file = path.rsplit('/').next().unwrap_or(path);
    format!("{file}:{}", metadata.line().unwrap_or(0))
}

fn json(time: Duration, level: Level, source: &str, fields: Fields) -> String {
    let mut object = Map::new();
    for (key, value) in fields.others {
        object.insert(key.to_owned(), value);
    }
    let fraction = format!(".{:06}Z", time.subsec_micros());
    let time = format_rfc3339(time.as_secs()).replace('Z', &fraction);
    let own = [
        ("time", time),
        ("level", level.as_str().to_ascii_lowercase()),
        ("source", source.to_owned()),
        ("message", fields.message),
    ];
    for (key, text) in own {
        // An event's own field of that name moves aside rather than vanish.
        if let Some(value) = object.insert(key.to_owned(), text.into()) {
            object.insert(format!("field_{key}"), value);
        }
    }
    format!("{}\n", Value::Object(object))
}

impl Fields {
    /// A plain message.
    pub(super) fn message(message: String) -> Self {
        Self { message, others: Vec::new() }
    }

    fn push(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => self.others.push((name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value.into());
    }

    /// An error with its causes.
    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.push(field, with_causes(value).into());
    }
}

fn needs_quotes(text: &str) -> bool {
    text.is_empty() || text.contains(|c: char| c.is_whitespace() || c == '"' || c == '=')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: u64, microseconds: u32) -> SystemTime {
        UNIX_EPOCH + Duration::new(seconds, microseconds * 1000)
    }

    fn fields(message: &str, others: &[(&'static str, Value)]) -> Fields {
        Fields { message: message.to_owned(), others: others.to_vec() }
    }

    #[test]
    fn klogs_header() {
        let style = Style::new(LogFormat::Text, 4321);
        let at = time(951_782_400 + 5 * 3600 + 4 * 60 + 3, 42);
        for (level, letter) in [
            (Level::ERROR, 'E'),
            (Level::WARN, 'W'),
            (Level::INFO, 'I'),
            (Level::DEBUG, 'I'),
            (Level::TRACE, 'I'),
        ] {
            assert_eq!(
                style.line(at, level, "run.rs:7", fields("Exiting cleanly...", &[])),
                format!("{letter}0229 05:04:03.000042    4321 run.rs:7] Exiting cleanly...\n")
            );
        }
    }

    #[test]
    fn the_journal_gets_priorities() {
        let line = |format, level| {
            let style = Style::new(format, 1).for_journal();
            style.line(time(951_782_400, 0), level, "run.rs:7", fields("m", &[]))
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
        let style = Style::new(LogFormat::Text, 1);
        let record = fields(
            "bad value\nE0101 forged \x1b[2J",
            &[
                ("plain", "eth0".into()),
                ("spaced", "a \"b\"\n".into()),
                ("empty", "".into()),
                ("count", 7.into()),
                ("on", true.into()),
            ],
        );
        let line = style.line(time(0, 0), Level::INFO, "x.rs:1", record);
        assert_eq!(
            line,
            "I0101 00:00:00.000000       1 x.rs:1] bad value\\nE0101 forged \\u{1b}[2J \
             plain=eth0 spaced=\"a \\\"b\\\"\\n\" empty=\"\" count=7 on=true\n"
        );
    }

    #[test]
    fn json_is_one_object_a_line() {
        let style = Style::new(LogFormat::Json, 1);
        let record = fields("two\nlines", &[("peers", 3.into()), ("level", "own".into())]);
        let line = style.line(time(1_700_000_000, 5), Level::WARN, "x.rs:1", record);
        assert_eq!(line.matches('\n').count(), 1);
        let object: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            object,
            serde_json::json!({
                "time": "2023-11-14T22:13:20.000005Z",
                "level": "warn",
                "source": "x.rs:1",
                "message": "two\nlines",
                "peers": 3,
                "field_level": "own",
            })
        );
    }
}

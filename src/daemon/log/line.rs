//! One line of the log, in klog's form or as a JSON object. Pure: a record in, text out; whatever
//! the record holds, the text is one line without control characters.

use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

use crate::config::options::LogFormat;
use crate::failure::with_causes;

/// Form and constant parts of the lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    format: LogFormat,
    process_id: u32,
}

/// What an event says.
#[derive(Debug, Default)]
pub(super) struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Style {
    pub(super) fn new(format: LogFormat, process_id: u32) -> Self {
        Self { format, process_id }
    }

    /// The line, with its end. `source` is file and line of the program.
    pub(super) fn line(
        self,
        time: SystemTime,
        level: Level,
        source: &str,
        fields: Fields,
    ) -> String {
        let time = UtcTime::from(time);
        match self.format {
            LogFormat::Text => self.text(&time, level, source, fields),
            LogFormat::Json => json(&time, level, source, fields),
        }
    }

    /// klog's `Lmmdd hh:mm:ss.uuuuuu PID file:line] message`, then `key=value`.
    fn text(self, time: &UtcTime, level: Level, source: &str, fields: Fields) -> String {
        let UtcTime { month, day, hour, minute, second, microsecond, .. } = time;
        let letter = match level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        };
        let mut line = format!(
            "{letter}{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{microsecond:06} \
             {:>7} {source}] ",
            self.process_id
        );
        push_visible(&mut line, &fields.message);
        for (key, value) in fields.others {
            line.push(' ');
            line.push_str(key);
            line.push('=');
            match value.as_str() {
                Some(text) if needs_quotes(text) => {
                    line.push('"');
                    push_visible(&mut line, &text.replace('\\', "\\\\").replace('"', "\\\""));
                    line.push('"');
                }
                Some(text) => push_visible(&mut line, text),
                None => push_visible(&mut line, &value.to_string()),
            }
        }
        line.push('\n');
        line
    }
}

/// Where in the program an event comes from, without the directories.
pub(super) fn source_of(metadata: &Metadata<'_>) -> String {
    let path = metadata.file().unwrap_or("unknown");
    let file = path.rsplit('/').next().unwrap_or(path);
    format!("{file}:{}", metadata.line().unwrap_or(0))
}

fn json(time: &UtcTime, level: Level, source: &str, fields: Fields) -> String {
    let UtcTime { year, month, day, hour, minute, second, microsecond } = time;
    let mut object = Map::new();
    for (key, value) in fields.others {
        object.insert(key.to_owned(), value);
    }
    let time = format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{microsecond:06}Z"
    );
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

/// Values come from outside: line breaks would forge lines, escape sequences drive terminals.
fn push_visible(line: &mut String, text: &str) {
    for character in text.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
}

/// A point in time on the calendar.
#[derive(Debug, PartialEq, Eq)]
struct UtcTime {
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    microsecond: u32,
}

impl From<SystemTime> for UtcTime {
    /// Gregorian calendar by counting 400-year eras that begin in March (Howard Hinnant,
    /// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
    fn from(time: SystemTime) -> Self {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let seconds = since_epoch.as_secs();
        let days = seconds / 86_400 + 719_468;
        let day_of_era = days % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        Self {
            year: days / 146_097 * 400 + year_of_era + u64::from(month <= 2),
            month,
            day: day_of_year - (153 * month_from_march + 2) / 5 + 1,
            hour: seconds / 3600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
            microsecond: since_epoch.subsec_micros(),
        }
    }
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

    #[test]
    fn calendar() {
        for (seconds, date) in [
            (0, (1970, 1, 1)),
            (86_400 * 58, (1970, 2, 28)),
            (86_400 * 59, (1970, 3, 1)),
            (951_782_400, (2000, 2, 29)),
            (951_868_800, (2000, 3, 1)),
            (1_735_689_599, (2024, 12, 31)),
            (1_735_689_600, (2025, 1, 1)),
            (4_107_542_400, (2100, 3, 1)),
        ] {
            let UtcTime { year, month, day, .. } = UtcTime::from(time(seconds, 0));
            assert_eq!((year, month, day), date, "{seconds}");
        }
    }

    #[test]
    fn each_day_follows_the_day_before() {
        let mut before = UtcTime::from(time(0, 0));
        for number in 1..80_000 {
            let day = UtcTime::from(time(number * 86_400, 0));
            let follows = if day.day > 1 {
                (day.year, day.month, day.day) == (before.year, before.month, before.day + 1)
            } else if day.month > 1 {
                (day.year, day.month) == (before.year, before.month + 1) && before.day >= 28
            } else {
                day.year == before.year + 1 && (before.month, before.day) == (12, 31)
            };
            assert!(follows, "{before:?} then {day:?}");
            before = day;
        }
    }
}

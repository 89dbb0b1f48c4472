//! One line of the log, in klog's form or as a JSON object. Pure: a record in, text out; whatever
//! the record holds, the text is one line without control characters.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use derive_more::Display;
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

use crate::control::clock::{format_rfc3339, timestamp};
use crate::words::visible;

/// Form and constant parts of the lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    /// Whether each line is a JSON object.
    pub(super) is_json: bool,
    pub(super) process_id: u32,
    /// Whether each line begins with its priority, which the journal takes for itself
    /// (sd-daemon(3)).
    pub(super) has_priority: bool,
}

/// What an event says: its message, then ` key=value` of what else it holds, as those of libraries
/// do.
#[derive(Debug, Default)]
pub(super) struct Text(pub(super) String);

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
    pub(super) fn line(self, time: SystemTime, place: Place, text: &str) -> String {
        let time = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let line =
            if self.is_json { json(time, place, text) } else { self.klog(time, place, text) };
        let (_, priority) = letter_and_priority(place.level);
        if self.has_priority { format!("<{priority}>{line}\n") } else { line + "\n" }
    }

    /// klog's `Lmmdd hh:mm:ss.uuuuuu PID file:line] text`.
    fn klog(self, time: Duration, place: Place, text: &str) -> String {
        let date_and_time = timestamp(time.as_secs()).strftime("%m%d %H:%M:%S");
        let (letter, _) = letter_and_priority(place.level);
        let (microseconds, process) = (time.subsec_micros(), self.process_id);
        let text = visible(text);
        format!("{letter}{date_and_time}.{microseconds:06} {process:>7} {place}] {text}")
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

fn json(time: Duration, place: Place, text: &str) -> String {
    let fraction = format!(".{:06}Z", time.subsec_micros());
    let object = json!({
        "time": format_rfc3339(time.as_secs()).replace('Z', &fraction),
        "level": place.level.as_str().to_ascii_lowercase(),
        "source": place.to_string(),
        "message": text,
    });
    object.to_string()
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.0.insert_str(0, &format!("{value:?}")),
            name => self.0.push_str(&format!(" {name}={value:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: u64, microseconds: u32) -> SystemTime {
        UNIX_EPOCH + Duration::new(seconds, microseconds * 1000)
    }

    fn place(level: Level) -> Place {
        Place { level, file: "src/daemon/run.rs", line: 7 }
    }

    #[test]
    fn klogs_header() {
        let style = Style { is_json: false, process_id: 4321, has_priority: false };
        let at = time(951_782_400 + 5 * 3600 + 4 * 60 + 3, 42);
        for (level, letter) in [
            (Level::ERROR, 'E'),
            (Level::WARN, 'W'),
            (Level::INFO, 'I'),
            (Level::DEBUG, 'I'),
            (Level::TRACE, 'I'),
        ] {
            assert_eq!(
                style.line(at, place(level), "Exiting cleanly..."),
                format!("{letter}0229 05:04:03.000042    4321 run.rs:7] Exiting cleanly...\n")
            );
        }
    }

    #[test]
    fn the_journal_gets_priorities() {
        let line = |is_json, level| {
            let style = Style { is_json, process_id: 1, has_priority: true };
            style.line(time(951_782_400, 0), place(level), "m")
        };
        for (level, priority) in
            [(Level::ERROR, "<3>E"), (Level::WARN, "<4>W"), (Level::INFO, "<6>I")]
        {
            assert!(line(false, level).starts_with(priority), "{level}");
        }
        assert!(line(true, Level::DEBUG).starts_with("<7>{"));
    }

    #[test]
    fn a_message_forges_no_line() {
        let style = Style { is_json: false, process_id: 1, has_priority: false };
        let text = "bad value\nE0101 forged \x1b[2J key=\"a\"\n";
        let line = style.line(time(0, 0), place(Level::INFO), text);
        assert_eq!(
            line,
            "I0101 00:00:00.000000       1 run.rs:7] bad value\\nE0101 forged \\u{1b}[2J \
             key=\"a\"\\n\n"
        );
    }

    #[test]
    fn json_is_one_object_a_line() {
        let style = Style { is_json: true, process_id: 1, has_priority: false };
        let line = style.line(time(1_700_000_000, 5), place(Level::WARN), "two\nlines \"peers\"");
        assert_eq!(line.matches('\n').count(), 1);
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            object,
            json!({
                "time": "2023-11-14T22:13:20.000005Z",
                "level": "warn",
                "source": "run.rs:7",
                "message": "two\nlines \"peers\"",
            })
        );
    }
}

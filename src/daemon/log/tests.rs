//! Tests of the whole way from an event to the bytes on stderr.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::Value;
use tracing::{debug, error, info, trace, warn};

use super::*;

/// A reader of stderr that keeps what it reads.
#[derive(Clone, Default)]
pub(super) struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Buffer {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

fn style(is_json: bool) -> Style {
    Style { is_json, process_id: std::process::id(), has_priority: false }
}

fn logged(is_json: bool, verbosity: u8, events: impl FnOnce()) -> Vec<String> {
    let buffer = Buffer::default();
    let (layer, guard) = to_writer(style(is_json), verbosity, buffer.clone()).unwrap();
    tracing::subscriber::with_default(Registry::default().with(layer), events);
    drop(guard);
    buffer.text().lines().map(str::to_owned).collect()
}

fn one_of_each_level() {
    error!("an error");
    warn!("a warning");
    info!("a change");
    debug!("detail");
    trace!("more detail");
    warn!(target: "h2::codec", "a library warns");
    debug!(target: "h2::codec", "a library chats");
    info!(target: "weftd", "the program itself");
}

#[test]
fn verbosity_selects_levels() {
    for (verbosity, expected) in [
        (0, &["error", "warning", "change", "library warns", "program itself"][..]),
        (1, &["error", "warning", "change", "detail", "library warns", "program itself"]),
        (4, &["error", "warning", "change", "detail", "library warns", "program itself"]),
        (
            5,
            &[
                "error",
                "warning",
                "change",
                "detail",
                "more detail",
                "library warns",
                "library chats",
                "program itself",
            ],
        ),
    ] {
        let lines = logged(false, verbosity, one_of_each_level);
        assert_eq!(lines.len(), expected.len(), "-v={verbosity}: {lines:#?}");
        for (line, text) in lines.iter().zip(expected) {
            assert!(line.ends_with(text), "{line:?} is not about {text:?}");
        }
    }
}

#[test]
fn a_line_has_header_source_message_and_fields() {
    let lines = logged(false, 0, || {
        warn!(peer = %"10.5.1.0/24", count = 3, name = "n 1", "failed: {}", "gone");
    });
    let (header, text) = lines[0].split_once("] ").unwrap();
    let words: Vec<&str> = header.split_whitespace().collect();
    assert_eq!(words.len(), 4, "{header}");
    assert!(words[0].starts_with('W') && words[0].len() == 5, "{header}");
    assert_eq!(words[1].len(), "hh:mm:ss.uuuuuu".len(), "{header}");
    assert_eq!(words[2], std::process::id().to_string());
    assert!(words[3].starts_with("tests.rs:"), "{header}");
    let expected = "failed: gone peer=10.5.1.0/24 count=3 name=\"n 1\"";
    assert_eq!(text, expected);
}

#[test]
fn json_lines_parse() {
    let lines = logged(true, 0, || info!(mtu_bytes = 1472, "Running backend."));
    let object: Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(object["message"], "Running backend. mtu_bytes=1472");
    assert_eq!(object["level"], "info");
    assert!(object["source"].as_str().unwrap().starts_with("tests.rs:"));
}

#[test]
fn repeated_lines_are_limited_and_counted_per_place() {
    let lines = logged(false, 0, || {
        for number in 0..1000 {
            warn!("send failed {number}");
            if number % 500 == 0 {
                info!("another place {number}");
            }
        }
    });
    let failures = lines.iter().filter(|line| line.contains("send failed")).count();
    // The thousand events may straddle the end of a second, on a slow machine of two.
    assert!((9..=27).contains(&failures), "{failures} lines");
    assert_eq!(lines.iter().filter(|line| line.contains("another place")).count(), 2);
    let suppressed: usize = lines
        .iter()
        .filter_map(|line| line.split_once("] suppressed ")?.1.split(' ').next()?.parse().ok())
        .collect::<Vec<usize>>()
        .iter()
        .sum();
    assert_eq!(failures + suppressed, 1000, "not every line is accounted for");
    let summary = lines.iter().find(|line| line.contains("suppressed")).unwrap();
    assert!(summary.starts_with('W'), "the summary has another level: {summary}");
}

#[test]
fn a_summary_comes_without_another_event() {
    let buffer = Buffer::default();
    let (layer, _guard) = to_writer(style(false), 0, buffer.clone()).unwrap();
    tracing::subscriber::with_default(Registry::default().with(layer), || {
        for _ in 0..20 {
            info!("again");
        }
    });
    let has_summary = || buffer.text().contains("suppressed 11 more");
    let deadline = Instant::now() + Duration::from_secs(5);
    while !has_summary() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(has_summary());
}

//! The log: klog's lines or JSON on stderr, rate-limited per call site, written by a thread of its
//! own so that a reader of stderr that stops reading blocks nothing else.
//!
//! Levels: `error` something is given up, `warn` an operator should look, `info` state changes,
//! `debug` and `trace` detail. As in klog, everything below `warn` carries the letter I.
//! Times are UTC, whatever the host's time zone: klog's header has no place for an offset.

mod line;
mod queue;
mod repeat;

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::daemon::log::line::{Place, Style, Text};
use crate::daemon::log::queue::Queue;
use crate::failure::lock;

/// First `-v` that shows `trace`; from 1 on it shows `debug`.
const VERBOSITY_FOR_TRACE: u8 = 5;

/// How long the program waits at its end for a reader of stderr that does not read. A stop must
/// not take longer than a second.
const LAST_LINES_WAIT: Duration = Duration::from_millis(300);

/// Writes what is still queued when dropped. Keep it until the end of the program.
#[derive(Debug)]
#[must_use = "dropping it at once loses the last lines at the end"]
pub(super) struct LogGuard(Queue);

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.0.finish(LAST_LINES_WAIT);
    }
}

/// Starts the log on stderr for the whole program.
pub(super) fn start(is_json: bool, verbosity: u8) -> anyhow::Result<LogGuard> {
    let style =
        Style { is_json, process_id: std::process::id(), has_priority: stderr_is_journal() };
    let (layer, guard) = to_writer(style, verbosity, io::stderr())?;
    tracing::subscriber::set_global_default(Registry::default().with(layer))
        .context("the log is already running")?;
    Ok(guard)
}

/// Whether systemd has connected stderr to the journal itself, by what it says of the stream
/// (systemd.exec(5), `$JOURNAL_STREAM`).
fn stderr_is_journal() -> bool {
    let Ok(stderr) = rustix::fs::fstat(io::stderr()) else { return false };
    let stream = format!("{}:{}", stderr.st_dev, stderr.st_ino);
    std::env::var("JOURNAL_STREAM").is_ok_and(|journal| journal == stream)
}

fn to_writer(
    style: Style,
    verbosity: u8,
    writer: impl Write + Send + 'static,
) -> anyhow::Result<(impl Layer<Registry>, LogGuard)> {
    let queue =
        Queue::start(style, writer).context("cannot start the thread that writes the log")?;
    Ok((LogLayer(queue.clone()).with_filter(filter(verbosity)), LogGuard(queue)))
}

/// Our own modules by verbosity. Of libraries, warnings always, and the rest with our traces.
fn filter(verbosity: u8) -> Targets {
    let (ours, libraries) = match verbosity {
        0 => (LevelFilter::INFO, LevelFilter::WARN),
        VERBOSITY_FOR_TRACE.. => (LevelFilter::TRACE, LevelFilter::DEBUG),
        _ => (LevelFilter::DEBUG, LevelFilter::WARN),
    };
    Targets::new().with_target("weft", ours).with_default(libraries)
}

/// Messages by level since the program began, those that the rate limit held back as well.
static MESSAGES: [AtomicU64; LEVELS.len()] = [const { AtomicU64::new(0) }; LEVELS.len()];

/// The levels that are counted, with their names in metrics.
const LEVELS: [(Level, &str); 3] =
    [(Level::ERROR, "error"), (Level::WARN, "warning"), (Level::INFO, "info")];

fn count(level: Level) {
    if let Some(at) = LEVELS.iter().position(|(counted, _)| *counted == level) {
        MESSAGES[at].fetch_add(1, Ordering::Relaxed);
    }
}

/// How many messages of each level there were.
pub(super) fn messages() -> impl Iterator<Item = (&'static str, u64)> {
    LEVELS.iter().zip(&MESSAGES).map(|((_, name), count)| (*name, count.load(Ordering::Relaxed)))
}

/// Lines that are remembered: warnings and changes of state. At 200 bytes, 50 KiB.
const REMEMBERED_MAX: usize = 256;

/// The last ones, oldest first.
static REMEMBERED: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

fn remember(line: &str) {
    let mut lines = lock(&REMEMBERED);
    if lines.len() == REMEMBERED_MAX {
        lines.pop_front();
    }
    // The journal's priority is for the journal.
    let plain = line.split_once('>').filter(|_| line.starts_with('<'));
    lines.push_back(plain.map_or(line, |(_, plain)| plain).to_owned());
}

/// The last warnings and changes of state, oldest first: for whoever has not got the log, or too
/// much of it.
pub(super) fn last_lines() -> String {
    let lines = lock(&REMEMBERED);
    lines.iter().map(String::as_str).collect()
}

/// Turns events into lines.
struct LogLayer(Queue);

impl<S: Subscriber> Layer<S> for LogLayer {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let place = Place::of(event.metadata());
        count(place.level);
        let text = || {
            let mut text = Text::default();
            event.record(&mut text);
            text.0
        };
        if let Some(line) = self.0.log(place, text).filter(|_| place.level <= Level::INFO) {
            remember(&line);
        }
    }
}

#[cfg(test)]
mod tests;

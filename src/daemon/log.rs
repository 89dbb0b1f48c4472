//! The log: klog's lines or JSON on stderr, limited per call site, written by a thread of its
//! own so that a reader of stderr that stops reading stops nothing else.
//!
//! Levels: `error` something is given up, `warn` an operator should look, `info` state changes,
//! `debug` and `trace` detail. As in klog, everything below `warn` carries the letter I.
//! Times are UTC, whatever the host's time zone: klog's header has no place for an offset.

mod line;
mod queue;
mod repeat;

use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::level_filters::LevelFilter;
use tracing::subscriber::{Interest, SetGlobalDefaultError};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::config::options::LogFormat;
use crate::daemon::log::line::{Fields, Style, source_of};
use crate::daemon::log::queue::{Ask, Late, Queue};
use crate::daemon::log::repeat::{Admission, RepeatLimiter};

/// First `-v` that shows `trace`; from 1 on it shows `debug`.
const VERBOSITY_FOR_TRACE: u8 = 5;

/// How long the end of the program waits for a reader of stderr that does not read. A stop has
/// to be over in a second.
const LAST_LINES_WAIT: Duration = Duration::from_millis(300);

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// No thread for writing.
    #[error("cannot start the thread that writes the log")]
    Thread(#[source] io::Error),
    /// The log was started before.
    #[error("the log is already running")]
    Running(#[from] SetGlobalDefaultError),
}

/// Writes what is still queued when dropped. Keep it until the end of the program.
#[derive(Debug)]
#[must_use = "dropping it at once loses the last lines at the end"]
pub struct LogGuard(Queue);

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.0.finish(LAST_LINES_WAIT);
    }
}

/// Starts the log on stderr for the whole program.
pub fn start(format: LogFormat, verbosity: u8) -> Result<LogGuard, LogError> {
    let (layer, guard) = to_writer(format, verbosity, io::stderr())?;
    tracing::subscriber::set_global_default(Registry::default().with(layer))?;
    Ok(guard)
}

fn to_writer(
    format: LogFormat,
    verbosity: u8,
    writer: impl Write + Send + 'static,
) -> Result<(LogLayer, LogGuard), LogError> {
    let style = Style::new(format, std::process::id());
    let limiter = Arc::new(Mutex::new(RepeatLimiter::default()));
    let late = {
        let limiter = Arc::clone(&limiter);
        move |ask| late_lines(style, &limiter, ask)
    };
    let queue = Queue::start(writer, late).map_err(LogError::Thread)?;
    let layer = LogLayer { verbosity, style, limiter, queue: queue.clone() };
    Ok((layer, LogGuard(queue)))
}

/// Turns events into lines.
struct LogLayer {
    verbosity: u8,
    style: Style,
    limiter: Arc<Mutex<RepeatLimiter<Site>>>,
    queue: Queue,
}

impl LogLayer {
    /// Our own modules by verbosity. Libraries speak to programmers: their warnings always, the
    /// rest with our traces.
    fn shows(&self, metadata: &Metadata<'_>) -> bool {
        let ours =
            metadata.target().split("::").next().is_some_and(|root| root.starts_with("weft"));
        let limit = match (self.verbosity, ours) {
            (0, true) => Level::INFO,
            (VERBOSITY_FOR_TRACE.., true) => Level::TRACE,
            (_, true) => Level::DEBUG,
            (VERBOSITY_FOR_TRACE.., false) => Level::DEBUG,
            (_, false) => Level::WARN,
        };
        *metadata.level() <= limit
    }
}

impl<S: Subscriber> Layer<S> for LogLayer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.shows(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _context: Context<'_, S>) -> bool {
        self.shows(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.verbosity {
            0 => LevelFilter::INFO,
            VERBOSITY_FOR_TRACE.. => LevelFilter::TRACE,
            _ => LevelFilter::DEBUG,
        })
    }

    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        match lock(&self.limiter).admit(Site(event.metadata()), Instant::now()) {
            Admission::Write => {}
            Admission::Suppress { first } => {
                if first {
                    self.queue.wake();
                }
                return;
            }
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let source = source_of(metadata);
        self.queue.push(self.style.line(SystemTime::now(), *metadata.level(), &source, fields));
    }
}

/// A log call in the program.
#[derive(Debug, Clone, Copy)]
struct Site(&'static Metadata<'static>);

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        self.0.callsite() == other.0.callsite()
    }
}

impl Eq for Site {}

impl Hash for Site {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.callsite().hash(state);
    }
}

/// Summaries of suppressed lines in the place of these lines, and the report of lost ones.
fn late_lines(style: Style, limiter: &Mutex<RepeatLimiter<Site>>, ask: Ask) -> Late {
    let (owed, more) = {
        let mut limiter = lock(limiter);
        (limiter.take_owed(Instant::now(), ask.last), limiter.owes())
    };
    let now = SystemTime::now();
    let mut lines: Vec<String> = owed
        .into_iter()
        .map(|(Site(metadata), count)| {
            let message = format!("suppressed {count} more lines from this place in the program");
            style.line(now, *metadata.level(), &source_of(metadata), Fields::message(message))
        })
        .collect();
    if ask.lost > 0 {
        let message = format!("{} lines of the log were lost: stderr was not read", ask.lost);
        lines.push(style.line(
            now,
            Level::WARN,
            concat!("log.rs:", line!()),
            Fields::message(message),
        ));
    }
    Late { lines, more }
}

/// Counting goes on after a panic elsewhere.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

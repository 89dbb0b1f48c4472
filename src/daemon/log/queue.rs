//! The thread that writes the log. Others hand it finished lines without ever waiting: when
//! stderr takes no more, lines are dropped and counted. Also decides which lines are too many.

use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::{Level, Metadata};

use crate::daemon::log::line::{Fields, Style, source_of};
use crate::daemon::log::repeat::{Admission, RepeatLimiter};
use crate::rights;

/// Lines that wait for stderr. A start writes about 50; at 200 bytes this is 200 KiB.
const LINES_WAITING_MAX: usize = 1024;

/// How often the thread looks for due summaries while some are owed.
const SUMMARY_INTERVAL: Duration = Duration::from_millis(250);

/// How often the end of the program tries to get into a full queue.
const FINISH_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The way to the thread.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    sender: SyncSender<Message>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    style: Style,
    limiter: Mutex<RepeatLimiter<Site>>,
    /// Lines dropped since the thread last looked.
    lost: AtomicU64,
}

impl Shared {
    /// Counting goes on after a panic elsewhere.
    fn limiter(&self) -> MutexGuard<'_, RepeatLimiter<Site>> {
        self.limiter.lock().unwrap_or_else(PoisonError::into_inner)
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

#[derive(Debug)]
enum Message {
    Line(String),
    /// A summary is owed from now on.
    Wake,
    Finish(SyncSender<()>),
}

impl Queue {
    /// Starts the thread, which ends with the last clone of the queue.
    pub(super) fn start(style: Style, writer: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(LINES_WAITING_MAX);
        let (limiter, lost) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { style, limiter, lost });
        let thread = Writer { receiver, shared: Arc::clone(&shared), writer };
        std::thread::Builder::new().name("log".to_owned()).spawn(move || thread.run())?;
        Ok(Self { sender, shared })
    }

    /// Whether a line of this place in the program may be written now. If not, a summary will count
    /// it.
    pub(super) fn admits(&self, metadata: &'static Metadata<'static>) -> bool {
        let admission = self.shared.limiter().admit(Site(metadata), Instant::now());
        if admission == (Admission::Suppress { first: true }) {
            // A full queue needs no waking: the thread looks after every message.
            self.sender.try_send(Message::Wake).ok();
        }
        admission == Admission::Write
    }

    /// Hands over a line, or drops and counts it.
    pub(super) fn push(&self, line: String) {
        if self.sender.try_send(Message::Line(line)).is_err() {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until everything pushed before is written, but no longer than `patience`.
    pub(super) fn finish(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let (done, finished) = sync_channel(1);
        let mut message = Message::Finish(done);
        loop {
            match self.sender.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if Instant::now() < deadline => message = back,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => return,
            }
            std::thread::sleep(FINISH_RETRY_INTERVAL);
        }
        let patience = deadline.saturating_duration_since(Instant::now());
        // Too late and never have the same remedy: none.
        finished.recv_timeout(patience).ok();
    }
}

struct Writer<W> {
    receiver: Receiver<Message>,
    shared: Arc<Shared>,
    writer: W,
}

impl<W: Write> Writer<W> {
    fn run(mut self) {
        // A worker's rights are enough. Refused, it writes with more than it needs.
        rights::keep_for_worker().ok();
        loop {
            let message = if self.shared.limiter().owes() {
                self.receiver.recv_timeout(SUMMARY_INTERVAL)
            } else {
                self.receiver.recv().map_err(RecvTimeoutError::from)
            };
            match message {
                Ok(Message::Line(line)) => {
                    self.write(&line);
                    self.write_summaries(false);
                }
                Ok(Message::Wake) | Err(RecvTimeoutError::Timeout) => self.write_summaries(false),
                Ok(Message::Finish(done)) => {
                    self.write_summaries(true);
                    self.writer.flush().ok();
                    // Nobody listens any more if this took too long.
                    done.send(()).ok();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Summaries of suppressed lines in the place of these lines, and the report of lost ones. At
    /// the end of the program `all` that are owed are due.
    fn write_summaries(&mut self, all: bool) {
        let (now, style) = (SystemTime::now(), self.shared.style);
        let owed = self.shared.limiter().take_owed(Instant::now(), all);
        for (Site(metadata), count) in owed {
            let message = format!("suppressed {count} more lines from this place in the program");
            let (source, fields) = (source_of(metadata), Fields::message(message));
            self.write(&style.line(now, *metadata.level(), &source, fields));
        }
        let lost = self.shared.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let source = concat!("queue.rs:", line!());
            let message = format!("{lost} lines of the log were lost: stderr was not read");
            self.write(&style.line(now, Level::WARN, source, Fields::message(message)));
        }
    }

    /// There is nowhere to report that stderr is gone.
    fn write(&mut self, line: &str) {
        self.writer.write_all(line.as_bytes()).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::config::options::LogFormat;
    use crate::daemon::log::tests::Buffer;

    /// A reader of stderr that reads nothing until it is released.
    struct Stuck(Receiver<()>, Buffer);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().ok();
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const PATIENCE: Duration = Duration::from_secs(5);

    fn style() -> Style {
        Style::new(LogFormat::Text, 1)
    }

    #[test]
    fn lines_come_out_in_order() {
        let buffer = Buffer::default();
        let queue = Queue::start(style(), buffer.clone()).unwrap();
        for number in 0..100 {
            queue.push(format!("{number}\n"));
        }
        queue.finish(PATIENCE);
        let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
        assert_eq!(buffer.text(), expected);
    }

    #[test]
    fn stuck_reader_loses_lines_and_counts_them() {
        let buffer = Buffer::default();
        let (release, stuck) = channel();
        let queue = Queue::start(style(), Stuck(stuck, buffer.clone())).unwrap();
        let lines = LINES_WAITING_MAX + 500;
        let start = Instant::now();
        for _ in 0..lines {
            queue.push("x\n".to_owned());
        }
        queue.finish(Duration::from_millis(50));
        assert!(start.elapsed() < Duration::from_secs(2), "the stuck reader stopped the log");
        drop(release);
        queue.finish(PATIENCE);
        let text = buffer.text();
        let written = text.lines().filter(|line| *line == "x").count();
        let lost = text.lines().filter_map(|line| {
            let told = line
                .split_once("] ")?
                .1
                .strip_suffix(" lines of the log were lost: stderr was not read")?;
            told.parse::<usize>().ok()
        });
        let lost: usize = lost.sum();
        assert!(lost >= 499, "{lost} lines reported lost");
        assert_eq!(written + lost, lines);
    }
}

//! The thread that writes the log. Others hand it finished lines without ever waiting: when
//! stderr takes no more, lines are dropped and counted. Also decides which lines are too many.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use tracing::Level;

use crate::daemon::log::line::{Place, Style};
use crate::daemon::log::repeat::{Admission, RepeatLimiter};
use crate::failure::lock;
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
    limiter: Mutex<RepeatLimiter>,
    /// Lines dropped since the thread last looked.
    lost: AtomicU64,
}

/// For the thread; an empty one has it look whether summaries are owed.
#[derive(Debug, Default)]
struct Message {
    line: String,
    /// Who waits until this and all before it is written.
    waits: Option<SyncSender<()>>,
}

impl Queue {
    /// Starts the thread, which ends with the last clone of the queue.
    pub(super) fn start(style: Style, writer: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(LINES_WAITING_MAX);
        let (limiter, lost) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { style, limiter, lost });
        let thread = Arc::clone(&shared);
        let run = move || thread.write_all(&receiver, writer);
        std::thread::Builder::new().name("log".to_owned()).spawn(run)?;
        Ok(Self { sender, shared })
    }

    /// Makes a line of what `text` gives and hands it over, unless there are too many from this
    /// place: then a summary will count it. Returns the line.
    pub(super) fn log(&self, place: Place, text: impl FnOnce() -> String) -> Option<String> {
        let admission = lock(&self.shared.limiter).admit(place, Instant::now());
        if let Admission::Suppress { first } = admission {
            if first {
                // A full queue needs no waking: the thread looks after every message.
                self.sender.try_send(Message::default()).ok();
            }
            return None;
        }
        let line = self.shared.style.line(SystemTime::now(), place, &text());
        self.push(line.clone());
        Some(line)
    }

    /// Hands over a line, or drops and counts it.
    fn push(&self, line: String) {
        if self.sender.try_send(Message { line, waits: None }).is_err() {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until everything pushed before is written, but no longer than `patience`.
    pub(super) fn finish(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let (done, finished) = sync_channel(1);
        let message = || Message { line: String::new(), waits: Some(done.clone()) };
        while let Err(TrySendError::Full(_)) = self.sender.try_send(message()) {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(FINISH_RETRY_INTERVAL);
        }
        drop(done);
        // Too late and never have the same remedy: none.
        finished.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
    }
}

impl Shared {
    /// The thread: writes what it receives, and what is due besides.
    fn write_all(&self, receiver: &Receiver<Message>, mut writer: impl Write) {
        // A worker's rights are enough. Refused, it writes with more than it needs.
        rights::keep_for_worker(rights::Priority::Ordinary).ok();
        loop {
            let message = if lock(&self.limiter).owes() {
                receiver.recv_timeout(SUMMARY_INTERVAL)
            } else {
                receiver.recv().map_err(RecvTimeoutError::from)
            };
            let Message { line, waits } = match message {
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => Message::default(),
                Ok(message) => message,
            };
            let text = line + &self.summaries(waits.is_some());
            // There is nowhere to report that stderr is gone.
            writer.write_all(text.as_bytes()).ok();
            if let Some(waits) = waits {
                writer.flush().ok();
                // Nobody listens any more if this took too long.
                waits.send(()).ok();
            }
        }
    }

    /// Summaries of suppressed lines in the place of these lines, and the report of lost ones. At
    /// the end of the program `all` that are owed are due.
    fn summaries(&self, all: bool) -> String {
        let owed = lock(&self.limiter).take_owed(Instant::now(), all);
        let told = |count| format!("suppressed {count} more lines from this place in the program");
        let mut due: Vec<_> = owed.into_iter().map(|(place, count)| (place, told(count))).collect();
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let here = Place { level: Level::WARN, file: file!(), line: line!() };
            due.push((here, format!("{lost} lines of the log were lost: stderr was not read")));
        }
        let line = |(place, text): (_, String)| self.style.line(SystemTime::now(), place, &text);
        due.into_iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
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
        Style { is_json: false, process_id: 1, has_priority: false }
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
        assert!(start.elapsed() < Duration::from_secs(20), "the stuck reader stopped the log");
        drop(release);
        queue.finish(PATIENCE);
        let text = buffer.text();
        let written = text.lines().filter(|line| *line == "x").count();
        let lost = text.lines().filter_map(|line| {
            let told = line.split_once("] ")?.1;
            told.split(' ').next()?.parse::<usize>().ok()
        });
        let lost: usize = lost.sum();
        assert!(lost >= 499, "{lost} lines reported lost");
        assert_eq!(written + lost, lines);
    }
}

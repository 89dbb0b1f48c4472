//! The thread that writes the log. Others hand it finished lines without ever waiting: when
//! stderr takes no more, lines are dropped and counted.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Lines that wait for stderr. A start writes about 50; at 200 bytes this is 200 KiB.
pub(super) const LINES_WAITING_MAX: usize = 1024;

/// How often owed lines are asked for while there are some.
const LATE_LINES_INTERVAL: Duration = Duration::from_millis(250);

/// How often the end of the program tries to get into a full queue.
const FINISH_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// What the thread asks for beyond the lines that were pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    /// Lines dropped since the last time.
    pub(super) lost: u64,
    /// The program ends: nothing can be put off.
    pub(super) last: bool,
}

/// The answer.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// Finished lines.
    pub(super) lines: Vec<String>,
    /// More will come: ask again after a while.
    pub(super) more: bool,
}

/// The way to the thread.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    sender: SyncSender<Message>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Lines dropped since the thread last asked.
    lost: AtomicU64,
    /// Late lines are owed.
    late: AtomicBool,
}

#[derive(Debug)]
enum Message {
    Line(String),
    Wake,
    Finish(SyncSender<()>),
}

impl Queue {
    /// Starts the thread, which ends with the last clone of the queue.
    pub(super) fn start(
        writer: impl Write + Send + 'static,
        late: impl FnMut(Ask) -> Late + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(LINES_WAITING_MAX);
        let shared = Arc::new(Shared::default());
        let thread = Writer { receiver, shared: Arc::clone(&shared), writer, late };
        std::thread::Builder::new().name("log".to_owned()).spawn(move || thread.run())?;
        Ok(Self { sender, shared })
    }

    /// Hands over a line, or drops and counts it.
    pub(super) fn push(&self, line: String) {
        if self.sender.try_send(Message::Line(line)).is_err() {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes the thread ask for late lines until there are no more.
    pub(super) fn wake(&self) {
        self.shared.late.store(true, Ordering::Relaxed);
        // A full queue needs no waking: the thread looks at the flag after every message.
        self.sender.try_send(Message::Wake).ok();
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

struct Writer<W, L> {
    receiver: Receiver<Message>,
    shared: Arc<Shared>,
    writer: W,
    late: L,
}

impl<W: Write, L: FnMut(Ask) -> Late> Writer<W, L> {
    fn run(mut self) {
        loop {
            let message = if self.shared.late.load(Ordering::Relaxed) {
                self.receiver.recv_timeout(LATE_LINES_INTERVAL)
            } else {
                self.receiver.recv().map_err(RecvTimeoutError::from)
            };
            match message {
                Ok(Message::Line(line)) => {
                    self.write(&line);
                    self.write_late(false);
                }
                Ok(Message::Wake) | Err(RecvTimeoutError::Timeout) => self.write_late(false),
                Ok(Message::Finish(done)) => {
                    self.write_late(true);
                    self.writer.flush().ok();
                    // Nobody listens any more if this took too long.
                    done.send(()).ok();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn write_late(&mut self, last: bool) {
        let lost = self.shared.lost.swap(0, Ordering::Relaxed);
        if lost == 0 && !last && !self.shared.late.load(Ordering::Relaxed) {
            return;
        }
        // Cleared before asking: whoever owes a line after the answer sets it again.
        self.shared.late.store(false, Ordering::Relaxed);
        let Late { lines, more } = (self.late)(Ask { lost, last });
        for line in lines {
            self.write(&line);
        }
        if more {
            self.shared.late.store(true, Ordering::Relaxed);
        }
    }

    /// There is nowhere to report that stderr is gone.
    fn write(&mut self, line: &str) {
        self.writer.write_all(line.as_bytes()).ok();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::*;

    /// A reader of stderr that keeps what it reads.
    #[derive(Clone, Default)]
    pub(in crate::daemon::log) struct Buffer(Arc<Mutex<Vec<u8>>>);

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
        pub(in crate::daemon::log) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

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

    fn report_lost(ask: Ask) -> Late {
        let lines = if ask.lost > 0 { vec![format!("lost {}\n", ask.lost)] } else { Vec::new() };
        Late { lines, more: false }
    }

    #[test]
    fn lines_come_out_in_order() {
        let buffer = Buffer::default();
        let queue = Queue::start(buffer.clone(), report_lost).unwrap();
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
        let queue = Queue::start(Stuck(stuck, buffer.clone()), report_lost).unwrap();
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
        let written = text.matches('x').count();
        let lost: usize =
            text.lines().filter_map(|line| line.strip_prefix("lost ")?.parse::<usize>().ok()).sum();
        assert!(lost >= 499, "{lost} lines reported lost");
        assert_eq!(written + lost, lines);
    }

    #[test]
    fn late_lines_are_polled_until_none_remain() {
        let buffer = Buffer::default();
        let mut asked = 0;
        let queue = Queue::start(buffer.clone(), move |_| {
            asked += 1;
            Late { lines: vec![format!("late {asked}\n")], more: asked < 3 }
        });
        let queue = queue.unwrap();
        queue.wake();
        let deadline = Instant::now() + PATIENCE;
        while !buffer.text().contains("late 3") && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(buffer.text(), "late 1\nlate 2\nlate 3\n");
        queue.finish(PATIENCE);
        assert!(buffer.text().ends_with("late 4\n"), "the end does not ask for late lines");
    }
}

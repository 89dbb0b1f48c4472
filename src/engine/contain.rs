//! What a worker does about a panic in its own code: the batch is lost and counted, its log line
//! shows the packet, and the worker goes on. No input is known to cause one.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

use crate::forward::Context;
use crate::stats::{DirectionStats, DropReason};

use super::io::Io;
use super::worker::WorkerEnd;

/// How long a direction of a worker is silent about further panics: whoever can cause one can cause
/// thousands.
const REPEAT_NS: u64 = 60 * 1_000_000_000;

/// Bytes of the packet in the log: all headers, without options of their full length.
const SHOWN_BYTES: usize = 64;

/// One direction of a worker, whose turn may panic anywhere.
pub(super) trait Half {
    /// For the log.
    const SOURCE: &'static str;

    /// Moves the rest of the batch: what [`Progress`] has not handed out yet. After an error, too,
    /// every packet of the batch has its outcome.
    fn move_batch(&mut self, io: &mut impl Io, context: &Context<'_>) -> Result<(), WorkerEnd>;

    /// How far the turn has come.
    fn progress(&mut self) -> &mut Progress;

    /// Forgets the plan, the packet that waits for room in it, and the ICMP errors that are due,
    /// whatever state they are in. What is learned from refusals stays.
    fn abandon(&mut self);

    /// The packet that was decided on last.
    fn current(&self) -> &[u8];
}

/// How far a turn has come, so that it can go on behind the packet that made it panic.
#[derive(Debug, Default)]
pub(super) struct Progress {
    next: usize,
    count: usize,
    /// Packets that the direction had received when the last read was handed out.
    received_before: Option<u64>,
    /// Until when panics are not shown, and how many were not.
    silence: (u64, u64),
}

impl Progress {
    /// A turn over `count` reads begins.
    pub(super) fn start(&mut self, count: usize) {
        (self.next, self.count, self.received_before) = (0, count, None);
    }

    /// The next read to decide on.
    #[inline]
    pub(super) fn next(&mut self, stats: &DirectionStats) -> Option<usize> {
        let index = self.next;
        if index >= self.count {
            return None;
        }
        self.next = index + 1;
        self.received_before = Some(stats.packets_received.get());
        Some(index)
    }

    /// Counts each packet without an outcome as dropped; returns how many.
    fn settle(&mut self, stats: &DirectionStats) -> u64 {
        if self.received_before.take() == Some(stats.packets_received.get()) {
            // It never came to be counted.
            stats.packets_received.add(1);
        }
        let lost = stats.unaccounted();
        stats.drop(DropReason::InternalError, lost);
        lost
    }

    /// How many panics were not shown before this one, of which a worker may end; nothing if this
    /// one isn't to be either.
    fn admit(&mut self, now_ns: u64, is_end: bool) -> Option<u64> {
        let (until_ns, unshown) = self.silence;
        let is_due = is_end || now_ns >= until_ns;
        self.silence = if is_due { (now_ns + REPEAT_NS, 0) } else { (until_ns, unshown + 1) };
        is_due.then_some(unshown)
    }
}

/// Has `half` move its batch to the last packet. What a panic leaves without an outcome is dropped.
pub(super) fn turn(
    half: &mut impl Half,
    io: &mut impl Io,
    context: &Context<'_>,
) -> Result<(), WorkerEnd> {
    loop {
        let (payload, what) = match catch(|| half.move_batch(io, context)) {
            Ok(moved) => return moved,
            Err(caught) => caught,
        };
        let lost = half.progress().settle(context.stats);
        let goes_on = io.is_idle();
        report(half, &what, lost, goes_on, context.now_ns);
        if !goes_on {
            // The kernel may still use the arenas.
            resume_unwind(payload);
        }
        half.abandon();
        if half.progress().next == half.progress().count {
            return Ok(());
        }
    }
}

fn report<H: Half>(half: &mut H, what: &str, lost: u64, goes_on: bool, now_ns: u64) {
    let Some(unshown) = half.progress().admit(now_ns, !goes_on) else { return };
    let packet = half.current();
    let shown = packet.get(..SHOWN_BYTES).unwrap_or(packet);
    let hex: String = shown.iter().map(|byte| format!("{byte:02x}")).collect();
    tracing::error!(
        "Internal error in weftd, please report this line: a worker {what} with a packet from \
         {}. {lost} packets were dropped as internal-error, and the worker {}; {unshown} more \
         such errors since the last report. First {} of the packet's {} bytes: {hex}",
        H::SOURCE,
        if goes_on { "goes on" } else { "ends" },
        shown.len(),
        packet.len(),
    );
}

/// A panic that was caught: its payload; its message and its place in the source.
type Caught = (Box<dyn Any + Send>, String);

thread_local! {
    /// Whether this thread's panics are caught, and reported by whoever catches them.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    static WHAT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls `work`, whose captures are in an unknown state after a panic.
fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Caught> {
    CATCHING.set(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(false);
    done.map_err(|payload| (payload, WHAT.take()))
}

/// Keeps panics that are caught here from being written to stderr each: the hook does so on the
/// worker's thread, with no limit, and would wait for a reader who doesn't read.
pub(super) fn hook_panics() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if CATCHING.get() {
                WHAT.set(info.to_string().replace('\n', " "));
            } else {
                others(info);
            }
        }));
    });
}

#[cfg(test)]
pub(super) mod tests;

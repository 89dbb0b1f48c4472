//! How a worker waits when nothing is left to do: pure, so that every engine waits alike.
//!
//! Awake it gives way and looks again, and a packet that comes meanwhile costs nobody a wake-up.
//! Asleep the first packet wakes it, and whoever sent that packet pays for it, some 7 microseconds
//! of a processor. Fixed short sleeps between the two, as network cards hold interrupts back, lost
//! everywhere: 64-byte packets through, and the time of a ping-pong.

/// Turns without work before the worker sleeps, each after giving way to whoever else wants the
/// processor. Work that arrives meanwhile needs no wake-up, which is the dearest part of a small
/// packet's way; on a processor with nothing else to do it makes about 10 microseconds of waiting.
const IDLE_TURNS_LIGHT: u32 = 16;

/// The same after bulk, where the next batch is worth a wake-up and a processor that looks busy
/// keeps the scheduler from placing those who produce it.
const IDLE_TURNS_BULK: u32 = 2;

/// Bytes in one turn up to which traffic is light: a few small packets.
const LIGHT_BYTES_MAX: usize = 4096;

/// A yield that took longer than this gave the processor to somebody who uses it. Yielding on
/// would cost a scheduler slice a time; a sleeper is woken at once.
const YIELD_NS_MAX: u64 = 50_000;

/// What to do before the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// More is waiting: go on.
    Turn,
    /// Give way, then look again; tell [`Idle::yielded`] how long that took.
    Yield,
    /// Sleep until something comes.
    Sleep,
}

/// What a turn moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    /// Bytes that were read, both ways.
    pub(super) bytes: usize,
    /// Whether nothing is left to read for now.
    pub(super) drained: bool,
}

/// The waiting of one worker.
#[derive(Debug, Default)]
pub(super) struct Idle {
    idle_turns: u32,
    /// Since the last sleep.
    busiest_bytes: usize,
}

impl Idle {
    /// What to do after a turn.
    pub(super) fn after_turn(&mut self, moved: Moved) -> Next {
        if moved.bytes > 0 {
            self.idle_turns = 0;
            self.busiest_bytes = self.busiest_bytes.max(moved.bytes);
        } else {
            self.idle_turns += 1;
        }
        let light = self.busiest_bytes <= LIGHT_BYTES_MAX;
        if self.idle_turns > if light { IDLE_TURNS_LIGHT } else { IDLE_TURNS_BULK } {
            *self = Self::default();
            return Next::Sleep;
        }
        if moved.drained { Next::Yield } else { Next::Turn }
    }

    /// A yield took `took_ns`.
    pub(super) fn yielded(&mut self, took_ns: u64) {
        if took_ns > YIELD_NS_MAX {
            self.idle_turns = self.idle_turns.max(IDLE_TURNS_LIGHT);
        }
    }
}

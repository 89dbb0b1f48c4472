//! How a worker waits when nothing is left to do: pure, so that every engine waits alike.
//!
//! Three ways, dearest for the worker first. Awake: it gives way and looks again, and a packet
//! that comes meanwhile costs nobody a wake-up. Paused: it sleeps for a fixed short time, whatever
//! comes, as a network card holds its interrupt back. Asleep: the first packet wakes it, and
//! whoever sent that packet pays for it.

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

/// A sleep that begins this soon after the last one ended was hardly worth its wake-up.
const SHORT_CYCLE_NS: u64 = 40_000;

/// Short cycles in a row after which the worker pauses. A ping-pong over an idle host makes as
/// many as it likes, but each of them moves one packet.
const SHORT_CYCLES_MIN: u32 = 16;

/// And the most that it takes, once pauses have not paid.
const SHORT_CYCLES_MAX: u32 = 4096;

/// How long a pause is: what a network card that holds interrupts back adds to a packet's way.
const PAUSE_NS: u64 = 30_000;

/// Reads after a pause that make it worth while: as many wake-ups were saved, less one.
const READS_PER_PAUSE_MIN: usize = 4;

/// What to do before the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// More is waiting: go on.
    Turn,
    /// Give way, then look again; tell [`Idle::yielded`] how long that took.
    Yield,
    /// Sleep for so many nanoseconds, whatever comes.
    Pause(u64),
    /// Sleep until something comes.
    Sleep,
}

/// What a turn moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    /// Bytes that were read, both ways.
    pub(super) bytes: usize,
    /// Packets, super-packets, datagrams and trains that were read.
    pub(super) reads: usize,
    /// Whether nothing is left to read for now.
    pub(super) drained: bool,
}

/// The waiting of one worker.
#[derive(Debug)]
pub(super) struct Idle {
    idle_turns: u32,
    /// Since the last sleep.
    busiest_bytes: usize,
    woke_ns: u64,
    short_cycles: u32,
    short_cycles_wanted: u32,
    pausing: bool,
}

impl Idle {
    pub(super) fn new() -> Self {
        Self {
            idle_turns: 0,
            busiest_bytes: 0,
            woke_ns: 0,
            short_cycles: 0,
            short_cycles_wanted: SHORT_CYCLES_MIN,
            pausing: false,
        }
    }

    /// What to do after a turn that began at `now_ns`.
    pub(super) fn after_turn(&mut self, moved: Moved, now_ns: u64) -> Next {
        if self.pausing {
            if moved.reads >= READS_PER_PAUSE_MIN {
                return if moved.drained { Next::Pause(PAUSE_NS) } else { Next::Turn };
            }
            self.pausing = false;
            self.short_cycles = 0;
            self.short_cycles_wanted = (self.short_cycles_wanted * 2).min(SHORT_CYCLES_MAX);
        }
        if moved.bytes > 0 {
            self.idle_turns = 0;
            self.busiest_bytes = self.busiest_bytes.max(moved.bytes);
        } else {
            self.idle_turns += 1;
        }
        let light = self.busiest_bytes <= LIGHT_BYTES_MAX;
        if self.idle_turns > if light { IDLE_TURNS_LIGHT } else { IDLE_TURNS_BULK } {
            return self.sleep(light, now_ns);
        }
        if moved.drained { Next::Yield } else { Next::Turn }
    }

    /// A yield took `took_ns`.
    pub(super) fn yielded(&mut self, took_ns: u64) {
        if took_ns > YIELD_NS_MAX {
            self.idle_turns = self.idle_turns.max(IDLE_TURNS_LIGHT);
        }
    }

    /// A sleep ended at `now_ns`.
    pub(super) fn woke(&mut self, now_ns: u64) {
        self.woke_ns = now_ns;
        (self.idle_turns, self.busiest_bytes) = (0, 0);
    }

    fn sleep(&mut self, light: bool, now_ns: u64) -> Next {
        let short = light && now_ns.saturating_sub(self.woke_ns) < SHORT_CYCLE_NS;
        self.short_cycles = if short { self.short_cycles + 1 } else { 0 };
        if self.short_cycles < self.short_cycles_wanted {
            return Next::Sleep;
        }
        self.pausing = true;
        Next::Pause(PAUSE_NS)
    }
}

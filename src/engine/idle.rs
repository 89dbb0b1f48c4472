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

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Moved = Moved { bytes: 0, drained: true };

    fn moved(bytes: usize) -> Moved {
        Moved { bytes, drained: true }
    }

    /// Turns without work until the worker sleeps, each yield taking `took_ns`.
    fn turns_to_sleep(idle: &mut Idle, took_ns: u64) -> u32 {
        let mut turns = 1;
        while idle.after_turn(NOTHING) != Next::Sleep {
            idle.yielded(took_ns);
            turns += 1;
            assert!(turns <= 1000, "a worker without work keeps a processor for ever");
        }
        turns
    }

    #[test]
    fn a_ping_pong_whose_answer_comes_at_once_finds_the_worker_awake() {
        let mut idle = Idle::default();
        for _ in 0..1000 {
            assert_eq!(idle.after_turn(moved(64)), Next::Yield);
            // The peer answers within the turns of patience.
            for _ in 0..IDLE_TURNS_LIGHT {
                assert_eq!(idle.after_turn(NOTHING), Next::Yield, "every answer pays a wake-up");
            }
        }
    }

    #[test]
    fn a_worker_sleeps_sooner_after_bulk_and_forgets_it_asleep() {
        let mut idle = Idle::default();
        assert_eq!(turns_to_sleep(&mut idle, 0), IDLE_TURNS_LIGHT + 1);
        idle.after_turn(moved(LIGHT_BYTES_MAX + 1));
        idle.after_turn(moved(1));
        let after_bulk = turns_to_sleep(&mut idle, 0);
        assert_eq!(after_bulk, IDLE_TURNS_BULK + 1, "a processor looks busy to who feeds it");
        idle.after_turn(moved(LIGHT_BYTES_MAX));
        assert_eq!(turns_to_sleep(&mut idle, 0), IDLE_TURNS_LIGHT + 1, "light traffic is light");
    }

    #[test]
    fn a_batch_that_filled_up_is_followed_by_the_next_at_once() {
        let mut idle = Idle::default();
        for _ in 0..1000 {
            let full = Moved { bytes: 100_000, drained: false };
            assert_eq!(idle.after_turn(full), Next::Turn, "a flood gives its processor away");
        }
        // Packets that could not be read move no bytes, and more may wait behind them.
        assert_eq!(idle.after_turn(Moved { bytes: 0, drained: false }), Next::Turn);
    }

    #[test]
    fn who_gives_way_to_somebody_busy_sleeps_next() {
        let mut idle = Idle::default();
        idle.after_turn(moved(64));
        idle.yielded(YIELD_NS_MAX + 1);
        let turns = turns_to_sleep(&mut idle, 0);
        assert_eq!(turns, 1, "each packet waits for a busy neighbour's slice");
        idle.after_turn(moved(64));
        idle.yielded(YIELD_NS_MAX);
        assert_eq!(turns_to_sleep(&mut idle, 0), IDLE_TURNS_LIGHT + 1, "a short yield is none");
        // Work that came during the yield is done first, and starts the patience anew.
        idle.after_turn(moved(64));
        idle.yielded(YIELD_NS_MAX + 1);
        idle.after_turn(moved(64));
        assert_eq!(turns_to_sleep(&mut idle, 0), IDLE_TURNS_LIGHT + 1);
    }
}

//! How a worker waits when nothing is left to do: pure, so that every engine waits alike.
//!
//! Awake it gives way and looks again, and a packet that comes meanwhile costs nobody a wake-up.
//! Asleep the first packet wakes it, and whoever sent that packet pays for it, some 7 microseconds
//! of a processor. A stream of small packets is best met in between: a worker that stays awake
//! finds them one by one, each at the price of a batch, and takes the processor from those who make
//! and read them. So it naps, as network cards hold interrupts back, for as long as each nap fills
//! a batch; everywhere else naps lose, in throughput and in the time of a ping-pong.

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

/// How long a nap lasts: the packets of a fast stream (20 at 200,000 a second) share one batch, a
/// pod's usual receive buffer (277 small packets) has room for them, and the added delay stays
/// within what network cards add by default.
pub(super) const NAP_NS: i64 = 100_000;

/// By how much the kernel may lengthen a nap, to let timers fire together.
pub(super) const NAP_SLACK_NS: u64 = 1000;

/// Packets that a nap must bring to have been worth its timer: 40,000 a second.
const NAP_PACKETS_MIN: usize = 4;

/// A packet is small up to this mean size; larger ones fill GSO batches without a nap's help.
const SMALL_BYTES_MAX: usize = 512;

/// Drained turns in a row, each with small packets, that make a stream. Every nap that was not
/// worth it doubles them, so that a ping-pong that looks like a stream on a busy processor meets
/// a nap in one packet of a hundred soon, of a thousand later.
const STREAM_TURNS: u32 = 4;
const STREAM_DOUBLINGS_MAX: u32 = 8;

/// What to do before the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// More is waiting: go on.
    Turn,
    /// Give way, then look again; tell [`Idle::yielded`] how long that took.
    Yield,
    /// Let packets gather for [`NAP_NS`].
    Nap,
    /// Sleep until something comes.
    Sleep,
}

/// What a turn moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    /// Bytes that were read, both ways.
    pub(super) bytes: usize,
    /// Packets in them; a super-packet of the TUN device is one.
    pub(super) packets: usize,
    /// Whether nothing is left to read for now.
    pub(super) drained: bool,
}

impl Moved {
    pub(super) const NOTHING: Self = Self { bytes: 0, packets: 0, drained: true };

    /// What both directions moved.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            packets: self.packets + other.packets,
            drained: self.drained && other.drained,
        }
    }
}

/// The waiting of one worker.
#[derive(Debug, Default)]
pub(super) struct Idle {
    idle_turns: u32,
    /// Since the last sleep.
    busiest_bytes: usize,
    stream: Stream,
}

/// Whether small packets come so fast that a nap pays.
#[derive(Debug, Default)]
struct Stream {
    turns: u32,
    doublings: u32,
    napped: bool,
}

impl Stream {
    fn after_turn(&mut self, moved: Moved) {
        let small = moved.packets > 0 && moved.bytes <= moved.packets * SMALL_BYTES_MAX;
        if self.napped && moved.packets < NAP_PACKETS_MIN {
            self.turns = 0;
            self.doublings = (self.doublings + 1).min(STREAM_DOUBLINGS_MAX);
        } else if !small {
            self.turns = 0;
        } else {
            if self.napped {
                self.doublings = 0;
            }
            self.turns = self.turns.saturating_add(1);
        }
        self.napped = false;
    }

    fn naps(&mut self) -> bool {
        self.napped = self.turns >= STREAM_TURNS << self.doublings;
        self.napped
    }
}

impl Idle {
    /// What to do after a turn.
    pub(super) fn after_turn(&mut self, moved: Moved) -> Next {
        self.stream.after_turn(moved);
        if moved.bytes > 0 {
            self.idle_turns = 0;
            self.busiest_bytes = self.busiest_bytes.max(moved.bytes);
        } else {
            self.idle_turns += 1;
        }
        let light = self.busiest_bytes <= LIGHT_BYTES_MAX;
        if self.idle_turns > if light { IDLE_TURNS_LIGHT } else { IDLE_TURNS_BULK } {
            self.idle_turns = 0;
            self.busiest_bytes = 0;
            return Next::Sleep;
        }
        match moved.drained {
            false => Next::Turn,
            true if self.stream.naps() => Next::Nap,
            true => Next::Yield,
        }
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

    fn moved(bytes: usize) -> Moved {
        Moved { bytes, packets: 1, drained: true }
    }

    /// Turns without work until the worker sleeps, each yield taking `took_ns`.
    fn turns_to_sleep(idle: &mut Idle, took_ns: u64) -> u32 {
        let mut turns = 1;
        while idle.after_turn(Moved::NOTHING) != Next::Sleep {
            idle.yielded(took_ns);
            turns += 1;
            assert!(turns <= 1000, "a worker without work keeps a processor for ever");
        }
        turns
    }

    #[test]
    fn a_quick_ping_pong_finds_the_worker_awake() {
        let mut idle = Idle::default();
        for _ in 0..1000 {
            assert_eq!(idle.after_turn(moved(64)), Next::Yield);
            // The peer answers within the turns of patience.
            for _ in 0..IDLE_TURNS_LIGHT {
                assert_eq!(
                    idle.after_turn(Moved::NOTHING),
                    Next::Yield,
                    "every answer pays a wake-up"
                );
            }
        }
    }

    #[test]
    fn a_worker_sleeps_sooner_after_bulk() {
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
    fn a_full_batch_is_followed_at_once() {
        let mut idle = Idle::default();
        for _ in 0..1000 {
            let full = Moved { bytes: 100_000, packets: 64, drained: false };
            assert_eq!(idle.after_turn(full), Next::Turn, "a flood gives its processor away");
        }
        // Packets that could not be read move no bytes, and more may wait behind them.
        assert_eq!(idle.after_turn(Moved { bytes: 0, packets: 0, drained: false }), Next::Turn);
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

    /// A drained turn with `packets` of 64 bytes of payload.
    fn small(packets: usize) -> Moved {
        Moved { bytes: packets * 92, packets, drained: true }
    }

    #[test]
    fn a_small_packet_stream_naps_while_it_pays() {
        let mut idle = Idle::default();
        for _ in 1..STREAM_TURNS {
            assert_eq!(idle.after_turn(small(1)), Next::Yield);
        }
        assert_eq!(idle.after_turn(small(1)), Next::Nap, "a stream is met packet by packet");
        for _ in 0..1000 {
            assert_eq!(idle.after_turn(small(NAP_PACKETS_MIN)), Next::Nap);
        }
        let full = Moved { drained: false, ..small(64) };
        assert_eq!(idle.after_turn(full), Next::Turn, "a nap while packets wait");
        assert_eq!(idle.after_turn(small(NAP_PACKETS_MIN)), Next::Nap);
        assert_eq!(
            idle.after_turn(Moved::NOTHING),
            Next::Yield,
            "a nap after the stream has ended"
        );
    }

    #[test]
    fn single_packets_meet_ever_fewer_naps() {
        let mut idle = Idle::default();
        // On a busy processor every yield lasts until the next packet of a ping-pong is there.
        let naps = (0..100_000).filter(|_| idle.after_turn(small(1)) == Next::Nap).count();
        assert!((1..150).contains(&naps), "{naps} of 100,000 packets of a ping-pong met a nap");
        // A stream is known again by its first nap that pays.
        while idle.after_turn(small(1)) != Next::Nap {}
        idle.after_turn(small(NAP_PACKETS_MIN));
        idle.after_turn(Moved::NOTHING);
        let turns = (1..).find(|_| idle.after_turn(small(1)) == Next::Nap).unwrap();
        assert_eq!(turns, 2 * STREAM_TURNS, "a proved stream waits as long as a doubtful one");
    }

    #[test]
    fn bulk_never_naps() {
        let mut idle = Idle::default();
        for turn in 0..1000 {
            // Acknowledgements between super-packets.
            let moved = if turn % 3 == 0 {
                Moved { bytes: 64 << 10, packets: 1, drained: true }
            } else {
                small(2)
            };
            assert_ne!(idle.after_turn(moved), Next::Nap, "bulk waits for a timer");
        }
    }
}

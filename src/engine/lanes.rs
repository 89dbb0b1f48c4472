//! Which lanes of the TUN device a turn reads, and how much of each: the prompt lane always, the
//! bulk lanes by deficit round robin. Pure, so that all engines share alike.
//!
//! The kernel's program gives a sender's packets to the prompt lane until there are many, and from
//! then on to a bulk lane (`src/sys/steering/steering.c`). What a sender put into the prompt lane
//! first must leave first. So the prompt lane is read first, and while it holds more than one
//! batch, the others wait: a worker that had no processor for a while finds many packets there. It
//! is read once more behind the bulk lanes, and what it has by then goes before theirs.

use super::io::{BATCH_BYTES, BATCH_PACKETS, Share};

/// Turns after which a lane that was empty is looked at again, besides those that follow a sleep,
/// which knows. An empty look costs 0.2 microseconds.
const LOOK_PERIOD: u32 = 8;

/// Looks in a row that must find a lane empty before it is looked at seldom: more than the turns of
/// a worker that waits for the next packet of a ping-pong.
const KEEN_LOOKS: u32 = 32;

/// Turns in a row for which the bulk lanes wait for the prompt lane: enough for all that its ring
/// has in them.
const WAIT_TURNS_MAX: u32 = 64;

#[derive(Debug)]
pub(super) struct Lanes {
    bulk: Vec<Lane>,
    turns: u32,
    waited_turns: u32,
    is_waiting: bool,
    active: usize,
}

#[derive(Debug, Default)]
struct Lane {
    /// What it may still bring. A super-packet is read whole, so this falls below zero.
    balance: isize,
    /// Whether it brought something the last time, and so has part in the batch.
    is_active: bool,
    empty_looks: u32,
    has_more: bool,
}

impl Lanes {
    pub(super) fn new(bulk: usize) -> Self {
        let bulk = std::iter::repeat_with(Lane::default).take(bulk).collect();
        Self { bulk, turns: 0, waited_turns: 0, is_waiting: false, active: 0 }
    }

    /// A turn begins. After a sleep, `woken` says which of the bulk lanes have packets, one bit for
    /// each.
    pub(super) fn begin(&mut self, woken: u32) {
        for (index, lane) in self.bulk.iter_mut().enumerate() {
            if woken >> index & 1 != 0 {
                if !lane.is_active {
                    // It begins to wait now. Others that wait already do so anew, once for each
                    // lane at most.
                    self.waited_turns = 0;
                }
                (lane.is_active, lane.empty_looks) = (true, 0);
            }
        }
        self.turns = self.turns.wrapping_add(1);
    }

    /// Whether this turn looks at a bulk lane, if the prompt lane lets it.
    pub(super) fn are_due(&self) -> bool {
        (0..self.bulk.len()).any(|index| self.is_due(index))
    }

    /// The prompt lane was read, and may hold more than a batch: then the others wait.
    pub(super) fn behind_prompt(&mut self, prompt_has_more: bool) {
        self.is_waiting = prompt_has_more && self.waited_turns < WAIT_TURNS_MAX;
        self.waited_turns = if self.is_waiting { self.waited_turns + 1 } else { 0 };
        self.active = self.bulk.iter().filter(|lane| lane.is_active).count().max(1);
        if !self.is_waiting {
            let quantum = (BATCH_BYTES / self.active).cast_signed();
            for lane in &mut self.bulk {
                let before = if lane.is_active { lane.balance } else { 0 };
                lane.balance = (before + quantum).min(quantum);
            }
        }
    }

    fn is_due(&self, index: usize) -> bool {
        let lane = &self.bulk[index];
        let is_its_turn = self.turns.wrapping_add(index as u32).is_multiple_of(LOOK_PERIOD);
        lane.is_active || lane.empty_looks < KEEN_LOOKS || is_its_turn
    }

    /// What this turn may take from bulk lane `index`, if it is to be read at all.
    pub(super) fn share(&self, index: usize) -> Option<Share> {
        let lane = self.bulk.get(index).filter(|_| !self.is_waiting && self.is_due(index))?;
        if !lane.is_active {
            return Some(Share { packets: BATCH_PACKETS / 4, load: BATCH_BYTES / 4 });
        }
        let load = usize::try_from(lane.balance).ok().filter(|load| *load > 0)?;
        Some(Share { packets: BATCH_PACKETS / self.active, load })
    }

    /// What bulk lane `index` brought.
    pub(super) fn took(&mut self, index: usize, load: usize, has_more: bool) {
        let Some(lane) = self.bulk.get_mut(index) else { return };
        (lane.is_active, lane.has_more) = (load > 0 || has_more, has_more);
        lane.empty_looks = if lane.is_active { 0 } else { lane.empty_looks.saturating_add(1) };
        lane.balance -= load.cast_signed();
        if !has_more {
            lane.balance = lane.balance.min(0);
        }
    }

    /// Whether any lane is known to hold more, or may, since it had to wait; of the prompt lane it
    /// is told.
    pub(super) fn have_more(&self, prompt_has_more: bool) -> bool {
        let has_more = |lane: &Lane| lane.has_more || self.is_waiting && lane.is_active;
        prompt_has_more || self.bulk.iter().any(has_more)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A turn over lanes of packets, each with its load, as engines do it, while the prompt lane
    /// holds `prompt` packets more than a batch; returns what each bulk lane brought.
    fn turn(lanes: &mut Lanes, queues: &mut [VecDeque<usize>], prompt: usize) -> Vec<usize> {
        lanes.begin(0);
        lanes.behind_prompt(prompt > 0);
        let mut brought = Vec::new();
        for (index, queue) in queues.iter_mut().enumerate() {
            let (mut packets, mut load) = (0, 0);
            if let Some(share) = lanes.share(index) {
                while packets < share.packets && load < share.load && !queue.is_empty() {
                    load += queue.pop_front().unwrap_or_default();
                    packets += 1;
                }
                let is_drained = packets < share.packets && load < share.load;
                lanes.took(index, load, !is_drained);
            }
            brought.push(load);
        }
        brought
    }

    fn full(load: usize) -> VecDeque<usize> {
        std::iter::repeat_n(load, 10_000).collect()
    }

    /// The slow twin: whoever has packets gets an even part of each turn.
    #[test]
    fn lanes_with_packets_share_evenly_whatever_these_weigh() {
        for loads in [[65_536, 131_072, 10_000], [8192, 131_072, 131_072], [20_000, 65_000, 70_001]]
        {
            for busy in 1..=3 {
                let mut queues: Vec<_> = loads[..busy].iter().map(|load| full(*load)).collect();
                queues.resize(3, VecDeque::new());
                let mut lanes = Lanes::new(3);
                let mut sums = [0; 3];
                // All are found by then.
                (0..LOOK_PERIOD).for_each(|_| drop(turn(&mut lanes, &mut queues, 0)));
                let turns = 300;
                for _ in 0..turns {
                    let brought = turn(&mut lanes, &mut queues, 0);
                    sums.iter_mut().zip(brought).for_each(|(sum, load)| *sum += load);
                }
                let ideal = turns * (BATCH_BYTES / busy);
                let off = BATCH_BYTES + 131_072;
                for (index, sum) in sums.into_iter().enumerate() {
                    let wanted = if index < busy { ideal } else { 0 };
                    assert!(sum.abs_diff(wanted) <= off, "{loads:?}, {busy}: {sums:?}, {ideal}");
                }
            }
        }
    }

    #[test]
    fn tiny_packets_share_the_places() {
        let mut lanes = Lanes::new(3);
        let mut queues = vec![full(1024), full(1024), VecDeque::new()];
        (0..LOOK_PERIOD).for_each(|_| drop(turn(&mut lanes, &mut queues, 0)));
        let each = BATCH_PACKETS / 2 * 1024;
        assert_eq!(turn(&mut lanes, &mut queues, 0), [each, each, 0]);
        assert!(lanes.have_more(false));
    }

    #[test]
    fn a_lane_alone_has_the_whole_batch() {
        let mut lanes = Lanes::new(3);
        let mut queues = vec![VecDeque::new(), full(65_536), VecDeque::new()];
        (0..LOOK_PERIOD).for_each(|_| drop(turn(&mut lanes, &mut queues, 0)));
        assert_eq!(turn(&mut lanes, &mut queues, 0), [0, BATCH_BYTES, 0]);
    }

    #[test]
    fn an_empty_lane_is_looked_at_now_and_then() {
        let mut lanes = Lanes::new(3);
        let mut looks = [0; 3];
        for _ in 0..KEEN_LOOKS {
            lanes.begin(0);
            lanes.behind_prompt(false);
            (0..3).for_each(|index| lanes.took(index, 0, false));
        }
        for _ in 0..10 * LOOK_PERIOD {
            lanes.begin(0);
            lanes.behind_prompt(false);
            for (index, looks) in looks.iter_mut().enumerate() {
                if lanes.share(index).is_some() {
                    *looks += 1;
                    lanes.took(index, 0, false);
                }
            }
        }
        assert_eq!(looks, [10; 3]);
        assert!(!lanes.have_more(false));
        lanes.begin(0b010);
        assert!(lanes.are_due());
        lanes.behind_prompt(true);
        assert!(lanes.share(1).is_none(), "the prompt lane may hold what was sent before");
        assert!(lanes.have_more(false), "who was woken gives way first");
        lanes.begin(0);
        lanes.behind_prompt(false);
        assert!(lanes.share(1).is_some(), "a lane that woke the worker is forgotten");
    }

    #[test]
    fn bulk_waits_for_a_full_prompt_lane_but_not_for_ever() {
        let mut lanes = Lanes::new(3);
        let mut queues = vec![full(65_536), VecDeque::new(), VecDeque::new()];
        (0..LOOK_PERIOD).for_each(|_| drop(turn(&mut lanes, &mut queues, 0)));
        assert_eq!(turn(&mut lanes, &mut queues, 0), [BATCH_BYTES, 0, 0]);
        let waited = (0..).find(|_| turn(&mut lanes, &mut queues, 1)[0] > 0);
        assert_eq!(waited, Some(WAIT_TURNS_MAX));
        assert_eq!(turn(&mut lanes, &mut queues, 1), [0, 0, 0]);
        assert_eq!(turn(&mut lanes, &mut queues, 0), [BATCH_BYTES, 0, 0]);
    }

    #[test]
    fn a_lane_waits_from_when_it_has_packets() {
        let mut lanes = Lanes::new(3);
        let mut queues = vec![VecDeque::new(), VecDeque::new(), VecDeque::new()];
        (0..KEEN_LOOKS).for_each(|_| drop(turn(&mut lanes, &mut queues, 0)));
        (1..WAIT_TURNS_MAX).for_each(|_| drop(turn(&mut lanes, &mut queues, 1)));
        queues[1] = full(65_536);
        let mut waited = 0;
        loop {
            // Each time that a sleep ends.
            lanes.begin(0b010);
            lanes.behind_prompt(true);
            if lanes.share(1).is_some() {
                break;
            }
            waited += 1;
        }
        assert_eq!(waited, WAIT_TURNS_MAX, "what the prompt lane had before is overtaken");
    }
}

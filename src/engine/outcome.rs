//! Carries out a list of sends in order, whatever the kernel says of each: what went, what is to
//! be taken apart, what is dropped and why. Pure: the system calls are closures, so every engine
//! shares this, and every refusal is tested without a kernel.

use std::io;
use std::ops::Range;

use crate::engine::refusal::{SendRefusal, read_send};
use crate::stats::DropReason;

/// Tries for one send whose error may be an earlier datagram's.
const STALE_RETRIES_MAX: usize = 8;

/// What became of one send or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The kernel took them.
    Sent,
    /// Refused in this form: a train, or a datagram that is longer than its path takes.
    Refused,
    /// Dropped for this reason.
    Dropped(DropReason),
}

/// Sends messages `0..count`.
///
/// `send(first)` offers all from `first` on and returns how many went, or the first one's error.
/// `is_train` tells whether a message can be taken apart. `wait` waits for room in the send
/// buffer and returns false when this turn's waiting is used up. `outcome` is told of every
/// message exactly once, in order.
pub(super) fn carry_out(
    count: usize,
    is_train: impl Fn(usize) -> bool,
    mut send: impl FnMut(usize) -> io::Result<usize>,
    mut wait: impl FnMut() -> bool,
    mut outcome: impl FnMut(Range<usize>, Outcome),
) {
    let (mut first, mut stale_retries) = (0, 0);
    while first < count {
        let (taken, what) = match send(first) {
            // A kernel that takes nothing and reports nothing would hold us here for ever.
            Ok(0) => (1, Outcome::Dropped(DropReason::SendFailed)),
            Ok(sent) => (sent, Outcome::Sent),
            Err(error) => match read_send(&error, is_train(first)) {
                SendRefusal::Busy if wait() => continue,
                SendRefusal::Busy => (1, Outcome::Dropped(DropReason::SendBufferFull)),
                SendRefusal::Stale if stale_retries < STALE_RETRIES_MAX => {
                    stale_retries += 1;
                    continue;
                }
                SendRefusal::Stale => (1, Outcome::Dropped(DropReason::SendFailed)),
                SendRefusal::Form => (1, Outcome::Refused),
                SendRefusal::Drop(reason) => (1, Outcome::Dropped(reason)),
            },
        };
        outcome(first..first + taken, what);
        first += taken;
        stale_retries = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rustix::io::Errno;

    use super::*;

    /// Runs a script of kernel answers and returns the outcomes and the waits asked for.
    fn play(
        count: usize,
        trains: &[usize],
        script: &[Result<usize, Errno>],
        waits: usize,
    ) -> (Vec<(Range<usize>, Outcome)>, usize) {
        let mut script: VecDeque<_> = script.iter().copied().collect();
        let mut waited = 0;
        let mut outcomes = Vec::new();
        carry_out(
            count,
            |index| trains.contains(&index),
            |first| {
                let answer = script.pop_front().unwrap_or(Ok(count - first));
                answer.map_err(io::Error::from)
            },
            || {
                waited += 1;
                waited <= waits
            },
            |range, what| outcomes.push((range, what)),
        );
        assert!(script.is_empty(), "the kernel was asked too seldom");
        (outcomes, waited)
    }

    #[test]
    fn an_error_costs_the_message_that_has_it_and_no_other() {
        let script = [Ok(2), Err(Errno::PERM), Ok(1)];
        let (outcomes, _) = play(4, &[], &script, 0);
        let forbidden = Outcome::Dropped(DropReason::SendForbidden);
        assert_eq!(outcomes, [(0..2, Outcome::Sent), (2..3, forbidden), (3..4, Outcome::Sent)]);
    }

    #[test]
    fn a_refused_train_is_taken_apart_and_a_single_datagram_is_not() {
        let script = [Err(Errno::INVAL), Err(Errno::INVAL), Ok(1)];
        let (outcomes, _) = play(3, &[0], &script, 0);
        let failed = Outcome::Dropped(DropReason::SendFailed);
        let expected = [(0..1, Outcome::Refused), (1..2, failed), (2..3, Outcome::Sent)];
        assert_eq!(outcomes, expected);
    }

    #[test]
    fn a_full_buffer_is_waited_for_once_and_then_drops_without_delay() {
        let full = Err(Errno::AGAIN);
        let (outcomes, waited) = play(3, &[], &[full, full, full, full], 1);
        let dropped = Outcome::Dropped(DropReason::SendBufferFull);
        assert_eq!(outcomes, [(0..1, dropped), (1..2, dropped), (2..3, dropped)]);
        assert_eq!(waited, 4, "the caller bounds the waiting, and is asked each time");
    }

    #[test]
    fn an_interrupted_send_is_tried_again_but_not_for_ever() {
        let script = vec![Err(Errno::INTR); STALE_RETRIES_MAX + 1];
        let (outcomes, _) = play(1, &[], &script, 0);
        assert_eq!(outcomes, [(0..1, Outcome::Dropped(DropReason::SendFailed))]);
        let (outcomes, _) = play(1, &[], &[Err(Errno::INTR), Ok(1)], 0);
        assert_eq!(outcomes, [(0..1, Outcome::Sent)]);
    }

    #[test]
    fn a_kernel_that_takes_nothing_does_not_hold_the_worker() {
        let (outcomes, _) = play(1, &[], &[Ok(0)], 0);
        assert_eq!(outcomes, [(0..1, Outcome::Dropped(DropReason::SendFailed))]);
    }
}

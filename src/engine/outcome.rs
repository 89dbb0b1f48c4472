//! Carries out a list of sends in order, whatever the kernel says of each: what went, what is to
//! be taken apart, what is dropped and why. Pure: the system calls are closures, so every engine
//! shares this, and every refusal is tested without a kernel.

use std::io;
use std::ops::Range;

use crate::stats::DropReason;

use super::errno::{SendError, classify_send_error};

/// Retries of one send whose error may be an earlier datagram's.
const STALE_RETRIES_MAX: usize = 8;

/// What became of one send or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The kernel took them.
    Sent,
    /// Refused in this form: a GSO batch, or a datagram that is longer than its path takes.
    Refused,
    /// Dropped for this reason.
    Dropped(DropReason),
}

/// Why the first of several messages did not go.
#[derive(Debug)]
pub(super) enum Unsent {
    /// The kernel was asked, and said so.
    Refused(io::Error),
    /// It was not asked: known to be in vain, or too dear.
    Withheld(DropReason),
}

/// Sends `messages`; returns the first that is left for later, or the end of the range.
///
/// `send(first)` offers all from `first` on and returns how many went, or why the first did not.
/// `is_batch` tells whether a message can be taken apart. `may_wait` is asked when the send buffer
/// is full: whether the rest is left for later, or dropped. `outcome` is told of every other
/// message exactly once, in order.
pub(super) fn carry_out(
    messages: Range<usize>,
    is_batch: impl Fn(usize) -> bool,
    mut send: impl FnMut(usize) -> Result<usize, Unsent>,
    mut may_wait: impl FnMut() -> bool,
    mut outcome: impl FnMut(Range<usize>, Outcome),
) -> usize {
    let (mut first, mut stale_retries) = (messages.start, 0);
    while first < messages.end {
        let (taken, what) = match send(first) {
            // A kernel that takes nothing and reports nothing would hold us here for ever.
            Ok(0) => (1, Outcome::Dropped(DropReason::SendFailed)),
            Ok(sent) => (sent, Outcome::Sent),
            Err(Unsent::Withheld(reason)) => (1, Outcome::Dropped(reason)),
            Err(Unsent::Refused(error)) => match classify_send_error(&error, is_batch(first)) {
                SendError::BufferFull if may_wait() => break,
                SendError::BufferFull => (1, Outcome::Dropped(DropReason::SendBufferFull)),
                SendError::Stale if stale_retries < STALE_RETRIES_MAX => {
                    stale_retries += 1;
                    continue;
                }
                SendError::Stale => (1, Outcome::Dropped(DropReason::SendFailed)),
                SendError::Form => (1, Outcome::Refused),
                SendError::Drop(reason) => (1, Outcome::Dropped(reason)),
            },
        };
        outcome(first..first + taken, what);
        first += taken;
        stale_retries = 0;
    }
    first
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rustix::io::Errno;

    use super::*;

    /// Runs a script of kernel answers and returns the outcomes and the first message that is left.
    fn play(
        messages: Range<usize>,
        batches: &[usize],
        script: &[Result<usize, Errno>],
        may_wait: bool,
    ) -> (Vec<(Range<usize>, Outcome)>, usize) {
        let mut script: VecDeque<_> = script.iter().copied().collect();
        let mut outcomes = Vec::new();
        let count = messages.end;
        let left = carry_out(
            messages,
            |index| batches.contains(&index),
            |first| {
                let answer = script.pop_front().unwrap_or(Ok(count - first));
                answer.map_err(|errno| Unsent::Refused(errno.into()))
            },
            || may_wait,
            |range, what| outcomes.push((range, what)),
        );
        assert!(script.is_empty(), "the kernel was asked too seldom");
        (outcomes, left)
    }

    #[test]
    fn an_error_costs_only_its_own_message() {
        let script = [Ok(2), Err(Errno::PERM), Ok(1)];
        let (outcomes, _) = play(0..4, &[], &script, false);
        let forbidden = Outcome::Dropped(DropReason::SendForbidden);
        assert_eq!(outcomes, [(0..2, Outcome::Sent), (2..3, forbidden), (3..4, Outcome::Sent)]);
    }

    #[test]
    fn only_a_refused_batch_is_taken_apart() {
        let script = [Err(Errno::INVAL), Err(Errno::INVAL), Ok(1)];
        let (outcomes, _) = play(0..3, &[0], &script, false);
        let failed = Outcome::Dropped(DropReason::SendFailed);
        let expected = [(0..1, Outcome::Refused), (1..2, failed), (2..3, Outcome::Sent)];
        assert_eq!(outcomes, expected);
    }

    #[test]
    fn a_full_buffer_delays_or_drops_the_rest() {
        let full = Err(Errno::AGAIN);
        let (outcomes, left) = play(0..4, &[], &[Ok(1), full], true);
        assert_eq!((outcomes, left), (vec![(0..1, Outcome::Sent)], 1));
        let (outcomes, left) = play(1..4, &[], &[full, Ok(1), full], false);
        let dropped = Outcome::Dropped(DropReason::SendBufferFull);
        assert_eq!(outcomes, [(1..2, dropped), (2..3, Outcome::Sent), (3..4, dropped)]);
        assert_eq!(left, 4);
    }

    #[test]
    fn an_interrupted_send_is_retried_a_few_times() {
        let script = vec![Err(Errno::INTR); STALE_RETRIES_MAX + 1];
        let (outcomes, _) = play(0..1, &[], &script, false);
        assert_eq!(outcomes, [(0..1, Outcome::Dropped(DropReason::SendFailed))]);
        let (outcomes, _) = play(0..1, &[], &[Err(Errno::INTR), Ok(1)], false);
        assert_eq!(outcomes, [(0..1, Outcome::Sent)]);
    }

    #[test]
    fn a_send_of_nothing_ends() {
        let (outcomes, _) = play(0..1, &[], &[Ok(0)], false);
        assert_eq!(outcomes, [(0..1, Outcome::Dropped(DropReason::SendFailed))]);
    }
}

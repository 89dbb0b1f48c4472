//! Peers to which the kernel refuses to send: each refusal costs a system call, so that a flood to
//! such a peer would take a worker from the others. Pure, over the caller's clock.

use crate::stats::{DropReason, HostKey, spread};

/// Refusals in a row, so that what a firewall drops here and there changes nothing.
pub(super) const IN_A_ROW_MIN: u32 = 16;

/// How long a peer is not tried then: a thousand tries a second are some thousandth of a processor,
/// and a peer that can be sent to again waits no longer than it takes to notice.
pub(super) const PAUSE_NS: u64 = 1_000_000;

/// The same where another port is left to send from: as long as the prober may take to find out.
pub(super) const PAUSE_OF_PORT_NS: u64 = 60_000_000_000;

/// Peers that are remembered, 8 KiB. Two that share a place are both tried each time, no more.
const PLACES: usize = 256;

#[derive(Debug)]
pub(super) struct Refused {
    in_a_row_min: u32,
    pause_ns: u64,
    places: Box<[Place]>,
    /// Places in which somebody was refused and has not been sent to since.
    active: usize,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    host: HostKey,
    in_a_row: u32,
    reason: DropReason,
    until_ns: u64,
}

/// A place that nobody has.
const FREE: Place =
    Place { host: HostKey::NOBODY, in_a_row: 0, reason: DropReason::SendFailed, until_ns: 0 };

impl Refused {
    /// Whoever is refused so often in a row is not tried for so long.
    pub(super) fn new(in_a_row_min: u32, pause_ns: u64) -> Self {
        let places = vec![FREE; PLACES].into_boxed_slice();
        Self { in_a_row_min, pause_ns, places, active: 0 }
    }

    /// Why `host` is not to be tried now, if it is not.
    #[inline]
    pub(super) fn reason(&self, host: HostKey, now_ns: u64) -> Option<DropReason> {
        if self.active == 0 {
            return None;
        }
        let place = self.places.get(spread(host.bits(), PLACES))?;
        let is_refused = place.host == host && now_ns < place.until_ns;
        is_refused.then_some(place.reason)
    }

    /// The kernel refused to send to `host`. A full buffer is no refusal.
    pub(super) fn note(&mut self, host: HostKey, reason: DropReason, now_ns: u64) {
        let is_refusal = matches!(
            reason,
            DropReason::SendForbidden | DropReason::SendUnreachable | DropReason::SendFailed
        );
        let Some(place) = self.places.get_mut(spread(host.bits(), PLACES)).filter(|_| is_refusal)
        else {
            return;
        };
        self.active += usize::from(place.in_a_row == 0);
        if place.host != host {
            *place = Place { host, ..FREE };
        }
        (place.reason, place.in_a_row) = (reason, place.in_a_row.saturating_add(1));
        if place.in_a_row >= self.in_a_row_min {
            place.until_ns = now_ns + self.pause_ns;
        }
    }

    /// Something went to `host`.
    #[inline]
    pub(super) fn went(&mut self, host: HostKey) {
        if self.active > 0
            && let Some(place) = self.places.get_mut(spread(host.bits(), PLACES))
            && place.host == host
        {
            self.active -= usize::from(place.in_a_row > 0);
            *place = FREE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: usize) -> HostKey {
        HostKey::of_index(number)
    }

    #[test]
    fn who_is_refused_all_the_time_is_tried_now_and_then() {
        let mut refused = Refused::new(IN_A_ROW_MIN, PAUSE_NS);
        let (mut tries, reason) = (0, DropReason::SendForbidden);
        let tried = host(1);
        for now_ns in (0..1_000_000_000).step_by(1000) {
            match refused.reason(tried, now_ns) {
                Some(told) => assert_eq!(told, reason, "another reason than the kernel's"),
                None => {
                    refused.note(tried, reason, now_ns);
                    tries += 1;
                }
            }
        }
        assert!((900..1100).contains(&tries), "{tries} tries of 1,000,000 packets in a second");
        let other = host(2);
        assert_eq!(refused.reason(other, 0), None, "one refused peer costs another its packets");
        refused.went(tried);
        assert_eq!(
            (refused.reason(tried, 0), refused.active),
            (None, 0),
            "it can be sent to again"
        );
    }

    #[test]
    fn who_loses_some_packets_loses_no_others() {
        let tried = host(1);
        let mut refused = Refused::new(IN_A_ROW_MIN, PAUSE_NS);
        for packet in 0..100_000 {
            assert_eq!(refused.reason(tried, packet), None);
            match packet % 10 {
                0 => refused.went(tried),
                _ => refused.note(tried, DropReason::SendForbidden, packet),
            }
        }
        for _ in 0..100 {
            refused.note(tried, DropReason::SendBufferFull, 0);
        }
        assert_eq!(refused.reason(tried, 0), None, "a full buffer is nobody's own");
    }

    #[test]
    fn peers_that_share_a_place_are_all_tried() {
        let mut refused = Refused::new(IN_A_ROW_MIN, PAUSE_NS);
        let all: Vec<_> = (0..10 * PLACES).map(host).collect();
        for _ in 0..IN_A_ROW_MIN {
            all.iter().for_each(|host| refused.note(*host, DropReason::SendFailed, 0));
        }
        assert!(refused.active <= PLACES);
        assert!(all.iter().all(|host| refused.reason(*host, 0).is_none()));
        all.iter().for_each(|host| refused.went(*host));
        assert_eq!(refused.active, 0);
    }
}

//! Which datagrams a worker gives up first when more arrive than it delivers: those of who sends
//! much. Dropping one costs a twentieth of delivering it, so the worker keeps up, and the kernel
//! need not drop blindly at the end of the socket's buffer. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::packet::Family;
use crate::packet::header::protocol;

/// Sixteenths of the receive buffer from which on datagrams are shed, and at which all are that
/// may: four flows whose congestion control does not go by loss (BBR) keep it at 10 to 12, and four
/// of the largest batches fit into what is left.
const SHED_FROM: u64 = 11;
const SHED_ALL_AT: u64 = 15;

/// Of so many datagrams as many are shed as the level says.
const LEVEL_MAX: u64 = 256;

/// Senders and receivers told apart, 32 KiB; those that share a place count as one.
const PLACES: usize = 4096;

/// What a datagram costs its pair of addresses, and by how much that may be behind, as in
/// `src/sys/steering/steering.c`: 250 a second, and 32 at once.
const DATAGRAM_NS: u64 = 4_000_000;
const CREDIT_NS: u64 = 128_000_000;

/// 2^64 over the golden ratio, odd (Knuth, The Art of Computer Programming, volume 3, 6.4).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Remembers, while there is too much, who sent it.
#[derive(Debug)]
pub(super) struct Shedder {
    /// When each pair will have paid for what it sent.
    due_ns: Box<[u64]>,
    level: u64,
    owed: u64,
}

impl Shedder {
    pub(super) fn new() -> Self {
        Self { due_ns: vec![0; PLACES].into_boxed_slice(), level: 0, owed: 0 }
    }

    /// The receive buffer, `size` bytes, has `used` in it.
    pub(super) fn set_fill(&mut self, used: u64, size: u64) {
        let part = (size / 16).max(1);
        let above = used.saturating_sub(SHED_FROM * part);
        self.level = (above * LEVEL_MAX / ((SHED_ALL_AT - SHED_FROM) * part)).min(LEVEL_MAX);
    }

    /// How many of a batch of `datagrams`, the first of which begins with `packet`, are given up:
    /// none, all, or the first. One lost segment slows a TCP sender down as much as a whole batch
    /// does (RFC 5681, section 3.1; RFC 6675), and only one is to be sent again.
    #[inline]
    pub(super) fn shed(&mut self, packet: &[u8], datagrams: u32, now_ns: u64) -> u32 {
        if self.level == 0 || !self.is_chosen(packet, datagrams, now_ns) {
            return 0;
        }
        let slows_down = parties(packet).is_some_and(|(_, it)| it == protocol::TCP);
        if slows_down && self.level < LEVEL_MAX { 1 } else { datagrams }
    }

    #[cold]
    fn is_chosen(&mut self, packet: &[u8], datagrams: u32, now_ns: u64) -> bool {
        let Some((addresses, protocol)) = parties(packet) else { return true };
        let key = addresses
            .iter()
            .chain([&protocol])
            .fold(0, |key: u64, byte| (key ^ u64::from(*byte)).wrapping_mul(SPREAD));
        let place = (key >> (u64::BITS - PLACES.ilog2())) as usize;
        let Some(due_ns) = self.due_ns.get_mut(place) else { return false };
        let paid_ns = (*due_ns).max(now_ns) + u64::from(datagrams) * DATAGRAM_NS;
        if paid_ns <= now_ns + CREDIT_NS {
            *due_ns = paid_ns;
            return false;
        }
        self.owed += self.level;
        let is_chosen = self.owed >= LEVEL_MAX;
        self.owed %= LEVEL_MAX;
        is_chosen
    }
}

/// The addresses of a packet that nobody has parsed yet, and what its header says comes behind.
fn parties(packet: &[u8]) -> Option<(&[u8], u8)> {
    let (addresses, protocol_at) = match packet.first()? >> 4 {
        Ipv6Addr::VERSION => (Ipv6Addr::ADDRESSES_AT..Ipv6Addr::HEADER_BYTES_MIN, 6),
        _ => (Ipv4Addr::ADDRESSES_AT..Ipv4Addr::HEADER_BYTES_MIN, 9),
    };
    Some((packet.get(addresses)?, *packet.get(protocol_at)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(source: u16, protocol: u8) -> Vec<u8> {
        let mut packet = vec![0; 28];
        packet[9] = protocol;
        packet[14..16].copy_from_slice(&source.to_be_bytes());
        packet
    }

    #[test]
    fn nothing_is_shed_while_there_is_room() {
        let mut shedder = Shedder::new();
        for used in [0, 1000, 5000] {
            shedder.set_fill(used, 8000);
            assert!((0..1000).all(|_| shedder.shed(&packet(1, 17), 64, 1) == 0), "{used}");
        }
        shedder.set_fill(0, 0);
        assert_eq!(shedder.shed(&packet(1, 17), 64, 1), 0);
    }

    #[test]
    fn who_sends_much_is_shed_in_the_measure_of_the_fill() {
        for (used, expected) in [(6000, 250), (6500, 500), (7500, 1000), (9000, 1000)] {
            let mut shedder = Shedder::new();
            shedder.set_fill(used, 8000);
            let mut is_shed = || shedder.shed(&packet(1, 17), 64, 1) == 64;
            let shed = (0..1000).filter(|_| is_shed()).count();
            assert!(shed.abs_diff(expected) < 10, "{used}: {shed}");
        }
    }

    #[test]
    fn who_sends_little_is_kept() {
        let mut shedder = Shedder::new();
        shedder.set_fill(8000, 8000);
        let mut lost = 0;
        for tick in 0..10_000_u64 {
            let now_ns = tick * 1_000_000;
            for source in 0..255 {
                shedder.shed(&packet(source, 17), 64, now_ns);
            }
            // A hundred a second, also from an address that floods.
            if tick % 10 == 0 {
                lost += u64::from(shedder.shed(&packet(7, 1), 1, now_ns) != 0);
            }
        }
        assert!(lost == 0, "{lost} of 1000 pings were shed");
        assert_eq!(shedder.shed(&[0; 3], 1, 0), 1, "a runt has no sender");
    }

    #[test]
    fn tcp_loses_one_segment_of_a_batch_while_that_may_help() {
        let shed = |used, protocol, datagrams| {
            let mut shedder = Shedder::new();
            shedder.set_fill(used, 8000);
            (0..1000).map(|_| shedder.shed(&packet(1, protocol), datagrams, 1)).max()
        };
        assert_eq!(shed(6000, 6, 45), Some(1), "45 segments are sent again for one");
        assert_eq!(shed(7500, 6, 45), Some(45), "who doesn't slow down fills the buffer");
        assert_eq!(shed(6000, 6, 1), Some(1));
        assert_eq!(shed(6000, 17, 45), Some(45), "UDP does not slow down");
    }
}

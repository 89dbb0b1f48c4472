//! Who was sent long datagrams since somebody last looked: marks, not counts, so that what watches
//! the paths of those in use need not watch those of all.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicU64, Ordering};

/// A place without a mark.
const FREE: u64 = u64::MAX;

/// Datagrams beyond this length are long. A little less than the narrowest path that is reckoned
/// with takes (548 bytes), so that its full packets count as well, and those of 544 that TCP sends
/// when it fragments.
pub const LONG_BYTES: u16 = 512;

/// Places for marks, chosen by the last byte of an address; of two that share one, the later
/// stands.
const PLACES: usize = 256;

/// The marks of one worker.
///
/// A mark is set by a load and seldom a store, and taken by another thread.
#[derive(Debug)]
pub struct LongSends(Box<[AtomicU64]>);

impl Default for LongSends {
    fn default() -> Self {
        Self(std::iter::repeat_with(|| AtomicU64::new(FREE)).take(PLACES).collect())
    }
}

impl LongSends {
    /// Marks `peer`, which was sent datagrams beyond [`LONG_BYTES`].
    #[inline]
    pub fn mark(&self, peer: SocketAddrV4) {
        let place = &self.0[usize::from(peer.ip().octets()[3])];
        let packed = pack(peer);
        if place.load(Ordering::Relaxed) != packed {
            place.store(packed, Ordering::Relaxed);
        }
    }

    /// Those who are marked; forgets them.
    pub fn take(&self) -> impl Iterator<Item = SocketAddrV4> {
        let marked = self.0.iter().filter(|place| place.load(Ordering::Relaxed) != FREE);
        marked.map(|place| unpack(place.swap(FREE, Ordering::Relaxed)))
    }
}

/// As one number, not 0 unless both parts are.
fn pack(peer: SocketAddrV4) -> u64 {
    u64::from(peer.ip().to_bits()) << 16 | u64::from(peer.port())
}

fn unpack(packed: u64) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from_bits((packed >> 16) as u32), packed as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_and_port_round_trips() {
        for text in ["0.0.0.0:0", "255.255.255.255:65535", "192.0.2.1:8285", "10.0.0.0:1"] {
            let address: SocketAddrV4 = text.parse().unwrap();
            assert_eq!(unpack(pack(address)), address);
            assert_ne!(pack(address), FREE);
        }
    }

    #[test]
    fn a_mark_is_taken_once() {
        let peer = "192.0.2.2:8285".parse().unwrap();
        let sends = LongSends::default();
        sends.mark(peer);
        sends.mark(peer);
        assert_eq!(sends.take().collect::<Vec<_>>(), [peer]);
        assert_eq!(sends.take().count(), 0);
    }
}

//! What the programs and weftd share: the maps, and the bytes of their keys and values, as
//! `tunnel.c` beside this file declares them.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::route::Prefix;
use crate::sys::bpf::{MAPPABLE, MapKind, MapShape, NO_PREALLOCATION};

/// Most lengths of prefix among the leases of one network that the programs look for.
pub const LENGTHS_MAX: usize = 4;

/// Most peers that the programs know; the workers carry the packets of all others.
pub const PEERS_MAX: u32 = 16_384;

/// The shapes of the maps, in the order of their numbers.
pub const MAPS: [MapShape; 5] = [
    MapShape::array(SETTINGS_BYTES, 1, 0),
    peers(8),
    MapShape::array(COUNT_WORDS * 8, PEERS_MAX, MAPPABLE),
    MapShape::array(16, STREAMS_MAX, 0),
    peers(32),
];

/// A map of peers by their leases, masks and network addresses of so many bytes in all.
const fn peers(key_bytes: u32) -> MapShape {
    MapShape {
        kind: MapKind::Hash,
        key_bytes,
        value_bytes: PEER_BYTES as u32,
        entries: PEERS_MAX,
        flags: NO_PREALLOCATION,
    }
}

/// Streams that the programs tell apart, by the hash of their flow.
const STREAMS_MAX: u32 = 4096;

const SETTINGS_BYTES: usize = 168;
const PEER_BYTES: usize = 20;
/// Words of one peer's counts: a cache line for each direction.
pub(super) const COUNT_WORDS: usize = 16;

/// What the programs have to know of this host. (`struct settings`)
#[derive(Debug, Clone)]
pub struct Settings {
    /// When they stop to take packets, in nanoseconds of CLOCK_BOOTTIME.
    pub until_ns: u64,
    /// When they stop to leave fast streams of small datagrams to the workers, who send them in
    /// trains; the same clock.
    pub streams_until_ns: u64,
    /// This host's lease, whose network address is that of the TUN device.
    pub subnet: Prefix,
    /// The tunnel's own address.
    pub underlay_address: Ipv4Addr,
    /// The tunnel's port, on every host.
    pub port: u16,
    /// Largest inner packet.
    pub mtu_bytes: u16,
    /// Masks of the leases' prefixes, longest first.
    pub masks: Vec<u32>,
    /// Number of the device that carries the tunnel.
    pub underlay_device: u32,
    /// Its hardware address.
    pub hardware_address: [u8; 6],
    /// Number of the TUN device.
    pub tun_device: u32,
    /// Number of the device whose other end merges packets; 0 if none should.
    pub gro_device: u32,
    /// This host's IPv6 lease, if the programs carry that family.
    pub subnet_v6: Option<Prefix<Ipv6Addr>>,
    /// As `masks`, of the IPv6 leases.
    pub masks_v6: Vec<u128>,
}

impl Settings {
    /// As the map holds them. Masks beyond [`LENGTHS_MAX`] are left out.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut masks = [[0; 4]; LENGTHS_MAX];
        for (place, mask) in masks.iter_mut().zip(&self.masks) {
            *place = mask.to_be_bytes();
        }
        let mut masks_v6 = [[0; 16]; LENGTHS_MAX];
        for (place, mask) in masks_v6.iter_mut().zip(&self.masks_v6) {
            *place = mask.to_be_bytes();
        }
        let [subnet_v6_mask, subnet_v6] = self.subnet_v6.map(parts_v6).unwrap_or_default();
        [
            self.until_ns.to_ne_bytes().as_slice(),
            &self.streams_until_ns.to_ne_bytes(),
            &self.subnet.network().octets(),
            &self.subnet.mask().to_be_bytes(),
            &self.subnet.network().octets(),
            &self.underlay_address.octets(),
            masks.as_flattened(),
            &self.underlay_device.to_ne_bytes(),
            &self.tun_device.to_ne_bytes(),
            &self.gro_device.to_ne_bytes(),
            &self.port.to_be_bytes(),
            &self.mtu_bytes.to_ne_bytes(),
            &self.hardware_address,
            &[0; 2],
            &subnet_v6,
            &subnet_v6_mask,
            masks_v6.as_flattened(),
        ]
        .concat()
    }
}

/// How the programs reach a peer, and what they may do for it. (`struct peer`)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerEntry {
    /// Its tunnel's address.
    pub address: Ipv4Addr,
    /// Which of the counts are its own, below [`PEERS_MAX`].
    pub number: u32,
    /// The hardware address of the neighbour that its packets are given to, itself or a gateway,
    /// if packets may be sent to it: it takes UDP checksum 0.
    pub next_hop: Option<[u8; 6]>,
    /// Whether packets are taken from it.
    pub is_received_from: bool,
}

impl PeerEntry {
    /// As the map holds it, with the network address of its IPv4 lease, which is its TUN device's.
    pub fn to_bytes(self, tun_address: Ipv4Addr) -> [u8; PEER_BYTES] {
        let flags = u16::from(self.next_hop.is_some()) | u16::from(self.is_received_from) << 1;
        let mut bytes = [0; PEER_BYTES];
        let addresses = [self.address.octets(), tun_address.octets(), self.number.to_ne_bytes()];
        bytes[..12].copy_from_slice(addresses.as_flattened());
        bytes[12..14].copy_from_slice(&flags.to_ne_bytes());
        bytes[14..].copy_from_slice(&self.next_hop.unwrap_or_default());
        bytes
    }
}

/// The mask of an IPv6 lease and its network address.
fn parts_v6(subnet: Prefix<Ipv6Addr>) -> [[u8; 16]; 2] {
    [subnet.mask().to_be_bytes(), subnet.network().octets()]
}

/// The key of a peer by its IPv6 lease. (`struct prefix_v6`)
pub(super) fn key_of_v6(subnet: Prefix<Ipv6Addr>) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(parts_v6(subnet).as_flattened());
    bytes
}

/// The key of a peer: its lease. (`struct prefix`)
pub(super) fn key_of(subnet: Prefix) -> [u8; 8] {
    let mut bytes = [0; 8];
    let parts = [subnet.mask().to_be_bytes(), subnet.network().octets()];
    bytes.copy_from_slice(parts.as_flattened());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_laid_out_as_the_programs_read_them() {
        let settings = Settings {
            until_ns: 0x0807_0605_0403_0201,
            streams_until_ns: 9,
            subnet: "10.5.1.0/24".parse().unwrap(),
            underlay_address: Ipv4Addr::new(192, 0, 2, 1),
            port: 8285,
            mtu_bytes: 0x05c0,
            masks: vec![0xffff_ff00, 0xffff_f000],
            underlay_device: 2,
            hardware_address: [2, 0, 0, 0, 0, 7],
            tun_device: 3,
            gro_device: 0,
            subnet_v6: "fd00:5:0:1::/64".parse().ok(),
            masks_v6: vec![u128::MAX << 64, u128::MAX << 66],
        };
        let expected = [
            [1, 2, 3, 4],
            [5, 6, 7, 8],
            [9, 0, 0, 0],
            [0; 4],
            [10, 5, 1, 0],
            [255, 255, 255, 0],
            [10, 5, 1, 0],
            [192, 0, 2, 1],
            [255, 255, 255, 0],
            [255, 255, 240, 0],
            [0; 4],
            [0; 4],
            [2, 0, 0, 0],
            [3, 0, 0, 0],
            [0; 4],
            [0x20, 0x5d, 0xc0, 0x05],
            [2, 0, 0, 0],
            [0, 7, 0, 0],
            // IPv6: the subnet, its mask, the leases' masks.
            [0xfd, 0, 0, 5],
            [0, 0, 0, 1],
            [0; 4],
            [0; 4],
            [255; 4],
            [255; 4],
            [0; 4],
            [0; 4],
            [255; 4],
            [255; 4],
            [0; 4],
            [0; 4],
            [255; 4],
            [255, 255, 255, 252],
            [0; 4],
            [0; 4],
        ];
        let (known, unused) = expected.as_flattened().split_at(SETTINGS_BYTES - 32);
        assert!(unused.is_empty());
        let bytes = settings.to_bytes();
        assert_eq!(bytes[..known.len()], *known);
        assert_eq!(bytes[known.len()..], [0; 32], "no more masks");
        let without = Settings { subnet_v6: None, masks_v6: Vec::new(), ..settings };
        assert_eq!(without.to_bytes()[72..], [0; 96], "without IPv6 nothing of it is taken");
    }

    #[test]
    fn peers_are_laid_out_as_the_programs_read_them() {
        let entry = PeerEntry {
            address: Ipv4Addr::new(192, 0, 2, 2),
            number: 7,
            next_hop: Some([2, 0, 0, 0, 0, 9]),
            is_received_from: true,
        };
        let expected = [[192, 0, 2, 2], [10, 5, 2, 0], [7, 0, 0, 0], [3, 0, 2, 0], [0, 0, 0, 9]];
        assert_eq!(entry.to_bytes(Ipv4Addr::new(10, 5, 2, 0)), expected.as_flattened());
        let key = key_of("10.5.2.0/23".parse().unwrap());
        assert_eq!(key, [255, 255, 254, 0, 10, 5, 2, 0]);
        let key = key_of_v6("fd00:5::/32".parse().unwrap());
        assert_eq!(key[..8], [255, 255, 255, 255, 0, 0, 0, 0]);
        assert_eq!(key[16..24], [0xfd, 0, 0, 5, 0, 0, 0, 0]);
    }
}

//! The 10-byte virtio-net header before every packet of the TUN device: format only, no policy.
//!
//! Source: `include/uapi/linux/virtio_net.h`, `drivers/net/tun_vnet.h`. Little-endian, which the
//! device is told with TUNSETVNETLE. The kernel's `hdr_len` is a hint that forwarded packets get
//! wrong, so it is never read.

use std::num::NonZeroU16;

use crate::packet::Family;

/// Size of the header.
pub const VNET_HEADER_BYTES: usize = 10;

const FLAG_NEEDS_CHECKSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// A checksum that somebody else completes: it covers the packet from `start` on and lands at
/// `start + offset`, where the pseudo-header's folded sum already stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialChecksum {
    /// First byte covered.
    pub start: u16,
    /// Where the checksum lies, from `start`.
    pub offset: u16,
}

/// What a super-packet is cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segmentation {
    /// The transport that is cut.
    pub kind: SegmentationKind,
    /// Transport payload of each segment but the last.
    pub payload_bytes: NonZeroU16,
}

/// Transports that can be segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentationKind {
    /// TCP over IPv4 or IPv6 (TSO).
    Tcp,
    /// UDP (USO).
    Udp,
}

/// What the header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VnetHeader {
    /// The checksum still to be completed, if any.
    pub checksum: Option<PartialChecksum>,
    /// How the packet is to be cut, if it is a super-packet.
    pub segmentation: Option<Segmentation>,
}

impl VnetHeader {
    /// Reads a header; `None` for a segmentation type that was never asked for, or of size zero.
    pub fn parse(bytes: &[u8; VNET_HEADER_BYTES]) -> Option<Self> {
        let word = |low, high| u16::from_le_bytes([low, high]);
        let checksum = (bytes[0] & FLAG_NEEDS_CHECKSUM != 0).then(|| PartialChecksum {
            start: word(bytes[6], bytes[7]),
            offset: word(bytes[8], bytes[9]),
        });
        let kind = match bytes[1] & !GSO_ECN {
            GSO_NONE => return Some(Self { checksum, segmentation: None }),
            GSO_TCP4 | GSO_TCP6 => SegmentationKind::Tcp,
            GSO_UDP_L4 => SegmentationKind::Udp,
            _ => return None,
        };
        let payload_bytes = NonZeroU16::new(word(bytes[4], bytes[5]))?;
        Some(Self { checksum, segmentation: Some(Segmentation { kind, payload_bytes }) })
    }

    /// Writes a header for a packet of the family `A` whose headers take `header_bytes`.
    pub fn encode<A: Family>(&self, header_bytes: u16) -> [u8; VNET_HEADER_BYTES] {
        let mut bytes = [0; VNET_HEADER_BYTES];
        if let Some(checksum) = self.checksum {
            bytes[0] = FLAG_NEEDS_CHECKSUM;
            bytes[6..8].copy_from_slice(&checksum.start.to_le_bytes());
            bytes[8..10].copy_from_slice(&checksum.offset.to_le_bytes());
        }
        if let Some(segmentation) = self.segmentation {
            bytes[1] = match segmentation.kind {
                SegmentationKind::Tcp if A::VERSION == 4 => GSO_TCP4,
                SegmentationKind::Tcp => GSO_TCP6,
                SegmentationKind::Udp => GSO_UDP_L4,
            };
            bytes[2..4].copy_from_slice(&header_bytes.to_le_bytes());
            bytes[4..6].copy_from_slice(&segmentation.payload_bytes.get().to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn a_tcp_super_packet_header_is_read() {
        // NEEDS_CSUM, TCPV4 | ECN, hdr_len 66 (wrong on purpose), gso 1420, start 20, offset 16.
        let bytes = [1, 0x81, 66, 0, 0x8c, 0x05, 20, 0, 16, 0];
        let header = VnetHeader::parse(&bytes).unwrap();
        assert_eq!(header.checksum, Some(PartialChecksum { start: 20, offset: 16 }));
        let segmentation = header.segmentation.unwrap();
        assert_eq!(segmentation.kind, SegmentationKind::Tcp);
        assert_eq!(segmentation.payload_bytes.get(), 1420);
        let encoded = header.encode::<Ipv4Addr>(52);
        assert_eq!(encoded, [1, 1, 52, 0, 0x8c, 0x05, 20, 0, 16, 0]);
        let encoded = header.encode::<Ipv6Addr>(72);
        assert_eq!(encoded, [1, 4, 72, 0, 0x8c, 0x05, 20, 0, 16, 0]);
        assert_eq!(VnetHeader::parse(&encoded), Some(header), "TSO of both families is one kind");
    }

    #[test]
    fn unknown_types_and_zero_sizes_are_refused() {
        assert_eq!(VnetHeader::parse(&[0, 3, 0, 0, 100, 0, 0, 0, 0, 0]), None);
        assert_eq!(VnetHeader::parse(&[1, 1, 0, 0, 0, 0, 20, 0, 16, 0]), None);
        assert_eq!(VnetHeader::parse(&[0; 10]), Some(VnetHeader::default()));
    }
}

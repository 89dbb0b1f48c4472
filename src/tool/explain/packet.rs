//! The packet that stands for those that are explained, and what its sender is told.

use super::family::ToldFamily;
use crate::packet::ecn::Ecn;
use crate::packet::header::Header;
use crate::packet::icmp::ErrorKind;

/// The ends of the packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends<A> {
    pub(super) source: A,
    pub(super) destination: A,
}

pub(super) fn told<A: ToldFamily>(kind: ErrorKind) -> &'static str {
    let is_v4 = A::BITS == 32;
    match kind {
        ErrorKind::NetUnreachable if is_v4 => "network unreachable",
        ErrorKind::NetUnreachable => "no route",
        ErrorKind::TimeExceeded => "time exceeded",
        ErrorKind::PacketTooBig { .. } if is_v4 => "fragmentation needed",
        ErrorKind::PacketTooBig { .. } => "packet too big",
    }
}

/// An ordinary packet with nothing in it, behind its header.
pub(super) fn packet<A: ToldFamily>(
    ends: Ends<A>,
    total_bytes: u16,
    dont_fragment: bool,
) -> (Header<A>, Vec<u8>) {
    let Ends { source, destination } = ends;
    let header = Header {
        header_bytes: A::HEADER_BYTES_MIN as u16,
        ecn: Ecn::NotEct,
        total_bytes,
        id: 0,
        dont_fragment,
        more_fragments: false,
        fragment_offset_bytes: 0,
        ttl: 64,
        // For experiments (RFC 3692): nothing looks for ports in it.
        protocol: 253,
        source,
        destination,
    };
    (header, vec![0; total_bytes.into()])
}

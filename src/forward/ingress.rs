//! Packets from the network: cut received trains into packets, validate, decide, decrement TTL,
//! and merge them into super-packets for the TUN device.

use std::net::SocketAddrV4;

use crate::offload::{CoalesceLimits, Coalescer, Full, Piece};
use crate::packet::ipv4::{self, Ipv4Header};
use crate::stats::DropReason;

use super::decide::{IngressVerdict, Judged};
use super::{Pass, Replies};

/// What one receive brought: a datagram, or a train of equal ones, the last possibly shorter.
#[derive(Debug, Clone, Copy)]
pub struct Train {
    /// Where in the arena.
    pub bytes: Piece,
    /// Size of each datagram but the last; 0 for a single datagram, whatever its size.
    pub segment_bytes: u16,
    /// Who sent it.
    pub sender: SocketAddrV4,
}

/// The ingress half of a worker: TUN writes under construction, and the errors that are due.
pub struct Ingress {
    coalescer: Coalescer,
    replies: Replies,
    /// What is left of a train that met a full plan.
    pending: Option<Train>,
    /// The datagram that was judged last.
    current: Piece,
}

impl Ingress {
    /// An empty half.
    #[must_use]
    pub fn new(limits: CoalesceLimits) -> Self {
        Self {
            coalescer: Coalescer::new(limits),
            replies: Replies::new(),
            pending: None,
            current: Piece::default(),
        }
    }

    /// Where in the arena the datagram lies that was judged last.
    #[must_use]
    pub fn current(&self) -> Piece {
        self.current
    }

    /// Forgets all writes and errors that are due, whatever state a panic left them in.
    pub fn abandon(&mut self) {
        self.pending = None;
        self.replies.clear();
        self.coalescer.clear();
    }

    /// The writes planned so far.
    pub fn coalescer_mut(&mut self) -> &mut Coalescer {
        &mut self.coalescer
    }

    /// The ICMP errors due; each names the tunnel endpoint it goes to.
    pub fn replies_mut(&mut self) -> &mut Replies {
        &mut self.replies
    }

    /// Takes in a train. On `Full`, write the plan, clear it, then [`Self::resume`] until it
    /// succeeds.
    pub fn process(&mut self, pass: &Pass<'_>, arena: &mut [u8], train: Train) -> Result<(), Full> {
        debug_assert!(self.pending.is_none(), "resume first");
        pass.stats.reads.add(1);
        let packets = match u32::from(train.segment_bytes) {
            0 => 1,
            segment_bytes => train.bytes.bytes.div_ceil(segment_bytes),
        };
        // An empty datagram is a packet too: a runt.
        pass.stats.packets_received.add(u64::from(packets.max(1)));
        pass.stats.bytes_received.add(u64::from(train.bytes.bytes));
        if train.bytes.bytes == 0 {
            pass.stats.drop(DropReason::Runt, 1);
            return Ok(());
        }
        self.pending = Some(train);
        self.resume(pass, arena)
    }

    /// Goes on with the train that met a full plan.
    pub fn resume(&mut self, pass: &Pass<'_>, arena: &mut [u8]) -> Result<(), Full> {
        let Some(mut train) = self.pending.take() else { return Ok(()) };
        let mut judged = Judged::default();
        while train.bytes.bytes > 0 {
            if !self.coalescer.has_room() {
                self.pending = Some(train);
                return Err(Full);
            }
            let bytes = match u32::from(train.segment_bytes) {
                0 => train.bytes.bytes,
                segment_bytes => train.bytes.bytes.min(segment_bytes),
            };
            let datagram = Piece { offset: train.bytes.offset, bytes };
            train.bytes.offset += bytes;
            train.bytes.bytes -= bytes;
            self.packet(pass, arena, train.sender, datagram, &mut judged);
        }
        Ok(())
    }

    fn packet(
        &mut self,
        pass: &Pass<'_>,
        arena: &mut [u8],
        sender: SocketAddrV4,
        datagram: Piece,
        judged: &mut Judged,
    ) {
        self.current = datagram;
        #[cfg(test)]
        super::tests::trip(datagram.of(arena).unwrap_or_default());
        let Some(bytes) = datagram.of_mut(arena) else {
            return pass.stats.drop(DropReason::InternalError, 1);
        };
        let mut header = match Ipv4Header::parse(bytes) {
            Ok(header) => header,
            Err(fault) => return pass.stats.drop(fault.into(), 1),
        };
        // Whatever follows the total length is padding, and goes no further.
        let packet = Piece { bytes: u32::from(header.total_bytes), ..datagram };
        let Some(bytes) = bytes.get_mut(..usize::from(header.total_bytes)) else {
            return pass.stats.drop(DropReason::InternalError, 1);
        };
        match judged.ingress(pass.local, pass.table, *sender.ip(), &header, bytes) {
            IngressVerdict::Deliver => {}
            IngressVerdict::Answer(kind, reason, endpoint) => {
                pass.stats.drop(reason, 1);
                let source = pass.local.tun_address;
                self.replies.answer(pass, kind, source, Some(endpoint), &header, bytes);
                return;
            }
            IngressVerdict::Drop(reason) => return pass.stats.drop(reason, 1),
        }
        ipv4::decrement_ttl(bytes);
        header.ttl -= 1;
        if self.coalescer.push(arena, packet, &header).is_err() {
            // Never seen: room was checked.
            pass.stats.drop(DropReason::InternalError, 1);
        }
    }
}

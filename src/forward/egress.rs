//! Packets from the TUN device: validate, decide, decrement TTL, cut super-packets, and gather
//! datagrams into trains.

use std::net::SocketAddrV4;

use crate::offload::{
    Full, PartialChecksum, Piece, Segmentation, SendLimits, SendPlan, Splitter, VNET_HEADER_BYTES,
    VnetHeader,
};
use crate::packet::ipv4::{self, Ipv4Header};
use crate::packet::transport;
use crate::stats::DropReason;

use super::decide::{self, EgressVerdict};
use super::{Pass, Replies};

/// The egress half of a worker: a plan of sends under construction, and the errors that are due.
///
/// The arena that every call gets is the worker's: packets are read into its front, and from
/// `headers_at` on it holds the headers that cutting makes.
pub struct Egress {
    plan: SendPlan,
    replies: Replies,
    headers_at: usize,
    headers_used_bytes: usize,
    /// A packet that met a full plan and goes on after it was sent.
    pending: Option<Pending>,
    /// What was read last.
    current: Piece,
}

enum Pending {
    Packet(SocketAddrV4, Piece),
    Super(SocketAddrV4, Splitter),
}

/// What one read stands for.
struct Load {
    packets: usize,
    /// Of all packets.
    bytes: usize,
    /// Of the largest one.
    largest_bytes: usize,
}

impl Egress {
    /// An empty half whose headers lie in the arena from `headers_at` on.
    #[must_use]
    pub fn new(limits: SendLimits, headers_at: usize) -> Self {
        Self {
            plan: SendPlan::new(limits),
            replies: Replies::new(),
            headers_at,
            headers_used_bytes: 0,
            pending: None,
            current: Piece::default(),
        }
    }

    /// Where in the arena the packet lies that was taken in last.
    #[must_use]
    pub fn current(&self) -> Piece {
        self.current
    }

    /// Forgets all sends and errors that are due, whatever state a panic left them in.
    pub fn abandon(&mut self) {
        self.pending = None;
        self.replies.clear();
        self.sent();
    }

    /// The sends planned so far.
    #[must_use]
    pub fn plan(&self) -> &SendPlan {
        &self.plan
    }

    /// The plan, to change its limits.
    pub fn plan_mut(&mut self) -> &mut SendPlan {
        &mut self.plan
    }

    /// The ICMP errors due; they go into the TUN device.
    pub fn replies_mut(&mut self) -> &mut Replies {
        &mut self.replies
    }

    /// Takes in what one TUN read brought. On `Full`, send the plan, call [`Self::sent`], then
    /// [`Self::resume`] until it succeeds.
    pub fn process(
        &mut self,
        pass: &Pass<'_>,
        arena: &mut [u8],
        vnet_header: &[u8; VNET_HEADER_BYTES],
        packet: Piece,
    ) -> Result<(), Full> {
        debug_assert!(self.pending.is_none(), "resume first");
        pass.stats.reads.add(1);
        self.current = packet;
        let Some(bytes) = packet.of_mut(arena) else {
            return drop_one(pass, packet.bytes as usize, DropReason::InternalError);
        };
        #[cfg(test)]
        super::tests::trip(bytes);
        let header = match Ipv4Header::parse(bytes) {
            Ok(header) => header,
            Err(fault) => return drop_one(pass, bytes.len(), fault.into()),
        };
        // Whatever follows the total length is padding, and goes no further.
        let packet = Piece { bytes: u32::from(header.total_bytes), ..packet };
        let Some(bytes) = bytes.get_mut(..usize::from(header.total_bytes)) else {
            return drop_one(pass, bytes.len(), DropReason::InternalError);
        };
        let Some(vnet_header) = VnetHeader::parse(vnet_header) else {
            return drop_one(pass, bytes.len(), DropReason::BadOffloadHeader);
        };
        match vnet_header.segmentation {
            None => self.single(pass, bytes, packet, &header, vnet_header.checksum),
            Some(segmentation) => {
                if self.super_packet(pass, bytes, packet, &header, segmentation) {
                    return self.resume(pass, arena);
                }
                Ok(())
            }
        }
    }

    #[inline(always)]
    fn single(
        &mut self,
        pass: &Pass<'_>,
        bytes: &mut [u8],
        packet: Piece,
        header: &Ipv4Header,
        checksum: Option<PartialChecksum>,
    ) -> Result<(), Full> {
        let load = Load { packets: 1, bytes: bytes.len(), largest_bytes: bytes.len() };
        let Some(destination) = self.judge(pass, header, bytes, load) else { return Ok(()) };
        ipv4::decrement_ttl(bytes);
        if let Some(partial) = checksum {
            let (start, offset) = (usize::from(partial.start), usize::from(partial.offset));
            // Inside the IPv4 header it would edit what was just judged.
            let behind_header = start >= usize::from(header.header_bytes);
            if !behind_header || transport::complete(bytes, start, offset).is_err() {
                pass.stats.drop(DropReason::BadOffloadHeader, 1);
                return Ok(());
            }
        }
        self.push(destination, packet)
    }

    /// Judges a super-packet; whether it is to be cut, which [`Self::resume`] does.
    fn super_packet(
        &mut self,
        pass: &Pass<'_>,
        bytes: &mut [u8],
        packet: Piece,
        header: &Ipv4Header,
        segmentation: Segmentation,
    ) -> bool {
        let Ok(mut splitter) = Splitter::new(packet, bytes, header, segmentation) else {
            count_drop(pass, bytes.len(), DropReason::BadOffloadHeader);
            return false;
        };
        let load = Load {
            packets: splitter.segments_left(),
            bytes: splitter.bytes_left(),
            largest_bytes: splitter.segment_bytes_max(),
        };
        let Some(destination) = self.judge(pass, header, bytes, load) else { return false };
        ipv4::decrement_ttl(bytes);
        splitter.ip_header_changed(bytes);
        self.pending = Some(Pending::Super(destination, splitter));
        true
    }

    /// Counts what a read brought and judges it; `None` if it goes nowhere.
    #[inline]
    fn judge(
        &mut self,
        pass: &Pass<'_>,
        header: &Ipv4Header,
        bytes: &[u8],
        load: Load,
    ) -> Option<SocketAddrV4> {
        let packets = load.packets as u64;
        pass.stats.packets_received.add(packets);
        pass.stats.bytes_received.add(load.bytes as u64);
        match decide::egress(pass.local, pass.table, header, bytes, load.largest_bytes) {
            EgressVerdict::Send(peer) => Some(peer),
            EgressVerdict::Answer(kind, reason) => {
                pass.stats.drop(reason, packets);
                let source = pass.local.error_source(header.destination);
                self.replies.answer(pass, kind, source, None, header, bytes);
                None
            }
            EgressVerdict::Drop(reason) => {
                pass.stats.drop(reason, packets);
                None
            }
        }
    }

    #[inline]
    fn push(&mut self, destination: SocketAddrV4, packet: Piece) -> Result<(), Full> {
        let pushed = self.plan.push(destination, Piece::default(), packet);
        if pushed.is_err() {
            self.pending = Some(Pending::Packet(destination, packet));
        }
        pushed
    }

    /// Counts a packet that the device could not hand over.
    pub fn unreadable(&self, pass: &Pass<'_>) {
        pass.stats.reads.add(1);
        pass.stats.packets_received.add(1);
        pass.stats.drop(DropReason::BadOffloadHeader, 1);
    }

    /// Goes on with the packet that met a full plan.
    pub fn resume(&mut self, pass: &Pass<'_>, arena: &mut [u8]) -> Result<(), Full> {
        match self.pending.take() {
            None => Ok(()),
            Some(Pending::Packet(destination, packet)) => self.push(destination, packet),
            Some(Pending::Super(destination, mut splitter)) => {
                let cut = self.cut(pass, arena, destination, &mut splitter);
                if cut.is_err() {
                    self.pending = Some(Pending::Super(destination, splitter));
                }
                cut
            }
        }
    }

    fn cut(
        &mut self,
        pass: &Pass<'_>,
        arena: &mut [u8],
        destination: SocketAddrV4,
        splitter: &mut Splitter,
    ) -> Result<(), Full> {
        let parts = arena.split_at_mut_checked(self.headers_at);
        let parts =
            parts.and_then(|(packets, headers)| Some((splitter.packet().of(packets)?, headers)));
        let Some((bytes, headers)) = parts else {
            pass.stats.drop(DropReason::InternalError, splitter.segments_left() as u64);
            return Ok(());
        };
        let header_bytes = splitter.header_bytes();
        while splitter.segments_left() > 0 {
            let Some(out) = headers.get_mut(self.headers_used_bytes..) else { return Err(Full) };
            if out.len() < header_bytes || !self.plan.has_room() {
                return Err(Full);
            }
            let Some(payload) = splitter.next(bytes, out) else {
                pass.stats.drop(DropReason::InternalError, splitter.segments_left() as u64);
                break;
            };
            let header = Piece::new(self.headers_at + self.headers_used_bytes, header_bytes);
            self.headers_used_bytes += header_bytes;
            self.plan.push(destination, header, payload)?;
        }
        Ok(())
    }

    /// The plan was carried out: its ranges are free.
    pub fn sent(&mut self) {
        self.plan.clear();
        self.headers_used_bytes = 0;
    }
}

fn drop_one(pass: &Pass<'_>, bytes: usize, reason: DropReason) -> Result<(), Full> {
    count_drop(pass, bytes, reason);
    Ok(())
}

fn count_drop(pass: &Pass<'_>, bytes: usize, reason: DropReason) {
    pass.stats.packets_received.add(1);
    pass.stats.bytes_received.add(bytes as u64);
    pass.stats.drop(reason, 1);
}

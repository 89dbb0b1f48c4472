//! Batches of packets, ready to be forwarded again and again, for the benchmarks and for the
//! instruction counts: what a worker does in one turn, without its system calls.

use std::net::Ipv4Addr;
use std::num::NonZeroU16;
use std::rc::Rc;

use weft::forward::{Egress, GroBatch, Ingress};
use weft::offload::{
    CoalesceLimits, Coalescer, PartialChecksum, Segmentation, SegmentationKind, SendPlan,
    VNET_HEADER_BYTES, VnetHeader,
};
use weft::packet::Span;
use weft::packet::ecn::Ecn;

use crate::world::{POD, TCP, UDP, World, as_ipv6, packet, pod_of, with_partial_checksum};

/// What a turn takes at most.
pub(crate) const BATCH_PACKETS: usize = 64;

/// Payload of a small packet and of a full one: 1472 less the headers of TCP with timestamps.
pub(crate) const SMALL_BYTES: usize = 64;
pub(crate) const FULL_BYTES: usize = 1420;

/// Packets of a full super-packet: what 65,535 bytes hold.
pub(crate) const FULL_PACKETS: usize = 45;

/// Where one read or receive begins after the other, as in the ring engine's arena.
const STRIDE_BYTES: usize = (64 << 10) + 4096 + 64;

/// Room behind the reads for the headers that cutting makes.
const HEADERS_BYTES: usize = 64 << 10;

/// What a pass may edit of a packet: the headers.
const HEAD_BYTES: usize = 72;

/// Batches that differ in their destinations, so that the caches know no more of the next one
/// than they would in a worker.
pub(crate) const ROUNDS: usize = 512;

const SEGMENTS_MAX: u16 = 128;

const LIMITS: CoalesceLimits = CoalesceLimits { tcp: true, udp_segments_max: 64 };

/// A batch that can be made as it was and forwarded once more.
pub(crate) trait Batch {
    /// Packets that one pass moves; a super-packet counts as what it stands for.
    fn packets(&self) -> usize;
    /// Makes the arena as the kernel filled it.
    fn refresh(&mut self);
    /// Forwards the batch, and gives the number of system calls' worth of messages planned.
    fn pass(&mut self) -> usize;
}

/// Of which family the packets are.
#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn header_bytes(self) -> u16 {
        match self {
            Self::V4 => 20,
            Self::V6 => 40,
        }
    }

    /// Payload of a full packet: the packets are equally long.
    fn full_bytes(self) -> usize {
        FULL_BYTES + 20 - usize::from(self.header_bytes())
    }

    /// As it comes from a peer.
    fn whole(self, packet: Vec<u8>) -> Vec<u8> {
        match self {
            Self::V4 => packet,
            Self::V6 => as_ipv6(&packet, false),
        }
    }

    /// With its checksum left to the device.
    fn left(self, packet: Vec<u8>) -> Vec<u8> {
        match self {
            Self::V4 => with_partial_checksum(packet),
            Self::V6 => as_ipv6(&packet, true),
        }
    }
}

/// Several workers' turns, one after the other: they share the table, and the caches.
struct Workers(Vec<Box<dyn Batch>>);

impl Workers {
    /// Each sends small packets to random ones of so many peers, and receives such.
    fn among(peer_count: usize, workers: usize) -> Self {
        let world = Rc::new(World::new(peer_count));
        let both = |_| -> [Box<dyn Batch>; 2] {
            let sent = EgressBatch::small(&world, false, Family::V4);
            [Box::new(sent), Box::new(IngressBatch::small_singles(&world, Family::V4))]
        };
        Self((0..workers).flat_map(both).collect())
    }
}

impl Batch for Workers {
    fn packets(&self) -> usize {
        self.0.iter().map(|batch| batch.packets()).sum()
    }

    fn refresh(&mut self) {
        self.0.iter_mut().for_each(|batch| batch.refresh());
    }

    fn pass(&mut self) -> usize {
        self.0.iter_mut().map(|batch| batch.pass()).sum()
    }
}

/// Packets from the TUN device.
pub(crate) struct EgressBatch {
    world: Rc<World>,
    egress: Egress,
    arena: Vec<u8>,
    reads: Vec<([u8; VNET_HEADER_BYTES], Span)>,
    heads: Vec<[u8; HEAD_BYTES]>,
    round: usize,
    packets: usize,
}

impl EgressBatch {
    /// Small packets to random ones of the peers; with GSO or one datagram a send.
    fn small(world: &Rc<World>, gso: bool, family: Family) -> Self {
        let peer_count = world.table.peers().len();
        let mut rng = fastrand::Rng::with_seed(4);
        let packets = (0..ROUNDS * BATCH_PACKETS).map(|index| {
            let to = pod_of(rng.usize(0..peer_count));
            family.left(packet(UDP, (POD, to), index, SMALL_BYTES))
        });
        let checksum = Some(PartialChecksum { start: family.header_bytes(), offset: 6 });
        let vnet_header = VnetHeader { checksum, segmentation: None };
        Self::new(world, gso, BATCH_PACKETS, packets.collect(), vnet_header, 1)
    }

    /// Two full TCP super-packets, as much as a turn reads.
    fn full(family: Family) -> Self {
        let whole = packet(TCP, (POD, pod_of(0)), 1, FULL_PACKETS * family.full_bytes());
        let packets = vec![family.left(whole); 2];
        let vnet_header = VnetHeader {
            checksum: Some(PartialChecksum { start: family.header_bytes(), offset: 16 }),
            segmentation: NonZeroU16::new(family.full_bytes() as u16)
                .map(|payload_bytes| Segmentation { kind: SegmentationKind::Tcp, payload_bytes }),
        };
        Self::new(&Rc::new(World::new(1)), true, 2, packets, vnet_header, FULL_PACKETS)
    }

    fn new(
        world: &Rc<World>,
        gso: bool,
        reads: usize,
        packets: Vec<Vec<u8>>,
        vnet_header: VnetHeader,
        packets_per_read: usize,
    ) -> Self {
        let headers_at = reads * STRIDE_BYTES;
        let mut arena = vec![0; headers_at + HEADERS_BYTES];
        let vnet_header = vnet_header.encode::<Ipv4Addr>(0);
        let at = |index: usize| Span::new(index * STRIDE_BYTES, packets[index].len());
        for (index, packet) in packets[..reads].iter().enumerate() {
            arena[at(index).range()].copy_from_slice(packet);
        }
        let segments_max = if gso { SEGMENTS_MAX } else { 1 };
        let head = |packet: &Vec<u8>| *packet.first_chunk().expect("longer than its headers");
        Self {
            world: Rc::clone(world),
            egress: Egress::filling(SendPlan::new(segments_max), headers_at..usize::MAX),
            arena,
            reads: (0..reads).map(|index| (vnet_header, at(index))).collect(),
            heads: packets.iter().map(head).collect(),
            round: 0,
            packets: reads * packets_per_read,
        }
    }

    fn send(&mut self) -> usize {
        let sent = self.egress.plan.messages().len();
        self.egress.sent();
        sent
    }
}

impl Batch for EgressBatch {
    fn packets(&self) -> usize {
        self.packets
    }

    fn refresh(&mut self) {
        let reads = self.reads.len();
        self.round = (self.round + 1) % (self.heads.len() / reads);
        for (read, head) in self.reads.iter().zip(&self.heads[self.round * reads..]) {
            self.arena[read.1.offset as usize..][..HEAD_BYTES].copy_from_slice(head);
        }
    }

    fn pass(&mut self) -> usize {
        let mut sent = 0;
        for index in 0..self.reads.len() {
            let (vnet_header, packet) = self.reads[index];
            let context = self.world.context();
            let mut taken = self.egress.process(&context, &mut self.arena, &vnet_header, packet);
            while taken.is_err() {
                sent += self.send();
                taken = self.egress.resume(&self.world.context(), &mut self.arena);
            }
        }
        sent + self.send()
    }
}

impl Drop for EgressBatch {
    fn drop(&mut self) {
        self.world.assert_no_drops();
    }
}

/// GRO batches from the network.
pub(crate) struct IngressBatch {
    world: Rc<World>,
    ingress: Ingress,
    arena: Vec<u8>,
    batches: Vec<GroBatch>,
    heads: Vec<(usize, [u8; HEAD_BYTES])>,
    rounds: usize,
    round: usize,
}

impl IngressBatch {
    /// One GRO batch of small packets.
    fn small_batch(world: &Rc<World>, family: Family) -> Self {
        Self::new(world, (family, UDP), (BATCH_PACKETS, SMALL_BYTES), BATCH_PACKETS, 1)
    }

    /// As many small packets, each in a datagram of its own, from random ones of the peers.
    fn small_singles(world: &Rc<World>, family: Family) -> Self {
        Self::new(world, (family, UDP), (BATCH_PACKETS, SMALL_BYTES), 1, ROUNDS)
    }

    /// Two GRO batches of full TCP packets, as many as fit.
    fn full(world: &Rc<World>, family: Family) -> Self {
        let each = FULL_PACKETS - 1;
        Self::new(world, (family, TCP), (2 * each, family.full_bytes()), each, 1)
    }

    /// So many packets, so many of them in each datagram, in so many `rounds` that differ in who
    /// sends them.
    fn new(
        world: &Rc<World>,
        (family, protocol): (Family, u8),
        (count, payload_bytes): (usize, usize),
        per_batch: usize,
        rounds: usize,
    ) -> Self {
        let peers = world.table.peers();
        let mut rng = fastrand::Rng::with_seed(5);
        let mut arena = vec![0; count.div_ceil(per_batch) * STRIDE_BYTES];
        let (mut batches, mut heads) = (Vec::new(), Vec::new());
        for first in (0..rounds).flat_map(|_| (0..count).step_by(per_batch)) {
            let peer = rng.usize(0..peers.len());
            let indices = first..count.min(first + per_batch);
            let packets: Vec<_> = indices
                .map(|index| packet(protocol, (pod_of(peer), POD), index, payload_bytes))
                .map(|packet| family.whole(packet))
                .collect();
            let at = first / per_batch * STRIDE_BYTES;
            let span = Span::new(at, packets.iter().map(Vec::len).sum());
            arena[span.range()].copy_from_slice(&packets.concat());
            let segment_bytes = if packets.len() > 1 { packets[0].len() as u16 } else { 0 };
            let sender = peers[peer].address;
            batches.push(GroBatch {
                span,
                segment_bytes,
                sender,
                source: sender,
                ecn: Ecn::NotEct,
            });
            heads.extend(packets.iter().enumerate().map(|(place, packet)| {
                let head = *packet.first_chunk().expect("longer than its headers");
                (at + place * packet.len(), head)
            }));
        }
        let (world, ingress) = (Rc::clone(world), Ingress::new(LIMITS));
        Self { world, ingress, arena, batches, heads, rounds, round: 0 }
    }
}

impl Batch for IngressBatch {
    fn packets(&self) -> usize {
        self.heads.len() / self.rounds
    }

    fn refresh(&mut self) {
        self.round = (self.round + 1) % self.rounds;
        let packets = self.packets();
        for (at, head) in &self.heads[self.round * packets..][..packets] {
            self.arena[*at..][..HEAD_BYTES].copy_from_slice(head);
        }
    }

    fn pass(&mut self) -> usize {
        let mut written = 0;
        let batches = self.batches.len() / self.rounds;
        for &batch in &self.batches[self.round * batches..][..batches] {
            let context = self.world.context();
            let mut taken = self.ingress.process(&context, &mut self.arena, batch);
            while taken.is_err() {
                let coalescer = &mut self.ingress.coalescer;
                written += write(coalescer, &mut self.arena);
                taken = self.ingress.resume(&self.world.context(), &mut self.arena);
            }
        }
        written + write(&mut self.ingress.coalescer, &mut self.arena)
    }
}

/// What the coalescer holds leaves for the TUN device.
fn write(coalescer: &mut Coalescer, arena: &mut [u8]) -> usize {
    coalescer.finish(arena);
    let written = coalescer.items().len();
    coalescer.clear();
    written
}

impl Drop for IngressBatch {
    fn drop(&mut self) {
        self.world.assert_no_drops();
    }
}

/// A batch's name, and how to make it.
type Case = (&'static str, fn() -> Box<dyn Batch>);

fn among(peer_count: usize) -> Rc<World> {
    Rc::new(World::new(peer_count))
}

/// Every batch.
pub(crate) const CASES: &[Case] = &[
    ("egress 64 small", || Box::new(EgressBatch::small(&among(1), true, Family::V4))),
    ("egress 64 small, no GSO", || Box::new(EgressBatch::small(&among(1), false, Family::V4))),
    ("egress 64 small, 10000 peers", || {
        Box::new(EgressBatch::small(&among(10_000), true, Family::V4))
    }),
    ("egress 64 small, 10 peers, no GSO", || {
        Box::new(EgressBatch::small(&among(10), false, Family::V4))
    }),
    ("egress 64 small, 1000 peers, no GSO", || {
        Box::new(EgressBatch::small(&among(1000), false, Family::V4))
    }),
    ("egress 64 small, 10000 peers, no GSO", || {
        Box::new(EgressBatch::small(&among(10_000), false, Family::V4))
    }),
    ("egress 2 super-packets", || Box::new(EgressBatch::full(Family::V4))),
    ("ingress GRO batch of 64 small", || {
        Box::new(IngressBatch::small_batch(&among(10_000), Family::V4))
    }),
    ("ingress 64 small singles, 1 peer", || {
        Box::new(IngressBatch::small_singles(&among(1), Family::V4))
    }),
    ("ingress 64 small singles, 10 peers", || {
        Box::new(IngressBatch::small_singles(&among(10), Family::V4))
    }),
    ("ingress 64 small singles, 1000 peers", || {
        Box::new(IngressBatch::small_singles(&among(1000), Family::V4))
    }),
    ("ingress 64 small singles, 10000 peers", || {
        Box::new(IngressBatch::small_singles(&among(10_000), Family::V4))
    }),
    ("ingress 2 full GRO batches", || Box::new(IngressBatch::full(&among(10_000), Family::V4))),
    ("IPv6 egress 64 small", || Box::new(EgressBatch::small(&among(1), true, Family::V6))),
    ("IPv6 egress 64 small, no GSO", || Box::new(EgressBatch::small(&among(1), false, Family::V6))),
    ("IPv6 egress 2 super-packets", || Box::new(EgressBatch::full(Family::V6))),
    ("IPv6 ingress GRO batch of 64 small", || {
        Box::new(IngressBatch::small_batch(&among(10_000), Family::V6))
    }),
    ("IPv6 ingress 64 small singles, 1 peer", || {
        Box::new(IngressBatch::small_singles(&among(1), Family::V6))
    }),
    ("IPv6 ingress 2 full GRO batches", || {
        Box::new(IngressBatch::full(&among(10_000), Family::V6))
    }),
    ("8 workers both ways, 10 peers", || Box::new(Workers::among(10, 8))),
    ("8 workers both ways, 1000 peers", || Box::new(Workers::among(1000, 8))),
    ("8 workers both ways, 10000 peers", || Box::new(Workers::among(10_000, 8))),
];

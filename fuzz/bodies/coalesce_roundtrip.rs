//! One input of the `coalesce_roundtrip` target: a stream of packets, merged and cut again.
//!
//! The first byte says what may be merged; records of packets follow, see `packets`. Cutting what
//! was merged must give back every flow's packets in order, and so must unmerging.

use std::cell::Cell;
use std::net::Ipv4Addr;

use weft::offload::{CoalesceLimits, Coalescer, VNET_HEADER_BYTES};
use weft::packet::Span;
use weft::packet::ipv4::Ipv4Header;

use crate::packets::Packets;
use crate::slow_twin;

/// Packets of one input; more than a plan holds writes.
const PACKETS_MAX: usize = 140;

/// Bytes of all packets of one input; more than one super-packet holds.
const ARENA_BYTES_MAX: usize = 72 << 10;

const ADDRESSES: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 5, 2, 2), Ipv4Addr::new(10, 5, 1, 2));

/// What a plan is made of, kept from input to input: allocating it costs more than most inputs.
struct Bench {
    coalescer: Coalescer,
    arena: Vec<u8>,
    /// The arena before any header in it was edited.
    original: Vec<u8>,
    pending: Vec<Pending>,
}

/// A packet that was pushed.
struct Pending {
    packet: Span,
    flow: FlowKey,
    is_out: bool,
}

/// Addresses, ports or what stands in their place, protocol.
type FlowKey = (u64, u32, u8);

thread_local! {
    static BENCH: Cell<Option<Box<Bench>>> = const { Cell::new(None) };
}

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [limits, records @ ..] = data else { return };
    let limits =
        CoalesceLimits { tcp: limits & 1 != 0, udp_segments_max: u16::from(limits >> 1).max(1) };
    let mut bench = BENCH.take().unwrap_or_else(|| {
        let coalescer = Coalescer::new(limits);
        let (arena, original, pending) = (Vec::new(), Vec::new(), Vec::new());
        Box::new(Bench { coalescer, arena, original, pending })
    });
    bench.merge(Packets::new(records), limits);
    BENCH.set(Some(bench));
}

impl Bench {
    fn merge(&mut self, mut packets: Packets<'_>, limits: CoalesceLimits) {
        self.coalescer.clear();
        self.coalescer.set_limits(limits);
        self.arena.clear();
        self.original.clear();
        self.pending.clear();
        let mut count = 0;
        while count < PACKETS_MAX && self.arena.len() < ARENA_BYTES_MAX {
            let start = self.arena.len();
            if packets.next(&mut self.arena, ADDRESSES).is_none() {
                break;
            }
            count += 1;
            // What is none would not get this far; nor would padding.
            let Ok(header) = Ipv4Header::parse(&self.arena[start..]) else {
                self.arena.truncate(start);
                continue;
            };
            self.arena.truncate(start + usize::from(header.total_bytes));
            let packet = Span::new(start, usize::from(header.total_bytes));
            if self.coalescer.push(&self.arena, packet, &header).is_err() {
                self.flush();
                self.coalescer.push(&self.arena, packet, &header).expect("the plan is empty");
            }
            let flow = flow_of(&self.arena[packet.range()]);
            self.pending.push(Pending { packet, flow, is_out: false });
        }
        self.flush();
    }

    /// Writes the plan, as the kernel would take it, and checks that it can be taken back.
    fn flush(&mut self) {
        let Self { coalescer, arena, original, pending } = self;
        original.extend_from_slice(&arena[original.len()..]);
        coalescer.finish(arena);
        // What lies before is out; packets mostly come out in the order in which they went in.
        let mut first = 0;
        for (index, item) in coalescer.items().iter().enumerate() {
            let count = usize::from(item.packets);
            let cut = if count > 1 {
                let parts = coalescer.spans(index).iter().flat_map(|span| &arena[span.range()]);
                let written = parts.copied().collect();
                slow_twin::as_the_kernel_cuts(&item.vnet_header, written, count)
            } else {
                assert_eq!(item.vnet_header, [0; VNET_HEADER_BYTES], "a single packet is whole");
                vec![arena[coalescer.spans(index)[0].range()].to_vec()]
            };
            let mut segments = cut.iter();
            for span in coalescer.unmerge(arena, index) {
                let packet = &arena[span.range()];
                let segment = segments.next().expect("as many packets as segments");
                assert!(same(segment, packet, true), "cut {segment:02x?} is not {packet:02x?}");
                let flow = flow_of(packet);
                let mut left = pending[first..].iter_mut();
                let next = left.find(|next| !next.is_out && next.flow == flow);
                let next = next.expect("unmerging made up a packet");
                let pushed = &original[next.packet.range()];
                assert!(same(pushed, packet, false), "pushed {pushed:02x?}, back {packet:02x?}");
                next.is_out = true;
                first += pending[first..].iter().take_while(|packet| packet.is_out).count();
            }
            assert!(segments.next().is_none(), "unmerging lost a packet");
        }
        assert!(pending.iter().all(|packet| packet.is_out), "a packet was lost");
        pending.clear();
        coalescer.clear();
    }
}

fn flow_of(packet: &[u8]) -> FlowKey {
    let addresses = packet[12..20].try_into().expect("eight bytes");
    let transport = packet.get(usize::from(packet[0] & 15) * 4..).unwrap_or_default();
    let ports = transport.first_chunk().copied().unwrap_or_default();
    (u64::from_be_bytes(addresses), u32::from_be_bytes(ports), packet[9])
}

/// Whether two packets are the same but for what may differ: both zeroes of one's complement
/// arithmetic are right in a header's and in TCP's checksum, and for a `cut` one the
/// identification of a packet that must not be fragmented means nothing (RFC 6864).
fn same(one: &[u8], other: &[u8], cut: bool) -> bool {
    if one == other {
        return true;
    }
    let tcp_at = usize::from(one[0] & 15) * 4 + 16;
    let no_id = cut && one[6] & 0x40 != 0;
    let is_zero =
        |packet: &[u8], at: usize| matches!(packet.get(at..at + 2), Some([0, 0] | [0xff, 0xff]));
    let excused = |at: usize| {
        let field = at & !1;
        let is_checksum = field == 10 || one[9] == 6 && field == tcp_at;
        no_id && (field == 4 || field == 10)
            || is_checksum && is_zero(one, field) && is_zero(other, field)
    };
    let mut differing = (0..one.len()).filter(|at| other.get(*at) != Some(&one[*at]));
    one.len() == other.len() && differing.all(excused)
}

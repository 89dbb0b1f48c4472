//! The packets: a pool of GSO batches, a part of which is made anew before each use.
//!
//! Most of a packet is right, so that it gets past the parse and into a merge; flows continue
//! from packet to packet with options that come and go. One in four has bytes changed anywhere in
//! its headers. The packets of a GSO batch have one size, as UDP_SEGMENT wants; shorter ones are
//! padded.

use std::net::Ipv4Addr;

use fastrand::Rng;

use crate::slow_twin::mend;

/// GSO batches of one pool: with their packets about a second-level cache.
const BATCHES: usize = 64;

/// UDP_MAX_SEGMENTS of kernels before 6.9.
const SEGMENTS_MAX: usize = 64;

/// A UDP datagram's payload in IPv4.
const BATCH_BYTES_MAX: usize = 65_507;

/// One GSO batch in this many gets another size; of the others, one packet in [`RENEWED_EACH`] is
/// new.
const REMADE_EACH: u32 = 16;
const RENEWED_EACH: usize = 8;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Protocols beside TCP and UDP: ICMP, IPIP, GRE, ESP, SCTP, and none.
const OTHERS: [u8; 6] = [1, 4, 47, 50, 132, 255];

/// IPv4 options: no operation, loose and strict source route, record route, timestamp, router
/// alert, junk.
const IP_OPTIONS: [[u8; 8]; 7] = [
    [1, 1, 1, 1, 1, 1, 1, 0],
    [0x83, 7, 4, 10, 5, 1, 2, 0],
    [0x89, 7, 4, 10, 5, 1, 2, 0],
    [7, 7, 4, 0, 0, 0, 0, 0],
    [0x44, 8, 5, 0, 0, 0, 0, 0],
    [0x94, 4, 0, 0, 1, 1, 1, 0],
    [0x77, 0, 0xff, 1, 2, 3, 4, 5],
];

/// TCP flags: mostly plain data.
const TCP_FLAGS: [u8; 8] = [0x10, 0x10, 0x10, 0x10, 0x18, 0x11, 0x02, 0xf4];

/// Addresses that no packet may have on either end.
const NOBODY: [Ipv4Addr; 8] = [
    Ipv4Addr::new(127, 0, 0, 1),
    Ipv4Addr::new(0, 0, 0, 0),
    Ipv4Addr::new(224, 0, 0, 9),
    Ipv4Addr::new(255, 255, 255, 255),
    Ipv4Addr::new(240, 1, 2, 3),
    Ipv4Addr::new(169, 254, 1, 1),
    Ipv4Addr::new(172, 20, 0, 1),
    Ipv4Addr::new(10, 5, 1, 0),
];

/// Where packets come from and go to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ends {
    /// The first address of 126 that the sources are mostly of.
    pub(crate) from: Ipv4Addr,
    /// The same of the destinations.
    pub(crate) to: Ipv4Addr,
}

/// Packets of one size in a row, and a last one that may be shorter.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The packets.
    pub(crate) bytes: Vec<u8>,
    /// Size of each but the last.
    pub(crate) segment_bytes: usize,
}

/// What a flow sends next.
#[derive(Debug, Clone, Copy, Default)]
struct Flow {
    number: u8,
    sequence: u32,
    id: u16,
    option_words: u8,
}

/// A pool of GSO batches between the same ends.
pub(crate) struct Pool {
    ends: Ends,
    random: Rng,
    batches: Vec<Batch>,
    next: usize,
}

impl Pool {
    pub(crate) fn new(ends: Ends, seed: u64) -> Self {
        let random = Rng::with_seed(seed);
        let batches = (0..BATCHES).map(|_| Batch::default()).collect();
        Self { ends, random, batches, next: 0 }
    }

    /// The next GSO batch, with the source of chance for what is done with it.
    pub(crate) fn next(&mut self) -> (&Batch, &mut Rng) {
        let Self { ends, random, batches, next } = self;
        let batch = &mut batches[*next];
        *next = (*next + 1) % BATCHES;
        if batch.bytes.is_empty() || random.u32(..REMADE_EACH) == 0 {
            batch.resize(random);
            fill(&mut batch.bytes, batch.segment_bytes, *ends, random);
        } else {
            let packets = batch.bytes.len() / batch.segment_bytes;
            let count = packets / RENEWED_EACH;
            let first = random.usize(..=packets - count) * batch.segment_bytes;
            let part = &mut batch.bytes[first..][..count * batch.segment_bytes];
            fill(part, batch.segment_bytes, *ends, random);
        }
        (batch, random)
    }
}

impl Batch {
    /// Another size and number of packets; the last packet may be torn.
    fn resize(&mut self, random: &mut Rng) {
        self.segment_bytes = match random.u8(..20) {
            0 => random.usize(1..40),
            1..=9 => random.usize(40..128),
            10..=15 => random.usize(128..512),
            _ => random.usize(512..=1472),
        };
        let most = SEGMENTS_MAX.min(BATCH_BYTES_MAX / self.segment_bytes);
        let packets = if random.u8(..4) == 0 { random.usize(1..=most) } else { most };
        let torn = if random.bool() { 0 } else { random.usize(..self.segment_bytes) };
        self.bytes.resize(packets * self.segment_bytes - torn, 0);
    }
}

/// Makes packets of one flow, one to a slot.
fn fill(bytes: &mut [u8], slot_bytes: usize, ends: Ends, random: &mut Rng) {
    let mut flow = Flow {
        number: random.u8(..4),
        sequence: random.u32(..),
        id: random.u16(..),
        option_words: if random.bool() { 0 } else { random.u8(..11) },
    };
    let ends = pick_ends(ends, random);
    for slot in bytes.chunks_mut(slot_bytes) {
        if random.u8(..32) == 0 {
            let start = random.usize(..slot.len());
            random.fill(&mut slot[start..]);
            continue;
        }
        let packet = write(slot, &mut flow, ends, random);
        if random.u8(..4) == 0 {
            damage(packet, random);
        }
        let how = random.u8(..);
        mend(packet, how & 0x07 != 0, how & 0x38 != 0);
    }
}

/// Two addresses: mostly pods of the two ends, sometimes what may not be.
fn pick_ends(ends: Ends, random: &mut Rng) -> (Ipv4Addr, Ipv4Addr) {
    let near = |first: Ipv4Addr, random: &mut Rng| {
        Ipv4Addr::from_bits(first.to_bits() + random.u32(..126))
    };
    let mut pick = |usual: Ipv4Addr, other: Ipv4Addr| match random.u8(..24) {
        0 => NOBODY[random.usize(..NOBODY.len())],
        1 => Ipv4Addr::from_bits(random.u32(..)),
        2 => near(other, random),
        3 => Ipv4Addr::new(10, 5, random.u8(..), random.u8(..)),
        _ => near(usual, random),
    };
    (pick(ends.from, ends.to), pick(ends.to, ends.from))
}

/// Writes the flow's next packet to the front of `slot`; returns it.
fn write<'a>(
    slot: &'a mut [u8],
    flow: &mut Flow,
    (source, destination): (Ipv4Addr, Ipv4Addr),
    random: &mut Rng,
) -> &'a mut [u8] {
    let mut headers = [1; 128];
    let chance = random.u32(..);
    let options = if chance & 0x3f == 0 { 8 * (1 + (chance >> 8) as usize % 5) } else { 0 };
    let ip_bytes = 20 + options;
    let option_words =
        if chance & 0x1c0 == 0 { (chance >> 12) as u8 % 11 } else { flow.option_words };
    let protocol = match flow.number {
        _ if chance & 0x7e00 == 0 => OTHERS[random.usize(..OTHERS.len())],
        0 | 1 => TCP,
        _ => UDP,
    };
    let transport_bytes = match protocol {
        TCP => 20 + usize::from(option_words) * 4,
        _ => 8,
    };
    let header_bytes = (ip_bytes + transport_bytes).min(slot.len());
    let packet_bytes =
        if chance & 0x78_0000 == 0 { random.usize(header_bytes..=slot.len()) } else { slot.len() };
    let fragment: u16 = match chance >> 23 & 0x3f {
        0 => 0x2000,
        1 => random.u16(..0x4000),
        2..=9 => 0,
        _ => 0x4000,
    };
    headers[0] = 0x40 | (ip_bytes / 4) as u8;
    headers[1] = if chance >> 29 == 0 { random.u8(..) } else { 0 };
    headers[2..4].copy_from_slice(&(packet_bytes as u16).to_be_bytes());
    headers[4..6].copy_from_slice(&flow.id.to_be_bytes());
    headers[6..8].copy_from_slice(&fragment.to_be_bytes());
    headers[8] = if chance >> 28 == 0 { random.u8(..4) } else { 62 };
    headers[9] = protocol;
    headers[12..16].copy_from_slice(&source.octets());
    headers[16..20].copy_from_slice(&destination.octets());
    for option in headers[20..ip_bytes].chunks_exact_mut(8) {
        option.copy_from_slice(&IP_OPTIONS[random.usize(..IP_OPTIONS.len())]);
    }
    let transport = &mut headers[ip_bytes..];
    transport[..4].copy_from_slice(&[0x30, flow.number, 0x14, 0x51]);
    if protocol == TCP {
        transport[4..8].copy_from_slice(&flow.sequence.to_be_bytes());
        transport[8..12].fill(9);
        transport[12] = (5 + option_words) << 4;
        transport[13] = TCP_FLAGS[random.usize(..TCP_FLAGS.len())];
        transport[14..20].fill(0);
    } else {
        transport[4..6]
            .copy_from_slice(&((packet_bytes - ip_bytes.min(packet_bytes)) as u16).to_be_bytes());
        transport[6..8].fill(0);
    }
    slot[..header_bytes].copy_from_slice(&headers[..header_bytes]);
    flow.id = flow.id.wrapping_add(1);
    flow.sequence = flow.sequence.wrapping_add((packet_bytes - header_bytes) as u32);
    &mut slot[..packet_bytes]
}

/// Changes up to three bytes of the headers.
fn damage(packet: &mut [u8], random: &mut Rng) {
    for _ in 0..random.u8(1..4) {
        let at = random.usize(..packet.len().min(80));
        packet[at] = match random.u8(..4) {
            0 => packet[at].wrapping_add(1),
            1 => packet[at] ^ 1 << random.u8(..8),
            2 => 0xff,
            _ => random.u8(..),
        };
    }
}

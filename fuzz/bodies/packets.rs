//! Packets out of a fuzz input's bytes, shared by the bodies that want several of them.
//!
//! A record of four bytes is the next packet of one of four flows: which flow and what flags, how
//! much payload, how many words of options, and what is wrong with it. So neighbours of a flow
//! differ in one thing at a time, and most are right: checksums and lengths are mended after an
//! edit unless the record says otherwise. A raw record carries a packet's own bytes, such as one
//! from a capture.

use std::net::Ipv4Addr;

use crate::slow_twin;

const RECORD_BYTES: usize = 4;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// ACK, with PSH, with FIN, SYN, ACK with CWR and ECE, with URG.
const FLAGS: [u8; 8] = [0x10, 0x10, 0x10, 0x18, 0x11, 0x02, 0xd0, 0x30];

/// Payload sizes beyond what a byte says: nothing, full segments of 1472 bytes, and odd ones.
const LONG_BYTES: [u16; 8] = [0, 1432, 1420, 1444, 999, 512, 257, 1];

/// What payloads are cut out of, each from another place on.
static PAYLOAD: [u8; 2048] = {
    let mut bytes = [0; 2048];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = (at % 251) as u8;
        at += 1;
    }
    bytes
};

/// Bytes that a torn packet lacks at its end.
const TORN_BYTES: [usize; 4] = [0, 1, 9, 30];

/// Words of IPv4 options by the high nibble of a record's third byte; mostly none.
const IP_OPTION_WORDS: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 5, 10];

/// What may be wrong with a packet: bits of a record's last byte.
const KEEP_IP_CHECKSUM: u8 = 0x01;
const KEEP_TRANSPORT_CHECKSUM: u8 = 0x02;
const KEEP_TOTAL_LENGTH: u8 = 0x04;
const REPEAT: u8 = 0x08;
const GAP: u8 = 0x40;
const EDIT: u8 = 0x80;

/// Repeats of one record: two records fill a plan.
const REPEATS_MAX: u8 = 72;

/// Within reach of an edit: all headers with options, and some payload.
const EDIT_REACH_BYTES: usize = 128;

/// What one flow sends next.
#[derive(Clone, Copy)]
struct Flow {
    sequence: u32,
    id: u16,
}

/// The packets of one input.
pub(crate) struct Packets<'a> {
    data: &'a [u8],
    flows: [Flow; 4],
    /// The last record, and how often it still comes again.
    repeated: ([u8; RECORD_BYTES], u8),
}

impl<'a> Packets<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        // Close to where both wrap around.
        let flow = Flow { sequence: u32::MAX - 2000, id: u16::MAX - 3 };
        Self { data, flows: [flow; 4], repeated: ([0; RECORD_BYTES], 0) }
    }

    /// A byte that is no packet's.
    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.data.split_first()?;
        self.data = rest;
        Some(*byte)
    }

    /// Appends the next packet, from the first address to the second, to `out`; returns its
    /// length, `None` once the input is used up.
    pub(crate) fn next(
        &mut self,
        out: &mut Vec<u8>,
        (source, destination): (Ipv4Addr, Ipv4Addr),
    ) -> Option<usize> {
        let start = out.len();
        let record = match &mut self.repeated {
            (record, times @ 1..) => {
                *times -= 1;
                *record
            }
            (_, 0) => self.record()?,
        };
        let how = record[3];
        if record[0] >= 0xc0 {
            let wanted = usize::from(u16::from_be_bytes([record[1], record[2]]));
            let (packet, rest) = self.data.split_at(wanted.min(self.data.len()));
            self.data = rest;
            out.extend_from_slice(packet);
        } else {
            self.grow(record, out, source, destination);
        }
        if how & EDIT != 0
            && let Some((&[at, value], rest)) = self.data.split_first_chunk()
        {
            self.data = rest;
            let reach = (out.len() - start).clamp(1, EDIT_REACH_BYTES);
            if let Some(byte) = out.get_mut(start + usize::from(at) % reach) {
                *byte = value;
            }
        }
        let length = out.len() - start;
        out.truncate(start + length.saturating_sub(TORN_BYTES[usize::from(how >> 4 & 3)]));
        mend(&mut out[start..], how);
        Some(out.len() - start)
    }

    fn record(&mut self) -> Option<[u8; RECORD_BYTES]> {
        let (&record, rest) = self.data.split_first_chunk()?;
        self.data = rest;
        if record[3] & REPEAT != 0 {
            let times = self.byte().unwrap_or(0) % REPEATS_MAX;
            // The others are as right as the flow's usual packets.
            self.repeated = ([record[0] & 0xbf, record[1], record[2], 0], times);
        }
        Some(record)
    }

    /// The record's packet; mostly the next one of its flow.
    fn grow(
        &mut self,
        [shape, size, header, how]: [u8; RECORD_BYTES],
        out: &mut Vec<u8>,
        source: Ipv4Addr,
        destination: Ipv4Addr,
    ) {
        let number = shape & 3;
        let flow = &mut self.flows[usize::from(number)];
        if how & GAP != 0 {
            flow.sequence = flow.sequence.wrapping_add(1);
            flow.id = flow.id.wrapping_add(1);
        }
        let protocol = if number == 3 { UDP } else { TCP };
        let ip_words = 5 + IP_OPTION_WORDS[usize::from(header >> 4)];
        let payload_bytes = match size.checked_sub(192) {
            Some(long) => LONG_BYTES[usize::from(long % 8)],
            None => u16::from(size),
        };
        let fragment: u16 = match (shape >> 6, shape & 4) {
            (2, 0) => 0x2000,
            (2, _) => 0x0001,
            (_, 0) => 0x4000,
            (_, _) => 0,
        };
        // Whatever isn't set below is an option that does nothing.
        let mut headers = [1; 128];
        headers[0] = 0x40 | ip_words;
        headers[1..4].fill(0);
        headers[4..6].copy_from_slice(&flow.id.to_be_bytes());
        headers[6..8].copy_from_slice(&fragment.to_be_bytes());
        headers[8..12].copy_from_slice(&[62, protocol, 0, 0]);
        headers[12..16].copy_from_slice(&source.octets());
        headers[16..20].copy_from_slice(&destination.octets());
        let ip_bytes = usize::from(ip_words) * 4;
        let transport = &mut headers[ip_bytes..];
        // Two flows share their addresses, two their ports.
        transport[..4].copy_from_slice(&[0x30, number, 0x14, 0x51 + number / 2]);
        let transport_bytes = if protocol == UDP {
            transport[4..6].copy_from_slice(&(8 + payload_bytes).to_be_bytes());
            transport[6..8].fill(0);
            8
        } else {
            let tcp_words = 5 + (header & 15) % 11;
            let flags = FLAGS[usize::from(shape >> 3 & 7)];
            transport[4..8].copy_from_slice(&flow.sequence.to_be_bytes());
            transport[8..12].copy_from_slice(&[0, 0, 0, 9]);
            transport[12..20].copy_from_slice(&[tcp_words << 4, flags, 2, 0, 0, 0, 0, 0]);
            usize::from(tcp_words) * 4
        };
        out.extend_from_slice(&headers[..ip_bytes + transport_bytes]);
        let first = usize::from(flow.sequence as u8);
        out.extend_from_slice(&PAYLOAD[first..][..usize::from(payload_bytes)]);
        flow.id = flow.id.wrapping_add(1);
        flow.sequence = flow.sequence.wrapping_add(u32::from(payload_bytes));
    }
}

/// Makes lengths and checksums right, those that `how` doesn't keep as they are.
fn mend(packet: &mut [u8], how: u8) {
    if packet.len() >= 20 && how & KEEP_TOTAL_LENGTH == 0 {
        let total_bytes = packet.len().min(0xffff) as u16;
        packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    }
    slow_twin::mend(packet, how & KEEP_IP_CHECKSUM == 0, how & KEEP_TRANSPORT_CHECKSUM == 0);
}

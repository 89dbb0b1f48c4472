//! Packets with comments as a pcapng file (draft-ietf-opsawg-pcapng), as tshark and Wireshark open
//! it.

use crate::status::{Sample, Way};

const SECTION: u32 = 0x0A0D_0D0A;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;

/// `LINKTYPE_RAW`: packets begin with their IP header.
const RAW: u16 = 101;

const OPTION_COMMENT: u16 = 1;
const OPTION_FLAGS: u16 = 2;
const OPTION_USER_APPLICATION: u16 = 4;
const OPTION_TIME_RESOLUTION: u16 = 9;

/// Values of `epb_flags`.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// Times count nanoseconds: 10^-9 s.
const NANOSECONDS: u8 = 9;

/// Behind the options of a block.
const OPTIONS_END: (u16, &[u8]) = (0, &[]);

/// What a file begins with; `captured_bytes_max` is what packets are cut to.
pub(super) fn beginning(captured_bytes_max: u32) -> Vec<u8> {
    let mut section = Vec::new();
    section.extend(0x1A2B_3C4D_u32.to_ne_bytes());
    section.extend([1_u16, 0].map(u16::to_ne_bytes).concat());
    // Of unknown length.
    section.extend(u64::MAX.to_ne_bytes());
    let mut interface = [RAW, 0].map(u16::to_ne_bytes).concat();
    interface.extend(captured_bytes_max.to_ne_bytes());
    let section = block(SECTION, section, &[(OPTION_USER_APPLICATION, b"weft drops")]);
    [section, block(INTERFACE, interface, &[(OPTION_TIME_RESOLUTION, &[NANOSECONDS])])].concat()
}

/// What a packet adds to it, of which there are these `bytes`.
pub(super) fn packet(sample: &Sample, bytes: &[u8], comment: &str) -> Vec<u8> {
    let (at_ns, captured_bytes) = (sample.at_unix_nanoseconds, bytes.len() as u32);
    let numbers = [
        0,
        (at_ns >> 32) as u32,
        at_ns as u32,
        captured_bytes,
        sample.length_bytes.max(captured_bytes),
    ];
    let mut body = numbers.map(u32::to_ne_bytes).concat();
    padded(&mut body, bytes);
    let flags = match sample.direction {
        Way::Ingress => INBOUND,
        Way::Egress => OUTBOUND,
    };
    let flags = flags.to_ne_bytes();
    block(PACKET, body, &[(OPTION_COMMENT, comment.as_bytes()), (OPTION_FLAGS, &flags)])
}

/// A block of this kind: its fields, and its options behind them.
fn block(kind: u32, mut body: Vec<u8>, options: &[(u16, &[u8])]) -> Vec<u8> {
    for (code, value) in options.iter().chain(&[OPTIONS_END]) {
        // Comments are short.
        let length = value.len().min(usize::from(u16::MAX)) as u16;
        body.extend([*code, length].map(u16::to_ne_bytes).concat());
        padded(&mut body, &value[..length.into()]);
    }
    // Kind and length in front, the length again behind.
    let length = (3 * size_of::<u32>() + body.len()) as u32;
    [&kind.to_ne_bytes()[..], &length.to_ne_bytes(), &body, &length.to_ne_bytes()].concat()
}

/// Fields begin at multiples of four bytes.
fn padded(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend(bytes);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn literal_bytes() {
        let sample = Sample {
            at_unix_nanoseconds: 1_000_000_002,
            direction: Way::Egress,
            worker: 0,
            reason: "no-route".to_owned(),
            packets: 1,
            peer: None,
            length_bytes: 84,
            bytes: String::new(),
        };
        let packet = packet(&sample, &[0x45, 1, 2, 3, 4], "no-route");
        // 1 s and 2 ns are 0x3B9ACA02 ns.
        let expected = "06000000 40000000 00000000 00000000 02ca9a3b 05000000 54000000 \
                        45010203 04000000 01000800 6e6f2d72 6f757465 02000400 02000000 \
                        00000000 40000000";
        let hex: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected.replace(' ', ""));
        let beginning = beginning(256);
        let hex: String = beginning.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = "0a0d0d0a 30000000 4d3c2b1a 01000000 ffffffff ffffffff 04000a00 \
                        77656674 2064726f 70730000 00000000 30000000 \
                        01000000 20000000 65000000 00010000 09000100 09000000 00000000 20000000";
        assert_eq!(hex, expected.replace(' ', ""));
    }
}

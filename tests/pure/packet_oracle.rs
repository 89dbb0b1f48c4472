//! Fast against slow: checksums against a word loop, headers against etherparse, routes against
//! a scan and another crate's trie, and the ICMP rules over many packets of each class.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;
use proptest::collection::vec;
use proptest::prelude::*;
use weft::packet::ipv4::Ipv4Header;
use weft::packet::{checksum, icmp};
use weft::route::{Prefix, Table};
use weft::stats::DropReason;

use crate::ip_parse::{self, second_opinion, word_loop};
use crate::lpm_model::{self, compare, peer};

/// Longest slice summed; longer than any packet or receive buffer.
const SUM_BYTES_MAX: usize = 70_000;

/// Packets of each class of the ICMP rules.
const PACKETS_PER_CLASS: usize = 10_000;

fn assert_sum(bytes: &[u8]) {
    let expected = (!word_loop(bytes)).to_be_bytes();
    assert_eq!(checksum::finish(checksum::sum(bytes)), expected, "{} bytes", bytes.len());
    assert!(checksum::sum(bytes) <= 0xffff);
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A valid packet with any of the fields that don't matter to its validity.
fn packet(rng: &mut fastrand::Rng, protocol: u8, payload_bytes: usize) -> Vec<u8> {
    let header_bytes = rng.usize(5..=15) * 4;
    let mut packet: Vec<u8> = (0..header_bytes + payload_bytes).map(|_| rng.u8(..)).collect();
    let total_bytes = packet.len() as u16;
    packet[0] = 0x40 | (header_bytes / 4) as u8;
    packet[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    packet[6..8].fill(0);
    packet[9] = protocol;
    packet[12] = 10;
    packet[16] = 10;
    seal(&mut packet);
    packet
}

/// Makes the header checksum right, as far as there is a header.
fn seal(packet: &mut [u8]) {
    let header_bytes = (usize::from(packet[0] & 0x0f) * 4).clamp(20, packet.len());
    packet[10..12].fill(0);
    let field = (!word_loop(&packet[..header_bytes])).to_be_bytes();
    packet[10..12].copy_from_slice(&field);
}

#[test]
fn short_slices_sum_as_the_word_loop() {
    let bytes = noise(1, 1024);
    for start in 0..64 {
        for length in 0..=320 {
            assert_sum(&bytes[start..start + length]);
        }
    }
}

#[test]
fn long_runs_sum_as_the_word_loop() {
    for fill in [0x00, 0x01, 0xff] {
        assert_sum(&vec![fill; (5 << 20) + 13]);
    }
    assert_sum(&noise(2, (5 << 20) + 13));
}

proptest! {
    #[test]
    fn any_slice_sums_as_the_word_loop(
        seed in any::<u64>(), start in 0..64usize, length in 0..=SUM_BYTES_MAX, mask in any::<u8>(),
    ) {
        let mut bytes = noise(seed, SUM_BYTES_MAX + 64);
        bytes.iter_mut().for_each(|byte| *byte |= mask);
        assert_sum(&bytes[start..start + length]);
    }

    #[test]
    fn sums_of_parts_add_up(seed in any::<u64>(), cut in 0..700usize, length in 0..1400usize) {
        let bytes = noise(seed, 2 * cut + length);
        let (head, tail) = bytes.split_at(2 * cut);
        let sum = checksum::add(checksum::sum(head), checksum::sum(tail));
        prop_assert_eq!(checksum::finish(sum), checksum::finish(checksum::sum(&bytes)));
    }

    #[test]
    fn an_update_equals_recomputation(
        bytes in vec(any::<u8>(), 2..100), word in any::<prop::sample::Index>(),
        new in any::<[u8; 2]>(),
    ) {
        let at = word.index(bytes.len() / 2) * 2;
        let old = [bytes[at], bytes[at + 1]];
        let mut edited = bytes.clone();
        edited[at..at + 2].copy_from_slice(&new);
        prop_assume!(edited.iter().any(|byte| *byte != 0));
        let before = checksum::finish(checksum::sum(&bytes));
        let after = checksum::finish(checksum::sum(&edited));
        prop_assert_eq!(checksum::update(before, old, new), after);
    }

    #[test]
    fn any_bytes_parse_as_etherparse_does(bytes in vec(any::<u8>(), 0..120)) {
        ip_parse::run(&bytes);
    }

    /// Extension headers of every kind, number and length, and one wrong byte.
    #[test]
    fn ipv6_packets_parse_as_etherparse_does(
        chain in vec((prop::sample::select(vec![0u8, 43, 44, 51, 60]), 0..4u8), 0..10),
        protocol in prop::sample::select(vec![6u8, 17, 58, 50, 59]),
        payload_bytes in 0..80usize, at in 0..120usize, value in any::<u8>(),
        is_broken in any::<bool>(),
    ) {
        let kinds = chain.iter().map(|(kind, _)| *kind).chain([protocol]);
        let first = kinds.clone().next().unwrap_or(protocol);
        let mut behind = Vec::new();
        for ((kind, length), next) in chain.iter().zip(kinds.skip(1)) {
            let (length, bytes) = match kind {
                44 => (0, 8),
                51 => (length + 1, (usize::from(*length) + 3) * 4),
                _ => (*length, (usize::from(*length) + 1) * 8),
            };
            behind.extend([next, length]);
            behind.extend(vec![0; bytes - 2]);
        }
        behind.extend(vec![1; payload_bytes]);
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((behind.len() as u16).to_be_bytes());
        packet.extend([first, 64]);
        packet.extend([0xfd; 32]);
        packet.extend(behind);
        ip_parse::run(&packet);
        if is_broken {
            let at = at % packet.len();
            packet[at] = value;
            ip_parse::run(&packet);
        }
    }

    #[test]
    fn nearly_valid_packets_parse_as_etherparse_does(
        seed in any::<u64>(), protocol in prop::sample::select(vec![1u8, 6, 17, 132]),
        payload_bytes in 0..1500usize, at in 0..60usize, value in any::<u8>(),
        reseal in any::<bool>(),
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut packet = packet(&mut rng, protocol, payload_bytes);
        ip_parse::run(&packet);
        let at = at % packet.len();
        packet[at] = value;
        if reseal {
            seal(&mut packet);
        }
        ip_parse::run(&packet);
    }

    #[test]
    fn any_lookup_equals_the_scan(bytes in vec(any::<u8>(), 0..200)) {
        lpm_model::run(&bytes);
    }
}

#[test]
fn all_first_bytes_parse_as_etherparse_does() {
    let template = noise(3, 64);
    for first in 0..=u16::MAX {
        for length in [1, 19, 20, 21, 40, 59, 60, 64] {
            let mut packet = template[..length].to_vec();
            packet[0] = (first >> 8) as u8;
            if length > 1 {
                packet[1] = first as u8;
            }
            if length >= 20 {
                packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
                seal(&mut packet);
            }
            assert_eq!(Ipv4Header::parse(&packet), second_opinion(&packet), "{packet:02x?}");
        }
    }
}

#[test]
fn all_length_boundaries_parse_as_etherparse_does() {
    let mut verdicts = [0; 3];
    for length in 20..100usize {
        for words in 0..16u8 {
            for total_bytes in 0..length + 3 {
                let mut packet = vec![0x5a; length];
                packet[0] = 0x40 | words;
                packet[2..4].copy_from_slice(&(total_bytes as u16).to_be_bytes());
                seal(&mut packet);
                let verdict = Ipv4Header::parse(&packet);
                assert_eq!(verdict, second_opinion(&packet), "{packet:02x?}");
                match verdict {
                    Ok(_) => verdicts[0] += 1,
                    Err(DropReason::BadHeaderLength) => verdicts[1] += 1,
                    Err(DropReason::BadTotalLength) => verdicts[2] += 1,
                    Err(fault) => panic!("{fault:?} for {packet:02x?}"),
                }
            }
        }
    }
    assert!(verdicts.iter().all(|count| *count > 1_000), "{verdicts:?}");
}

#[test]
fn excluded_classes_get_no_icmp_error() {
    let mut rng = fastrand::Rng::with_seed(4);
    type Edit = fn(&mut fastrand::Rng, &mut [u8]);
    let classes: [(&str, Edit); 12] = [
        ("destination unreachable", |_, packet| icmp_type(packet, 3)),
        ("source quench", |_, packet| icmp_type(packet, 4)),
        ("redirect", |_, packet| icmp_type(packet, 5)),
        ("time exceeded", |_, packet| icmp_type(packet, 11)),
        ("parameter problem", |_, packet| icmp_type(packet, 12)),
        ("later fragment", |rng, packet| {
            let fragment = rng.u16(0..8) << 13 | rng.u16(1..0x2000);
            packet[6..8].copy_from_slice(&fragment.to_be_bytes());
        }),
        ("multicast destination", |rng, packet| packet[16] = rng.u8(224..240)),
        ("broadcast destination", |_, packet| packet[16..20].fill(255)),
        ("source in 0/8", |_, packet| packet[12] = 0),
        ("source in 127/8", |_, packet| packet[12] = 127),
        ("source in class D", |rng, packet| packet[12] = rng.u8(224..240)),
        ("source in class E", |rng, packet| packet[12] = rng.u8(240..)),
    ];
    for (class, edit) in classes {
        for _ in 0..PACKETS_PER_CLASS {
            let protocol = *rng.choice(&[1, 6, 17]).unwrap();
            let payload_bytes = rng.usize(1..64);
            let mut packet = packet(&mut rng, protocol, payload_bytes);
            edit(&mut rng, &mut packet);
            seal(&mut packet);
            let header = Ipv4Header::parse(&packet).unwrap();
            assert!(!icmp::may_answer(&header, &packet), "{class}: {packet:02x?}");
        }
    }
    for _ in 0..PACKETS_PER_CLASS {
        let payload_bytes = rng.usize(0..64);
        let packet = packet(&mut rng, 17, payload_bytes);
        let header = Ipv4Header::parse(&packet).unwrap();
        assert!(icmp::may_answer(&header, &packet), "ordinary: {packet:02x?}");
    }
}

fn icmp_type(packet: &mut [u8], kind: u8) {
    packet[9] = 1;
    let header_bytes = usize::from(packet[0] & 0x0f) * 4;
    packet[header_bytes] = kind;
}

fn prefix(address: u32, length_bits: u8) -> Prefix {
    Prefix::new(Ipv4Addr::from_bits(address), length_bits).expect("the length is at most 32")
}

/// Both layouts, 10,000 routes, against another crate's trie.
#[test]
fn lookup_equals_another_trie() {
    let mut rng = fastrand::Rng::with_seed(5);
    let mixed =
        |rng: &mut fastrand::Rng| prefix(0x0a00_0000 | rng.u32(..) & 0x003f_ffff, rng.u8(8..=32));
    let equal = |rng: &mut fastrand::Rng| prefix(0x0a00_0000 | rng.u32(..) & 0x00ff_ffff, 24);
    for draw in [mixed, equal] {
        let mut other = PrefixMap::<Ipv4Net, u32>::new();
        let mut peers = Vec::new();
        for index in 0..10_000 {
            let subnet = draw(&mut rng);
            let net = Ipv4Net::new(subnet.network(), subnet.length_bits()).unwrap();
            other.insert(net, index);
            peers.push(peer(index, subnet));
        }
        let table = Table::build(peers.clone());
        assert_eq!(table.peers().len(), other.len());
        for _ in 0..200_000 {
            let destination = Ipv4Addr::from_bits(0x0a00_0000 ^ rng.u32(..) & 0x01ff_ffff);
            let net = Ipv4Net::new(destination, 32).unwrap();
            let expected = other.get_lpm(&net).map(|(_, index)| peers[*index as usize].address);
            let found = table.lookup(destination).map(|peer| peer.address);
            assert_eq!(found, expected, "{destination}");
        }
        for _ in 0..200 {
            let destination = Ipv4Addr::from_bits(0x0a00_0000 ^ rng.u32(..) & 0x01ff_ffff);
            compare(&table, &peers, destination);
        }
    }
}

#[test]
fn every_slash_24_is_found_at_both_ends() {
    let subnet_of = |index: u32| prefix(0x0a00_0000 | index << 8, 24);
    let table = Table::build((0..65_536).map(|index| peer(index, subnet_of(index))).collect());
    for index in 0..65_536 {
        let subnet = subnet_of(index);
        for destination in [subnet.network(), subnet.last()] {
            assert_eq!(table.lookup(destination).unwrap().subnets, subnet.into());
        }
    }
    assert!(table.lookup(Ipv4Addr::new(9, 255, 255, 255)).is_none());
    assert!(table.lookup(Ipv4Addr::new(11, 0, 0, 0)).is_none());
}

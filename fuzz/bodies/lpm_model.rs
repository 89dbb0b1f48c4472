//! One input of the `lpm_model` target: a set of prefixes, looked up in the table and by a scan.
//!
//! The first byte chooses the shape: even for prefixes of any length, odd for subnets of one
//! length near each other, which the table keeps in an array. The second byte is that length.
//! Then come records of five bytes, a length and an address.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use weft::route::{Peer, Prefix, Table};

/// Records used of one input; a scan per lookup makes the work quadratic.
const RECORDS_MAX: usize = 64;

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [shape, length_bits, records @ ..] = data else { return };
    let equal_length = (shape % 2 == 1).then_some(length_bits % 33);
    let (records, _) = records.as_chunks::<5>();
    let peers: Vec<_> = (0..)
        .zip(records.iter().take(RECORDS_MAX))
        .map(|(index, record)| peer(index, prefix(*record, equal_length)))
        .collect();
    let table = Table::build(peers.clone());
    for record in records.iter().take(RECORDS_MAX) {
        let subnet = prefix(*record, equal_length);
        let (first, last) = (subnet.network().to_bits(), subnet.last().to_bits());
        let raw = u32::from_be_bytes([record[4], record[3], record[2], record[1]]);
        for probe in [first, last, first.wrapping_sub(1), last.wrapping_add(1), raw] {
            compare(&table, &peers, Ipv4Addr::from_bits(probe));
        }
    }
    compare(&table, &peers, Ipv4Addr::UNSPECIFIED);
    compare(&table, &peers, Ipv4Addr::BROADCAST);
}

/// The peer of the longest prefix that holds `destination`, the last one of equals.
pub(crate) fn scan(peers: &[Arc<Peer>], destination: Ipv4Addr) -> Option<&Peer> {
    let holders = peers.iter().filter_map(|peer| Some((peer.subnets.v4()?, peer)));
    let holders = holders.filter(|(subnet, _)| subnet.contains(destination));
    holders.max_by_key(|(subnet, _)| subnet.length_bits()).map(|(_, peer)| &**peer)
}

/// Looks `destination` up both ways.
pub(crate) fn compare(table: &Table, peers: &[Arc<Peer>], destination: Ipv4Addr) {
    let found = table.lookup(destination);
    let expected = scan(peers, destination);
    assert_eq!(
        found.map(|peer| (peer.subnets, peer.address)),
        expected.map(|peer| (peer.subnets, peer.address)),
        "{destination}"
    );
    let address = table.endpoint(destination).map(|endpoint| table.address(endpoint));
    assert_eq!(address, expected.map(|peer| peer.address), "{destination}");
    if let Some(peer) = found {
        assert!(table.has_peer_at(peer.address.ip()));
    }
}

/// A peer whose address tells it from all others.
pub(crate) fn peer(index: u32, subnet: Prefix) -> Arc<Peer> {
    let address = SocketAddrV4::new(Ipv4Addr::from_bits(0xc000_0000 + index), 8285);
    Arc::new(Peer::new(subnet.into(), address))
}

fn prefix(record: [u8; 5], equal_length: Option<u8>) -> Prefix {
    let [length_bits, address @ ..] = record;
    let address = u32::from_be_bytes(address);
    let (address, length_bits) = match equal_length {
        // Sixteen bits of the record number the subnets, within an array's reach.
        Some(length_bits) => {
            let host_bits = 32 - u32::from(length_bits);
            let near = (address & 0xffff).checked_shl(host_bits).unwrap_or(0);
            (0x0a00_0000 | near, length_bits)
        }
        None => (address, length_bits % 33),
    };
    Prefix::new(Ipv4Addr::from_bits(address), length_bits).expect("the length is at most 32")
}

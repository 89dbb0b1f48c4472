//! One input of the `cache_parse` target: the cache from which weftd starts without its store.
//!
//! The first byte chooses: even for a file as it is, odd for what is under a seal that fits, which
//! no chance would find. What is accepted must fit the start, and must be read back the same.

use std::net::Ipv4Addr;

use weft::config::options::is_host_address;
use weft::control::cache::{BYTES_MAX, Expected, parse, render, seal};
use weft::route::Prefixes;

const STORE: &str = "etcd /coreos.com/network at http://192.0.2.100:2379";

/// Runs one input; panics when something is accepted that must not be.
pub(crate) fn run(data: &[u8]) {
    let [shape, rest @ ..] = data else { return };
    let sealed = seal(rest);
    let file = if shape % 2 == 0 { rest } else { &sealed };
    let prefixes = |text: &str| text.parse::<Prefixes>().expect("prefixes");
    let networks = prefixes("10.5.0.0/16");
    let expected = Expected {
        store: STORE,
        networks,
        subnets: prefixes("10.5.100.0/24"),
        address: Ipv4Addr::new(192, 0, 2, 1).into(),
        now_unix: 1_795_225_924,
    };
    let Ok(cache) = parse(file, &expected) else { return };
    let known = &cache.known;
    assert_eq!((cache.config.networks(), known.own.subnets), (networks, expected.subnets));
    assert_eq!(known.own.attributes.node_address(), expected.address);
    for (subnets, peer) in known.peers.iter() {
        assert_eq!(subnets.within(networks), Some(*subnets));
        assert!(!subnets.overlaps(expected.subnets), "{subnets}");
        assert_eq!(peer.subnets, *subnets);
        let address = peer.attributes.node_address();
        assert!(is_host_address(address) && address != expected.address, "{address}");
    }
    let neighbours = known.peers.keys().zip(known.peers.keys().skip(1));
    assert!(neighbours.into_iter().all(|(one, other)| !one.overlaps(*other)));
    let written = render(STORE, &cache.config, known).expect("what was read can be written");
    assert!(written.len() as u64 <= BYTES_MAX);
    let again = parse(&written, &expected).expect("what was written can be read");
    assert_eq!(again.config, cache.config);
    // A value filled to the limit may have no room for our spelling, and is left out.
    let peers = &again.known.peers;
    assert!(peers.iter().all(|(subnet, peer)| known.peers.get(subnet) == Some(peer)));
}

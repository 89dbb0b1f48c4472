//! What is written is read back; what is damaged, old, foreign or no lease is refused by name.

use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::control::lease::LeaseAttributes;
use crate::route::Prefix;

const STORE: &str = "etcd /coreos.com/network at http://192.0.2.100:2379";
const NOW: u64 = 1_795_225_924;

fn prefixes(text: &str) -> Prefixes {
    text.parse().unwrap()
}

fn config(text: &str) -> NetworkConfig {
    NetworkConfig::parse(text.as_bytes()).unwrap()
}

fn usual_config() -> NetworkConfig {
    config(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":8285}}"#)
}

fn lease(subnet: &str, public_ip: &str) -> Lease {
    let subnets = prefixes(subnet);
    Lease {
        subnets,
        key: subnets.key(),
        attributes: LeaseAttributes::udp(public_ip.parse().unwrap()),
        revision: 0,
        created_revision: 12,
        lifetime: Lifetime::Leased { id: 0, expires_unix: None },
    }
}

fn known(peers: &[Lease]) -> Known {
    Known {
        as_of_unix: NOW,
        revision: 1234,
        cluster: u64::MAX,
        networks: prefixes("10.5.0.0/16"),
        own: lease("10.5.100.0/24", "192.0.2.1"),
        ends_unix: Some(NOW + 2 * AGE_MAX.as_secs()),
        peers: Arc::new(peers.iter().map(|peer| (peer.subnets, peer.clone().into())).collect()),
    }
}

fn usual() -> Known {
    known(&[lease("10.5.1.0/24", "192.0.2.2"), lease("10.5.2.0/24", "192.0.2.3")])
}

fn expected() -> Expected<'static> {
    Expected {
        store: STORE,
        networks: prefixes("10.5.0.0/16"),
        subnets: prefixes("10.5.100.0/24"),
        address: "192.0.2.1".parse().unwrap(),
        now_unix: NOW + 3600,
    }
}

fn written(known: &Known) -> Vec<u8> {
    render(STORE, &usual_config(), known).unwrap()
}

#[track_caller]
fn assert_refused(bytes: &[u8], expected: &Expected<'_>, phrase: &str) {
    let error = parse(bytes, expected).expect_err("a start goes by what it must not trust");
    let text = with_causes(&error);
    assert!(text.contains(phrase), "{text:?} lacks {phrase:?}");
}

#[test]
fn written_cache_reads_back() {
    let mut known = usual();
    let own = Arc::get_mut(&mut known.peers).unwrap().values_mut().next().unwrap();
    let own = Arc::make_mut(own);
    own.key = "10.5.1.0-24&fd00:5:1::-64".to_owned();
    let data = RawValue::from_string(r#"{"VNI": 1, "x":["\n"]}"#.to_owned());
    own.attributes.backend_data = Some(crate::control::lease::RawJson(data.unwrap()));
    let cache = parse(&written(&known), &expected()).unwrap();
    assert_eq!(cache.config, usual_config());
    assert_eq!(cache.known, known);
}

#[test]
fn mismatched_cache_is_refused_by_field() {
    let bytes = written(&usual());
    let usual = expected();
    assert_refused(&bytes, &Expected { store: "local /srv", ..usual }, "local /srv");
    let networks = prefixes("10.6.0.0/16");
    assert_refused(&bytes, &Expected { networks, ..usual }, "\"10.5.0.0/16\"");
    let subnets = prefixes("10.5.101.0/24");
    assert_refused(&bytes, &Expected { subnets, ..usual }, "\"10.5.100.0/24\"");
    let address = "192.0.2.9".parse().unwrap();
    assert_refused(&bytes, &Expected { address, ..usual }, "192.0.2.9");
}

#[test]
fn old_or_future_cache_is_refused() {
    let bytes = written(&usual());
    let at = |now_unix| parse(&bytes, &Expected { now_unix, ..expected() });
    let day = AGE_MAX.as_secs();
    assert!(at(NOW + day).is_ok());
    assert!(at(NOW - AHEAD_MAX.as_secs()).is_ok());
    let ahead = at(NOW - AHEAD_MAX.as_secs() - 1).unwrap_err().to_string();
    assert!(ahead.contains("2026-11-21T01:52:04Z, ahead"), "{ahead}");
    assert!(at(0).is_err() && at(u64::MAX).is_err());
    let text = at(NOW + day + 1).unwrap_err().to_string();
    assert!(text.contains("2026-11-21T01:52:04Z") && text.contains("24h0m0s"), "{text}");
}

#[test]
fn cache_with_expired_lease_is_refused() {
    let ends = NOW + 3600;
    let bytes = written(&Known { ends_unix: Some(ends), ..usual() });
    let at = |now_unix| parse(&bytes, &Expected { now_unix, ..expected() });
    assert!(at(ends - 1).is_ok());
    let ended = at(ends).unwrap_err().to_string();
    assert!(ended.contains(&clock::format_rfc3339(ends)), "{ended}");
    // By a clock that is behind. One before the file's own time is refused for that.
    assert!(at(NOW - 3600).unwrap_err().to_string().contains(&clock::format_rfc3339(NOW)));
    let reserved = written(&Known { ends_unix: None, ..usual() });
    let late = Expected { now_unix: NOW + AGE_MAX.as_secs(), ..expected() };
    assert!(parse(&reserved, &late).is_ok(), "a reservation has no end");
}

#[test]
fn every_truncation_and_bit_flip_is_detected() {
    let bytes = written(&usual());
    for end in 0..bytes.len() {
        assert!(parse(&bytes[..end], &expected()).is_err(), "cut after {end} bytes");
    }
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            let cache = parse(&changed, &expected());
            assert!(cache.is_err(), "bit {bit} of byte {at} makes no difference");
        }
    }
    for damaged in [&bytes[..bytes.len() - 1], &[&bytes[..], b"\n"].concat()] {
        assert_refused(damaged, &expected(), "checksum");
    }
    for foreign in [&b"FLANNEL_SUBNET=10.5.1.1/24\n"[..], b""] {
        assert_refused(foreign, &expected(), "begin");
    }
}

#[test]
fn invalid_entry_invalidates_cache() {
    for (peers, at_fault) in [
        (vec![lease("10.6.1.0/24", "192.0.2.2")], "10.6.1.0-24"),
        (vec![lease("10.5.1.0/24", "127.0.0.1")], "10.5.1.0-24"),
        (vec![lease("10.5.1.0/24", "192.0.2.1")], "10.5.1.0-24"),
        (vec![lease("10.5.96.0/20", "192.0.2.2")], "10.5.96.0-20"),
        (vec![lease("10.5.0.0/20", "192.0.2.2"), lease("10.5.1.0/24", "192.0.2.3")], "10.5.0.0-20"),
    ] {
        assert_refused(&written(&known(&peers)), &expected(), &format!("{at_fault:?}"));
    }
    let own = lease("10.5.100.0/25", "192.0.2.1");
    let unleasable = written(&Known { own, ..usual() });
    let subnets = prefixes("10.5.100.0/25");
    assert_refused(&unleasable, &Expected { subnets, ..expected() }, "10.5.100.0-25");
}

#[test]
fn sealed_body_is_still_validated() {
    let whole = written(&usual());
    let body = whole.splitn(2, |byte| *byte == b'\n').nth(1).unwrap();
    let body = std::str::from_utf8(body).unwrap();
    assert!(parse(&seal(body.as_bytes()), &expected()).is_ok());
    for (from, to, phrase) in [
        ("\"revision\"", "\"surplus\":1,\"revision\"", "unknown field"),
        ("\"revision\":1234", "\"revision\":\"1\"", "invalid type"),
        ("10.5.1.0-24", "10.5.1.0-33", "10.5.1.0-33"),
        ("192.0.2.2", "192.0.2", "10.5.1.0-24"),
        ("\"Type\":\"udp\"", "\"Type\":7", "Type"),
        ("10.5.0.0/16", "10.5.0.0/29", "network"),
    ] {
        let changed = body.replacen(from, to, 1);
        assert_ne!(changed, body, "{from} is not in {body}");
        assert_refused(&seal(changed.as_bytes()), &expected(), phrase);
    }
}

#[test]
fn oversized_cache_and_value_are_not_written() {
    let mut large = lease("10.5.1.0/24", "192.0.2.2");
    let raw = format!("\"{}\"", "x".repeat(5000));
    let data = RawValue::from_string(raw).unwrap();
    large.attributes.backend_data = Some(crate::control::lease::RawJson(data));
    let good = lease("10.5.2.0/24", "192.0.2.3");
    let cache = parse(&written(&known(&[large.clone(), good.clone()])), &expected()).unwrap();
    assert_eq!(cache.known.peers.keys().collect::<Vec<_>>(), [&good.subnets]);

    let raw = format!("\"{}\"", "x".repeat(3000));
    let data = RawValue::from_string(raw).unwrap();
    large.attributes.backend_data = Some(crate::control::lease::RawJson(data));
    let flood = (0..6000_u32).map(|number| {
        let subnets = Prefixes::from(
            Prefix::new(Ipv4Addr::from_bits(0x0A05_0000 + (number << 4)), 28).unwrap(),
        );
        (subnets, Lease { subnets, key: subnets.key(), ..large.clone() }.into())
    });
    let flood = Known { peers: Arc::new(flood.collect()), ..usual() };
    let error = render(STORE, &usual_config(), &flood).unwrap_err();
    assert!(error.to_string().contains(&BYTES_MAX.to_string()), "{error}");
}

#[test]
fn cache_holds_as_many_peers_as_store() {
    let peers = (0..ENTRIES_MAX as u32).map(|number| {
        let subnets = Prefixes::from(
            Prefix::new(Ipv4Addr::from_bits(0x0A00_0000 + (number << 8)), 24).unwrap(),
        );
        let public_ip = Ipv4Addr::from_bits(0xC6C6_0000 + number);
        let attributes = LeaseAttributes::udp(public_ip);
        let (key, created_revision) = (subnets.key(), i64::MAX);
        let like = lease("10.255.1.0/24", "192.0.2.1");
        (subnets, Lease { subnets, key, attributes, created_revision, ..like }.into())
    });
    let own = lease("10.0.1.0/24", "192.0.2.1");
    let networks = prefixes("10.0.0.0/8");
    let mut peers: Peers = peers.collect();
    peers.remove(&own.subnets);
    let known = Known { own, networks, peers: Arc::new(peers), ..usual() };
    let config = config(r#"{"Network":"10.0.0.0/8"}"#);
    let bytes = render(STORE, &config, &known).unwrap();
    let expected = Expected { networks, subnets: known.own.subnets, ..expected() };
    let cache = parse(&bytes, &expected).unwrap();
    assert_eq!(cache.known, known, "a full network does not fit into its cache");
}

proptest! {
    #[test]
    fn any_bytes_give_a_cache_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for input in [seal(&bytes), bytes] {
            prop_assert!(parse(&input, &expected()).is_err());
        }
    }

    #[test]
    fn any_peers_that_fit_are_read_back(
        peers in proptest::collection::btree_map(1_u8..100, 2_u8..=254, 0..50),
        revision: i64,
        cluster: u64,
        created: i64,
    ) {
        let peers = peers.into_iter().map(|(third, host)| {
            let peer = lease(&format!("10.5.{third}.0/24"), &format!("192.0.2.{host}"));
            Lease { created_revision: created, ..peer }
        });
        let known = Known { revision, cluster, ..known(&peers.collect::<Vec<_>>()) };
        prop_assert_eq!(parse(&written(&known), &expected()).unwrap().known, known);
    }
}

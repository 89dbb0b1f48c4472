//! The difference on small devices, and against a device that does what it is told.

use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_800_000_000;

fn key(number: u8) -> PublicKey {
    PublicKey([number; 32])
}

fn at(last: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, last], 51820))
}

fn subnet(number: u8) -> Prefixes {
    format!("10.5.{number}.0/24").parse().unwrap()
}

fn wanted(number: u8) -> PeerConfig {
    PeerConfig {
        public_key: key(number),
        preshared_key: None,
        endpoint: Some(at(number)),
        allowed: subnet(number),
        keepalive_seconds: 0,
    }
}

fn found(wanted: &PeerConfig) -> FoundPeer {
    FoundPeer {
        state: PeerState {
            public_key: wanted.public_key,
            endpoint: wanted.endpoint,
            last_handshake_unix: Some(NOW - 5),
            received_bytes: 1,
            sent_bytes: 2,
            packets: None,
        },
        preshared_key: wanted.preshared_key.clone(),
        allowed: allowed_addresses(wanted.allowed),
        keepalive_seconds: wanted.keepalive_seconds,
    }
}

fn told(peers: &[PeerConfig]) -> BTreeMap<PublicKey, SocketAddr> {
    peers.iter().filter_map(|peer| Some((peer.public_key, peer.endpoint?))).collect()
}

/// What a device makes of the edits.
fn apply(mut device: Vec<FoundPeer>, edits: &[PeerEdit]) -> Vec<FoundPeer> {
    for PeerEdit { public_key, change } in edits {
        let PeerChange::Set { preshared_key, endpoint, allowed, keepalive_seconds } = change else {
            device.retain(|peer| peer.state.public_key != *public_key);
            continue;
        };
        if !device.iter().any(|peer| peer.state.public_key == *public_key) {
            let state = PeerState {
                public_key: *public_key,
                endpoint: None,
                last_handshake_unix: None,
                received_bytes: 0,
                sent_bytes: 0,
                packets: None,
            };
            let (preshared_key, allowed) = (None, BTreeSet::new());
            device.push(FoundPeer { state, preshared_key, allowed, keepalive_seconds: 0 });
        }
        for peer in &mut device {
            let is_it = peer.state.public_key == *public_key;
            let given = allowed.map(allowed_addresses).unwrap_or_default();
            if !is_it {
                // An address is allowed to one peer only.
                peer.allowed.retain(|address| !given.contains(address));
                continue;
            }
            peer.state.endpoint = endpoint.or(peer.state.endpoint);
            peer.allowed = allowed.map_or_else(|| peer.allowed.clone(), |_| given);
            peer.keepalive_seconds = keepalive_seconds.unwrap_or(peer.keepalive_seconds);
            if let Some(key) = preshared_key {
                peer.preshared_key.clone_from(key);
            }
        }
    }
    device
}

#[test]
fn a_device_that_has_it_all_is_told_nothing() {
    let peers = [wanted(1), wanted(2)];
    let device: Vec<_> = peers.iter().map(found).collect();
    assert_eq!(difference(&peers, &device, &told(&peers), NOW), []);
    assert_eq!(difference(&peers, &device, &BTreeMap::new(), NOW), [], "after a restart");
}

#[test]
fn only_what_differs_is_told() {
    let before = wanted(1);
    let with = |change: fn(&mut PeerConfig)| {
        let mut peer = wanted(1);
        change(&mut peer);
        let edits = difference(&[peer], &[found(&before)], &told(&[wanted(1)]), NOW);
        let [PeerEdit { change, .. }] = edits.as_slice() else { panic!("{edits:?}") };
        change.clone()
    };
    let set = |(preshared_key, endpoint, allowed, keepalive_seconds)| PeerChange::Set {
        preshared_key,
        endpoint,
        allowed,
        keepalive_seconds,
    };
    let shared = PresharedKey::from([7; 32]);
    let of_key = with(|peer| peer.preshared_key = Some(PresharedKey::from([7; 32])));
    assert_eq!(of_key, set((Some(Some(shared)), None, None, None)));
    assert_eq!(
        with(|peer| peer.endpoint = Some(at(9))),
        set((None, Some(at(9)), None, None)),
        "the peer's lease names another address"
    );
    assert_eq!(with(|peer| peer.allowed = subnet(9)), set((None, None, Some(subnet(9)), None)));
    assert_eq!(with(|peer| peer.keepalive_seconds = 25), set((None, None, None, Some(25))));
}

#[test]
fn a_peer_that_has_moved_is_left_there_while_it_is_heard() {
    let peer = wanted(1);
    let endpoint = |handshake: Option<u64>, told: Option<SocketAddr>| {
        let mut device = found(&peer);
        device.state.endpoint = Some(at(77));
        device.state.last_handshake_unix = handshake;
        let told = told.map(|told| (peer.public_key, told)).into_iter().collect();
        let edits = difference(std::slice::from_ref(&peer), &[device], &told, NOW);
        edits.into_iter().find_map(|edit| match edit.change {
            PeerChange::Set { endpoint, .. } => endpoint,
            PeerChange::Remove => None,
        })
    };
    let lease = Some(at(1));
    assert_eq!(endpoint(Some(NOW - 5), lease), None, "its packets would go to the old place");
    assert_eq!(endpoint(Some(NOW - 5), None), None, "after a restart of weftd");
    assert_eq!(endpoint(Some(NOW - 5), Some(at(50))), lease, "its lease has changed");
    assert_eq!(endpoint(Some(NOW - 181), lease), lease, "nothing came from there for long");
    assert_eq!(endpoint(None, lease), lease);
}

#[test]
fn a_subnet_goes_from_one_peer_to_another() {
    let (old, mut new) = (wanted(1), wanted(2));
    new.allowed = subnet(1);
    let edits = difference(std::slice::from_ref(&new), &[found(&old)], &BTreeMap::new(), NOW);
    assert_eq!(edits[0], PeerEdit { public_key: key(1), change: PeerChange::Remove });
    let device = apply(vec![found(&old)], &edits);
    assert_eq!(device.len(), 1);
    assert_eq!(device[0].allowed, allowed_addresses(subnet(1)), "its packets are lost");
}

fn config() -> impl Strategy<Value = PeerConfig> {
    (0..6u8, 0..3u8, 0..3u8, 0..2u16).prop_map(|(number, shared, place, pace)| PeerConfig {
        preshared_key: (shared > 0).then(|| PresharedKey::from([shared; 32])),
        endpoint: (place > 0).then(|| at(place)),
        keepalive_seconds: pace * 25,
        ..wanted(number)
    })
}

proptest! {
    #[test]
    fn what_was_told_leaves_what_is_wanted(
        before in prop::collection::btree_map(0..6u8, config(), 0..6),
        after in prop::collection::btree_map(0..6u8, config(), 0..6),
    ) {
        let of = |peers: BTreeMap<u8, PeerConfig>| -> Vec<_> {
            let named = |(number, peer)| PeerConfig {
                public_key: key(number), allowed: subnet(number), ..peer
            };
            peers.into_iter().map(named).collect()
        };
        let (before, after) = (of(before), of(after));
        let device: Vec<_> = before.iter().map(found).collect();
        let edits = difference(&after, &device, &told(&before), NOW);
        let device = apply(device, &edits);
        let mut keys: Vec<_> = device.iter().map(|peer| peer.state.public_key).collect();
        keys.sort();
        prop_assert_eq!(keys, after.iter().map(|peer| peer.public_key).collect::<Vec<_>>());
        let again = difference(&after, &device, &told(&after), NOW);
        let told_again: Vec<_> = again.iter().filter(|edit| {
            // One that is wanted nowhere stays where it was.
            after.iter().any(|peer| peer.public_key == edit.public_key && peer.endpoint.is_some())
        }).collect();
        prop_assert!(told_again.is_empty(), "{:?}", told_again);
        for peer in &after {
            let has = device.iter().find(|has| has.state.public_key == peer.public_key).unwrap();
            prop_assert_eq!(&has.preshared_key, &peer.preshared_key);
            prop_assert_eq!(&has.allowed, &allowed_addresses(peer.allowed));
            prop_assert_eq!(has.keepalive_seconds, peer.keepalive_seconds);
            prop_assert!(peer.endpoint.is_none() || has.state.endpoint == peer.endpoint);
        }
    }
}

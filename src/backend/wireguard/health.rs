//! How the peers of WireGuard devices are: echoes through the tunnel, and what the devices count.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::peer::evidence::{self, Hosts, Reached, Sample, Use};
use crate::backend::peer::health::{Health, Manner};
use crate::backend::status::WireguardPeers;
use crate::control::clock;
use crate::host::netlink::{self, NetlinkError};
use crate::route::{Families, Prefixes};
use crate::wireguard::keys::PublicKey;
use crate::wireguard::peer::PeerState;

use super::device::WireguardDevice;

/// Between two looks at the devices.
const LOOK: Duration = Duration::from_secs(4);

/// What is sent by the kernel expires at the peer, which wants to route it.
const TTL_BEYOND: u8 = 1;

/// The longest wait, should nothing ever be due.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// An echo of ours in the tunnel: 84 bytes, filled up to 96, and 32 of WireGuard's.
const ECHO_BYTES: u64 = 128;

/// What WireGuard sends by itself within a look: a handshake's first message (148 bytes) and the
/// answer to one of the peer's (92), which come with packets, ours included.
const HANDSHAKE_BYTES: u64 = 240;

/// How long the kernel goes on to try a handshake after the last packet for the peer (90 s,
/// drivers/net/wireguard/messages.h), and a little more.
const HANDSHAKE_TRIES: Duration = Duration::from_secs(95);

/// How long echoes of ours, which have handshakes tried, hide that nobody else sends any more.
const HIDDEN_MAX: Duration = Duration::from_secs(300);

pub(super) struct WireguardHealth {
    pub(super) health: Health,
    device: WireguardDevice,
    port: u16,
    own: Vec<IpAddr>,
    /// The devices' names.
    names: Vec<&'static str>,
    /// Who is at each host, with the first subnet of its lease.
    keys: BTreeMap<IpAddr, Vec<(PublicKey, Prefixes)>>,
    counted: BTreeMap<(&'static str, PublicKey), Counted>,
    asked: BTreeMap<IpAddr, Asked>,
}

/// What a device has counted of a peer so far, and what that means.
#[derive(Debug, Clone, Copy)]
struct Counted {
    last: PeerState,
    /// Packets for it; of the kernel's about as many, by their bytes.
    packets: u64,
    /// Grows with what came by a session.
    received: u64,
}

/// What was asked of a host of late.
#[derive(Debug, Default, Clone, Copy)]
struct Asked {
    last: Option<Instant>,
    since_look: u64,
    /// When its peer was last handshaken with for somebody else's packets.
    others_at: Option<Instant>,
}

impl Counted {
    /// What was there before this daemon looked, which is no news.
    fn first(state: &PeerState) -> Self {
        Self { last: *state, packets: 0, received: 0 }
    }

    /// Takes in what a look has found, and whether there `is` a session.
    fn note(&mut self, state: &PeerState, is_session: bool, asked: &mut Asked, now: Instant) {
        // A device that was made again counts from zero.
        let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let last = std::mem::replace(&mut self.last, *state);
        let sent_bytes = since(state.sent_bytes, last.sent_bytes);
        self.packets += match state.packets {
            Some(packets) => since(packets, last.packets.unwrap_or_default()),
            None if is_session => sent_bytes.saturating_sub(HANDSHAKE_BYTES).div_ceil(ECHO_BYTES),
            None if sent_bytes > 0 && asked.is_for_others(now) => asked.since_look + 1,
            None => 0,
        };
        // What belongs to a handshake shows that the peer lives, and not that packets pass.
        if is_session {
            self.received += since(state.received_bytes, last.received_bytes);
        }
    }
}

impl Asked {
    /// Whether a handshake that is tried now is for packets of others than us: the first ones
    /// certainly are, if we have not asked for long enough. From then on ours hide theirs.
    fn is_for_others(&mut self, now: Instant) -> bool {
        if self.last.is_none_or(|at| now.duration_since(at) > HANDSHAKE_TRIES) {
            self.others_at = Some(now);
        }
        self.others_at.is_some_and(|at| now.duration_since(at) < HIDDEN_MAX)
    }
}

/// A peer that is set up.
pub(super) struct Followed {
    pub(super) host: IpAddr,
    pub(super) public_key: PublicKey,
    /// The first of its lease.
    pub(super) subnet: Prefixes,
    /// The device's index.
    pub(super) interface: u32,
}

impl WireguardHealth {
    /// Asks over these families, the peers of the devices with these names.
    pub(super) fn open(
        device: WireguardDevice,
        families: Families<(), ()>,
        port: u16,
        names: Vec<&'static str>,
    ) -> Self {
        let (ttl, may_expire, is_use_rare) = (TTL_BEYOND, false, false);
        let manner = Manner { families, port: Some(port), ttl, may_expire, is_use_rare };
        let (keys, counted, asked) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (health, own) = (Health::open(manner), Vec::new());
        Self { health, device, port, own, names, keys, counted, asked }
    }

    /// These are the peers from now on; this host has the `own` addresses, and the interface with
    /// the index `external`.
    pub(super) fn follow(&mut self, peers: Vec<Followed>, own: Vec<IpAddr>, external: u32) {
        let mut hosts = Hosts::new();
        (self.own, self.keys) = (own, BTreeMap::new());
        for Followed { host, public_key, subnet, interface } in peers {
            let target = subnet.first_address();
            if target.is_ipv4() || self.health.asks_over_ipv6() {
                let reached = Reached { subnet, target, interface };
                evidence::add(&mut hosts, host, reached);
            }
            self.keys.entry(host).or_default().push((public_key, subnet));
        }
        self.asked.retain(|host, _| hosts.contains_key(host));
        self.health.machine.set_hosts(hosts, external);
    }

    /// Asks them, and gives what the devices say to `tell`. Cancel-safe.
    pub(super) async fn run(&mut self, tell: impl Fn(Arc<WireguardPeers>)) -> Infallible {
        loop {
            let mut now = Instant::now();
            self.health.receive(&self.own, now, |_| {});
            if self.health.is_look_due(LOOK, now) {
                let states = self.look().await;
                now = Instant::now();
                self.note(&states, now);
                tell(Arc::new(self.by_subnet(&states)));
            }
            for ask in self.health.tick(now) {
                let asked = self.asked.entry(ask.host).or_default();
                (asked.last, asked.since_look) = (Some(now), asked.since_look + 1);
                if let Err(NetlinkError::Refused(_, source)) = self.path(ask.host).await {
                    self.health.note_error(ask.host, &source);
                }
            }
            self.health.pause(PAUSE_MAX).await;
        }
    }

    /// How the devices' peers are. One device can perhaps not be read now; it can at the next look.
    async fn look(&self) -> Vec<(&'static str, PeerState)> {
        let mut all = Vec::new();
        for name in &self.names {
            let device = self.device.read(name).await.unwrap_or_default();
            all.extend(device.peers.into_iter().map(|peer| (*name, peer.state)));
        }
        all
    }

    fn note(&mut self, states: &[(&'static str, PeerState)], now: Instant) {
        let before = std::mem::take(&mut self.counted);
        let hosts = self.keys.iter().flat_map(|(host, of)| of.iter().map(|(key, _)| (*key, *host)));
        let hosts: BTreeMap<_, _> = hosts.collect();
        let now_unix = clock::unix_seconds();
        // Of a peer of two devices the sum.
        let mut sums: BTreeMap<PublicKey, (u64, u64)> = BTreeMap::new();
        for (name, state) in states {
            let place = (*name, state.public_key);
            let Some(host) = hosts.get(&state.public_key) else { continue };
            let known = before.get(&place).copied();
            let mut counted = known.unwrap_or_else(|| Counted::first(state));
            let asked = self.asked.entry(*host).or_default();
            counted.note(state, state.has_keys(now_unix), asked, now);
            self.counted.insert(place, counted);
            let (packets, received) = sums.entry(state.public_key).or_default();
            (*packets, *received) = (*packets + counted.packets, *received + counted.received);
        }
        self.asked.values_mut().for_each(|asked| asked.since_look = 0);
        let Self { health, keys, .. } = self;
        let count = |host, _: &[Reached]| {
            let keys = keys.get(&host).into_iter().flatten();
            let all = keys.filter_map(|(key, _)| sums.get(key));
            let add = |(a, b), (packets, received): &(u64, u64)| (a + packets, b + received);
            let (sent, received) = all.fold((0, 0), add);
            Sample { used: Use::Sent(sent), received }
        };
        health.look(count, &BTreeMap::new(), now);
    }

    /// The peers' states by their first subnets; of a peer of two devices their sum, and where it
    /// is by the first.
    fn by_subnet(&self, states: &[(&'static str, PeerState)]) -> WireguardPeers {
        let subnets: BTreeMap<_, _> = self.keys.values().flatten().copied().collect();
        let mut all = WireguardPeers::new();
        for (_, state) in states {
            let Some(subnet) = subnets.get(&state.public_key) else { continue };
            all.entry(*subnet)
                .and_modify(|first| {
                    let latest = first.last_handshake_unix.max(state.last_handshake_unix);
                    first.last_handshake_unix = latest;
                    first.received_bytes += state.received_bytes;
                    first.sent_bytes += state.sent_bytes;
                })
                .or_insert(*state);
        }
        all
    }

    async fn path(&self, host: IpAddr) -> Result<(), NetlinkError> {
        let from = self.own.iter().find(|own| own.is_ipv4() == host.is_ipv4());
        let Some(from) = from else { return Ok(()) };
        let [from, to] = [*from, host].map(|address| SocketAddr::new(address, self.port));
        netlink::path_of_datagram(from, to).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOT_ASKED: Asked = Asked { last: None, since_look: 0, others_at: None };

    fn state(sent_bytes: u64, received_bytes: u64, packets: Option<u64>) -> PeerState {
        PeerState {
            public_key: PublicKey([1; 32]),
            endpoint: None,
            last_handshake_unix: None,
            received_bytes,
            sent_bytes,
            packets,
        }
    }

    #[test]
    fn handshakes_and_keepalives_are_no_use_and_packets_are() {
        let (mut asked, now) = (NOT_ASKED, Instant::now());
        let mut counted = Counted::first(&state(1000, 0, None));
        let mut note = |bytes| {
            counted.note(&state(bytes, 0, None), true, &mut asked, now);
            counted.packets
        };
        assert_eq!(note(1240), 0, "an idle peer would be asked for ever");
        assert_eq!(note(1240 + 4 * ECHO_BYTES), 3, "a ping a second is no use of the peer");
        assert_eq!(note(500), 6, "the device was made again");
    }

    #[test]
    fn packets_that_are_counted_are_believed() {
        let (mut asked, now) = (NOT_ASKED, Instant::now());
        let mut counted = Counted::first(&state(1000, 0, Some(7)));
        counted.note(&state(1148, 0, Some(7)), false, &mut asked, now);
        assert_eq!(counted.packets, 0, "a handshake is no use of the peer");
        counted.note(&state(1296, 0, Some(9)), false, &mut asked, now);
        assert_eq!(counted.packets, 2, "packets that wait for a session are");
    }

    /// The kernel does not say who wanted the handshake.
    #[test]
    fn a_peer_without_a_session_is_in_use_until_only_we_may_want_it() {
        let (start, mut asked) = (Instant::now(), NOT_ASKED);
        let mut counted = Counted::first(&state(0, 0, None));
        // Whether others than us seem to have sent, when we have sent so many echoes.
        let mut look = |seconds: u64, bytes: u64, echoes: u64| {
            let now = start + Duration::from_secs(seconds);
            if echoes > 0 {
                (asked.last, asked.since_look) = (Some(now), echoes);
            }
            let before = counted.packets;
            counted.note(&state(bytes, 0, None), false, &mut asked, now);
            asked.since_look = 0;
            counted.packets - before > echoes
        };
        assert!(!look(4, 0, 0), "nothing was sent");
        assert!(look(8, 148, 0), "somebody wants it");
        assert!(look(12, 296, 10), "and perhaps still does");
        assert!(!look(16, 296, 10), "nothing is tried");
        assert!(!look(312, 444, 1), "nobody but us has wanted it for minutes");
        assert!(!look(400, 592, 0), "the last echo is the reason");
        assert!(look(412, 740, 0), "not any more");
    }

    #[test]
    fn what_begins_a_handshake_is_not_heard() {
        let (mut asked, now) = (NOT_ASKED, Instant::now());
        let mut counted = Counted::first(&state(0, 0, None));
        counted.note(&state(0, 148, None), false, &mut asked, now);
        assert_eq!(counted.received, 0, "a peer with another PSK would seem to be well");
        counted.note(&state(0, 276, None), true, &mut asked, now);
        assert_eq!(counted.received, 128);
    }
}

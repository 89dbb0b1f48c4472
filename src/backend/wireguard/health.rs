//! How the peers of WireGuard devices are: echoes through the tunnel, and what the devices count.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::peer::evidence::{Hosts, Reached, Sample, Use};
use crate::backend::peer::health::{Health, Manner};
use crate::backend::status::WireguardPeers;
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

pub(super) struct WireguardHealth {
    pub(super) health: Health,
    device: WireguardDevice,
    port: u16,
    own: Vec<IpAddr>,
    /// The devices' names.
    names: Vec<&'static str>,
    /// Who is at each host, with the first subnet of its lease.
    keys: BTreeMap<IpAddr, Vec<(PublicKey, Prefixes)>>,
    sent: BTreeMap<(&'static str, PublicKey), Sent>,
}

/// What was sent to a peer.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sent {
    /// By the device so far.
    bytes: u64,
    /// What that is in packets of an echo's length, handshakes aside.
    packets: u64,
}

impl Sent {
    /// Takes in what a look has found.
    fn note(&mut self, bytes: u64) {
        // A device that was made again counts from zero.
        let news = bytes.checked_sub(self.bytes).unwrap_or(bytes);
        self.bytes = bytes;
        self.packets += news.saturating_sub(HANDSHAKE_BYTES).div_ceil(ECHO_BYTES);
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
        let manner = Manner { families, port: Some(port), ttl: TTL_BEYOND, is_use_rare: false };
        let (keys, sent) = (BTreeMap::new(), BTreeMap::new());
        Self { health: Health::open(manner), device, port, own: Vec::new(), names, keys, sent }
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
                hosts.entry(host).or_default().push(reached);
            }
            self.keys.entry(host).or_default().push((public_key, subnet));
        }
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
        let before = std::mem::take(&mut self.sent);
        // Of a peer of two devices the sum.
        let mut sums: BTreeMap<PublicKey, (u64, u64)> = BTreeMap::new();
        for (name, PeerState { public_key, sent_bytes, received_bytes, .. }) in states {
            let known = before.get(&(*name, *public_key)).copied();
            let mut sent = known.unwrap_or(Sent { bytes: *sent_bytes, packets: 0 });
            sent.note(*sent_bytes);
            self.sent.insert((*name, *public_key), sent);
            let (packets, received) = sums.entry(*public_key).or_default();
            (*packets, *received) = (*packets + sent.packets, *received + received_bytes);
        }
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

    #[test]
    fn handshakes_and_keepalives_are_no_use_and_packets_are() {
        let mut sent = Sent { bytes: 1000, packets: 0 };
        sent.note(1240);
        assert_eq!(sent.packets, 0, "an idle peer would be asked for ever");
        sent.note(1240 + 4 * ECHO_BYTES);
        assert_eq!(sent.packets, 3, "a ping a second is no use of the peer");
        sent.note(500);
        assert_eq!((sent.bytes, sent.packets), (500, 6), "the device was made again");
    }
}

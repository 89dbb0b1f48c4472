//! What a backend reports to the rest of the daemon while it runs: its state, what it did, and the
//! host behind each subnet.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tracing::info;

use crate::backend::peer::state::Reachability;
use crate::backend::setup::{Setup, public_ipv6};
use crate::backend_kind::BackendKind;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
use crate::failure::lock;
use crate::fast_path::{Counts, PEERS_MAX, PeerCounts};
use crate::host::interface::ExternalInterface;
use crate::route::{HostSet, Prefixes, Published};
use crate::stats::WorkerStats;
use crate::status::{BackendCounts, FastPath, Handshakes, IpsecPeer, TunnelEnd, Worker};
use crate::wireguard::peer::PeerState;

/// Lines that one update may log before it sums up: a starting cluster is one event.
const LOGGED_PER_UPDATE_MAX: usize = 8;

/// What others see of the data plane.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaneState {
    /// Whether packets can flow; false while it is rebuilt.
    pub is_up: bool,
    /// Why they can't, while they can't, or what else is wrong with it.
    pub wrong: Option<String>,
    /// The dataplane in one line, for the log and the status.
    pub description: String,
    /// The overlay's own device, if it has one.
    pub device: Option<String>,
    /// The one of IPv6, if that has one of its own.
    pub device_v6: Option<String>,
    /// The interface that carries the tunnel, as it is now.
    pub external: ExternalInterface,
    /// MTU of the overlay, in bytes; it follows the external interface.
    pub mtu_bytes: u32,
    /// The longest packet that the interface takes whole in weftd's own tunnel, in bytes.
    pub whole_bytes: u16,
    /// Where the tunnel's datagrams arrive, if there is a tunnel.
    pub tunnel: Option<TunnelEnd>,
    /// The workers, without their counts; none where the kernel carries the packets.
    pub workers: Vec<Worker>,
    /// What became of WireGuard's handshakes, where weftd's workers carry its packets.
    pub handshakes: Option<Handshakes>,
    /// What was done for those who carry the packets, where weftd's workers don't.
    pub done: BackendCounts,
    /// The peers that are set up for them.
    pub hosts: Arc<PeerHosts>,
    /// Why others, or a family of theirs, can't be.
    pub unusable: Arc<Unusable>,
}

/// The host behind each subnet of one family.
pub type PeerHosts = BTreeMap<Prefixes, IpAddr>;

/// How WireGuard's peers are, by the first subnet of each.
pub type WireguardPeers = BTreeMap<Prefixes, PeerState>;

/// How IPsec's peers are, likewise.
pub type IpsecPeers = BTreeMap<Prefixes, IpsecPeer>;

/// Why leases can't be set up, in whole or in one family.
pub type Unusable = BTreeMap<Prefixes, String>;

/// The udp backend's plane.
#[derive(Debug, Clone)]
pub struct UdpPlane {
    /// Where routes are published.
    pub routes: Published,
    /// Whether the kernel's programs carry packets beside them; what they took is in `taken`.
    pub fast_path: watch::Receiver<FastPath>,
    /// What they took.
    pub taken: Arc<Taken>,
}

/// What the kernel's programs took, and of whose packets.
#[derive(Debug)]
pub struct Taken {
    /// None where there are no programs.
    counts: Option<Arc<Counts>>,
    /// Whom they sent long packets since somebody last took this.
    pub(super) long_sends: Mutex<HostSet>,
    numbers: Mutex<Numbers>,
}

/// Which counts are whose. A peer keeps its number when it leaves: should it come back, it goes on
/// counting. Once no number is free, those of peers that have left go to others.
#[derive(Debug)]
struct Numbers {
    /// With what had been counted when this was last looked at.
    of: BTreeMap<(Prefixes, SocketAddr), (u32, PeerCounts)>,
    free: Vec<u32>,
    /// Of those who have no number any more.
    former: PeerCounts,
}

impl Taken {
    pub(super) fn new(counts: Option<Arc<Counts>>) -> Self {
        let free = (0..PEERS_MAX).rev().collect();
        let numbers = Numbers { of: BTreeMap::new(), free, former: PeerCounts::default() };
        Self { counts, long_sends: Mutex::default(), numbers: Mutex::new(numbers) }
    }

    /// Which counts are those of `peer`, that has leased `subnet`; whoever gets none is the
    /// workers'.
    pub(super) fn number(&self, subnet: Prefixes, peer: SocketAddr) -> Option<u32> {
        let Numbers { of, free, .. } = &mut *lock(&self.numbers);
        match of.entry((subnet, peer)) {
            Entry::Occupied(known) => Some(known.get().0),
            Entry::Vacant(place) => Some(place.insert((free.pop()?, PeerCounts::default())).0),
        }
    }

    /// Gives the numbers of all but those who are `kept` to others, once none is free.
    pub(super) fn reuse(&self, kept: impl Fn(Prefixes, SocketAddr) -> bool) {
        let Numbers { of, free, former } = &mut *lock(&self.numbers);
        if free.is_empty() {
            of.retain(|(subnet, peer), (number, _)| {
                let stays = kept(*subnet, *peer);
                if !stays {
                    *former += self.counts.as_ref().map(|it| it.take(*number)).unwrap_or_default();
                    free.push(*number);
                }
                stays
            });
        }
    }

    fn of(&self, number: u32) -> PeerCounts {
        self.counts.as_ref().map(|counts| counts.of(number)).unwrap_or_default()
    }

    /// What they took of one peer that has leased `subnet`.
    pub fn of_peer(&self, subnet: Prefixes, peer: SocketAddr) -> PeerCounts {
        let known = lock(&self.numbers).of.get(&(subnet, peer)).copied();
        known.map(|(number, _)| self.of(number)).unwrap_or_default()
    }

    /// The peers for whom something was counted since the last call, with the counts before and
    /// now. Who has another number since then, counts from zero.
    pub(super) fn news(&self) -> Vec<(Prefixes, SocketAddr, [PeerCounts; 2])> {
        let mut numbers = lock(&self.numbers);
        let each = numbers.of.iter_mut().map(|((subnet, peer), (number, seen))| {
            let now = self.of(*number);
            (*subnet, *peer, [std::mem::replace(seen, now), now])
        });
        each.filter(|(.., [before, now])| before != now).collect()
    }

    /// What they took of all peers that ever were.
    pub fn total(&self) -> PeerCounts {
        let Numbers { of, former, .. } = &*lock(&self.numbers);
        let mut total = *former;
        of.values().for_each(|(number, _)| total += self.of(*number));
        total
    }
}

/// All that the rest of the daemon sees of a backend.
#[derive(Debug, Clone)]
pub struct View {
    /// The plane as it is, and each change of it.
    pub state: watch::Receiver<PlaneState>,
    /// The attributes that this node publishes, and each change of them.
    pub attributes: watch::Receiver<LeaseAttributes>,
    /// How the peers are, where anybody asks them.
    pub reachability: watch::Receiver<Arc<Reachability>>,
    /// What WireGuard knows of them, where it carries the packets.
    pub wireguard: watch::Receiver<Arc<WireguardPeers>>,
    /// What charon has agreed on with them, where IPsec carries the packets.
    pub ipsec: watch::Receiver<Arc<IpsecPeers>>,
    /// The counters of weftd's own workers, where they carry the packets; they outlive a rebuilt
    /// device.
    pub workers: Vec<Arc<WorkerStats>>,
    /// What else there is with udp.
    pub udp: Option<UdpPlane>,
}

/// The sending ends.
#[derive(Debug)]
pub(super) struct Reporter {
    state: watch::Sender<PlaneState>,
    pub(super) attributes: watch::Sender<LeaseAttributes>,
    pub(super) reachability: watch::Receiver<Arc<Reachability>>,
    pub(super) wireguard: watch::Sender<Arc<WireguardPeers>>,
    pub(super) ipsec: watch::Sender<Arc<IpsecPeers>>,
}

impl Reporter {
    pub(super) fn new(setup: &Setup) -> Self {
        let state = PlaneState {
            is_up: true,
            wrong: None,
            description: String::new(),
            device: None,
            device_v6: None,
            external: setup.external.clone(),
            mtu_bytes: setup.external.mtu_bytes,
            whole_bytes: u16::MAX,
            tunnel: None,
            workers: Vec::new(),
            handshakes: None,
            done: BackendCounts::default(),
            hosts: Arc::default(),
            unusable: Arc::default(),
        };
        Self {
            state: watch::Sender::new(state),
            attributes: watch::Sender::new(setup.attributes.clone()),
            reachability: watch::Sender::default().subscribe(),
            wireguard: watch::Sender::default(),
            ipsec: watch::Sender::default(),
        }
    }

    pub(super) fn view(&self, workers: Vec<Arc<WorkerStats>>, udp: Option<UdpPlane>) -> View {
        let (state, attributes) = (self.state.subscribe(), self.attributes.subscribe());
        let (reachability, wireguard) = (self.reachability.clone(), self.wireguard.subscribe());
        let ipsec = self.ipsec.subscribe();
        View { state, attributes, reachability, wireguard, ipsec, workers, udp }
    }

    /// Changes the state, and wakes its readers only if it differs.
    pub(super) fn state(&self, change: impl FnOnce(&mut PlaneState)) {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        });
    }

    /// Changes the counts of what was done.
    pub(super) fn count(&self, change: impl FnOnce(&mut BackendCounts)) {
        self.state(|state| change(&mut state.done));
    }

    /// Reports the external interface, as it is now, and the overlay's MTU over it.
    pub(super) fn follow(&self, external: &ExternalInterface, mtu_bytes: u32) {
        let public_ip = external.v4().map(|v4| v4.public_address);
        // Told again if only the address behind it changed, which is another than the PublicIP if
        // that is `--public-ip`: connections are bound to that.
        let is_elsewhere = self.state.borrow().external.address() != external.address();
        self.attributes.send_if_modified(|published| {
            let public_ipv6 = public_ipv6(&published.backend_type, external);
            is_elsewhere
                | (std::mem::replace(&mut published.public_ip, public_ip) != public_ip)
                | (std::mem::replace(&mut published.public_ipv6, public_ipv6) != public_ipv6)
        });
        self.state(|state| (state.external, state.mtu_bytes) = (external.clone(), mtu_bytes));
    }

    /// The peers with a backend of this kind; counts the others, and logs how many when it changes.
    pub(super) fn of_kind<'a>(
        &self,
        peers: &'a Peers,
        kind: BackendKind,
    ) -> impl Iterator<Item = &'a Lease> + use<'a> {
        self.count(|done| note_ignored(&mut done.leases_ignored, peers, kind));
        let leases = peers.values().map(Arc::as_ref);
        leases.filter(move |lease| lease.attributes.backend_type.is(kind))
    }

    /// Reports the peers that are set up, how many that are, and how many are not; logs what
    /// differs from the last time.
    pub(super) fn hosts(&self, hosts: PeerHosts, done: usize, failed: usize) {
        log_changes(&self.state.borrow().hosts, &hosts);
        self.state(|state| {
            let counts = &mut state.done;
            (counts.peers_programmed, counts.peers_failed) = (done as u64, failed as u64);
            state.hosts = Arc::new(hosts);
        });
    }
}

/// Notes how many leases are of other backends than `kind`, and logs it when it changes.
pub(super) fn note_ignored(noted: &mut u64, peers: &Peers, kind: BackendKind) {
    let is_other = |lease: &&Arc<Lease>| !lease.attributes.backend_type.is(kind);
    let ignored = peers.values().filter(is_other).count() as u64;
    if std::mem::replace(noted, ignored) != ignored {
        info!("Ignoring {ignored} leases of nodes with another backend than {kind}");
    }
}

/// Sends `value`, and wakes the readers only if it differs.
pub(super) fn send_if_new<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|now| std::mem::replace(now, value) != *now);
}

/// Logs the subnets that were added, moved and removed.
pub(super) fn log_changes<S: Ord + Display, H: PartialEq + Display>(
    before: &BTreeMap<S, H>,
    now: &BTreeMap<S, H>,
) {
    // One place for all of them: the log's limit is per place, and a cluster that starts makes many
    // updates in a second.
    for line in changes(before, now) {
        info!("{line}");
    }
}

/// The first of many lines, and what sums up how many more there are.
pub(super) fn summed_up(
    mut lines: impl Iterator<Item = String>,
    sum: impl FnOnce(usize) -> String,
) -> Vec<String> {
    let mut first: Vec<_> = lines.by_ref().take(LOGGED_PER_UPDATE_MAX).collect();
    if let more @ 1.. = lines.count() {
        first.push(sum(more));
    }
    first
}

/// What changed, in flannel's words.
fn changes<S: Ord + Display, H: PartialEq + Display>(
    before: &BTreeMap<S, H>,
    now: &BTreeMap<S, H>,
) -> Vec<String> {
    let changed = now.iter().filter(|(subnet, host)| before.get(subnet) != Some(*host));
    let removed = before.keys().filter(|subnet| !now.contains_key(subnet));
    let changed = changed.map(|(subnet, host)| match before.get(subnet) {
        None => format!("Subnet added: {subnet} via {host}"),
        Some(was) => format!("Subnet moved: {subnet} from {was} to {host}"),
    });
    let lines = changed.chain(removed.map(|subnet| format!("Subnet removed: {subnet}")));
    summed_up(lines, |more| format!("{more} more changes of subnets; {} of peers now", now.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    use super::*;
    use crate::route::Prefix;

    fn hosts(numbers: impl IntoIterator<Item = u8>, host: &str) -> BTreeMap<Prefix, &str> {
        let subnet = |number| format!("10.5.{number}.0/24").parse().unwrap();
        numbers.into_iter().map(|number| (subnet(number), host)).collect()
    }

    #[test]
    fn added_moved_and_removed_subnets_are_logged() {
        let [a, b] = [hosts(1..3, "a"), hosts(2..4, "b")];
        let told = changes(&a, &b);
        assert_eq!(told.len(), 3, "{told:?}");
        for (line, values) in told.iter().zip([
            ["moved", "10.5.2.0/24", " a ", " b"],
            ["added", "10.5.3.0/24", " b", ""],
            ["removed", "10.5.1.0/24", "", ""],
        ]) {
            assert!(values.iter().all(|value| line.contains(value)), "{values:?}: {line}");
        }
        assert_eq!(changes(&a, &a), [""; 0]);
    }

    #[test]
    fn many_changes_are_summed_up() {
        let lines = changes(&hosts([], "a"), &hosts(0..13, "a"));
        assert_eq!(lines.len(), LOGGED_PER_UPDATE_MAX + 1);
        let last = lines.last().unwrap();
        assert!(last.starts_with("5 ") && last.contains(" 13 "), "{last}");
    }
    #[test]
    fn numbers_of_peers_that_have_left_are_given_to_others() {
        let taken = Taken::new(None);
        let peer = |number: u32| {
            let subnet = Prefix::new(Ipv4Addr::from_bits(0x0a00_0000 | number << 8), 24).unwrap();
            (subnet.into(), SocketAddr::from((Ipv4Addr::from_bits(0xc000_0200 + number), 8285)))
        };
        let number = |(subnet, address)| taken.number(subnet, address);
        let numbers: BTreeSet<_> = (0..PEERS_MAX).map(|index| number(peer(index))).collect();
        assert_eq!(numbers, (0..PEERS_MAX).map(Some).collect(), "each has its own");
        let (stays, new) = (peer(7), peer(PEERS_MAX));
        let before = number(stays);
        assert_eq!(number(new), None);
        taken.reuse(|subnet, address| (subnet, address) == stays);
        assert_eq!(number(stays), before);
        assert!(number(new).is_some() && number(new) != before);
        assert_eq!(lock(&taken.numbers).of.len(), 2);
        // While there are free ones, nobody loses his.
        taken.reuse(|_, _| false);
        assert_eq!(number(stays), before);
    }

    #[test]
    fn a_peer_that_gets_another_number_counts_from_zero() {
        let taken = Taken::new(None);
        let peer = SocketAddr::from(([192, 0, 2, 1], 8285));
        let subnet = |number: u32| -> Prefixes {
            Prefix::new(Ipv4Addr::from_bits(0x0a00_0000 | number << 8), 24).unwrap().into()
        };
        (0..PEERS_MAX).for_each(|number| assert!(taken.number(subnet(number), peer).is_some()));
        // Of a number's owner of before, the counts are gone when somebody else gets it.
        let seen = PeerCounts { packets_received: 7, ..PeerCounts::default() };
        lock(&taken.numbers).of.get_mut(&(subnet(7), peer)).unwrap().1 = seen;
        taken.reuse(|_, _| false);
        assert!(taken.number(subnet(7), peer).is_some());
        let news = taken.news();
        assert!(news.is_empty(), "the new counts are less than those before: {news:?}");
    }
}

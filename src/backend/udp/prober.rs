//! Measures the paths to peers in use, and asks how the peers are: sends the echoes that `paths`
//! asks for, through the tunnel's socket, and has `health` do the rest. Decides nothing.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::info;

use crate::backend::peer::echoes::ECHO_BYTES;
use crate::backend::peer::evidence::{self, Hosts, LOOK as LOOK_AT_COUNTS, Reached, Sample, Use};
use crate::backend::peer::health::{Health, Manner};
use crate::backend::status::{Taken, send_if_new};
use crate::device::TunnelSocket;
use crate::failure::lock;
use crate::host::mtu::{IPV6_MTU_BYTES_MIN, tunnel_overhead_bytes};
use crate::packet::echo::Reply;
use crate::route::{Peer, Prefixes, Published, Table};
use crate::stats::WorkerStats;

use super::paths::{Paths, Probe};
use super::source_ports::{SourcePorts, TRIES};
use super::unresolved::Unresolved;
use crate::backend::team::Seat;

/// How often the workers' marks are looked at while some peer is in use, and while none is: a
/// look costs little, but an idle host is not to be woken often. With a second, a path that was
/// narrow before its first use is found in less than two.
const LOOK: Duration = Duration::from_millis(200);
const LOOK_IDLE: Duration = Duration::from_secs(1);

/// Between two rounds at least, should something be due all the time.
const ROUND_MIN: Duration = Duration::from_millis(10);

/// An echo by way of the TUN device expires at the peer with this: the workers of both hosts, and
/// flanneld as well, count it down, before the kernel there wants to.
const TTL_BEYOND: u8 = 3;

/// Of so many echoes that measure an answer still counts: at 300 a second, beyond any wait for it.
const OPEN_MAX: u16 = 4096;

/// Peers whose paths can't be measured, or are too narrow for IPv6, so that datagrams to them must
/// be allowed to be fragmented; `None` if nobody's can be measured.
pub(super) type Unmeasured = Option<BTreeSet<SocketAddr>>;

/// The measuring of one daemon's paths.
pub(super) struct Prober {
    /// How wide the peers' paths are, and how the peers are.
    pub(super) paths: Paths,
    pub(super) health: Health,
    /// The peers that `health` knows, and behind which interfaces.
    known: Option<(Arc<Table>, [u32; 2])>,
    /// The number of the last echo that measures, and those that are unanswered.
    sequence: u16,
    open: HashSet<u16>,
    own: IpAddr,
    unresolved: Unresolved,
    source_ports: SourcePorts,
    /// The subnets behind narrow paths and what each path carries.
    pub(super) limits: BTreeMap<Prefixes, u16>,
    /// The peers whose paths can't be measured, and each change of them.
    pub(super) unmeasured: watch::Sender<Unmeasured>,
    /// What the kernel's programs took.
    pub(super) taken: Arc<Taken>,
}

impl Prober {
    /// For the host with the subnets `own`, and the tunnel's end.
    pub(super) fn open(
        own: Prefixes,
        tunnel: SocketAddr,
        ceiling_bytes: u16,
        taken: Arc<Taken>,
    ) -> Self {
        let overhead_bytes = tunnel_overhead_bytes(tunnel.ip()) as u16;
        let manner = Manner {
            families: own.first().families(),
            port: Some(tunnel.port()),
            ttl: TTL_BEYOND,
            may_expire: false,
            is_use_rare: false,
        };
        let health = Health::open(manner);
        // Without echoes, routers may fragment long datagrams.
        let unmeasured = health.echoes.as_ref().map(|_| BTreeSet::new());
        Self {
            paths: Paths::new(ceiling_bytes, overhead_bytes, fastrand::u64(..)),
            health,
            known: None,
            sequence: 0,
            open: HashSet::new(),
            unmeasured: watch::Sender::new(unmeasured),
            taken,
            own: own.first_address(),
            unresolved: Unresolved::default(),
            source_ports: SourcePorts::default(),
            limits: BTreeMap::new(),
        }
    }

    /// The peers whose paths take less than a packet of IPv6 may always have (RFC 8200, section 5):
    /// those go without Don't Fragment.
    fn below_ipv6(&self, table: &Table) -> BTreeSet<SocketAddr> {
        let is_below = |peer: &&Arc<Peer>| {
            let limit = peer.subnets.v6().and_then(|_| self.limits.get(&peer.subnets.first()));
            limit.is_some_and(|bytes| *bytes < IPV6_MTU_BYTES_MIN)
        };
        table.peers().iter().filter(is_below).map(|peer| peer.address).collect()
    }

    /// Measures until `limits` have changed. Cancel-safe: waiting is all that it does in
    /// between. `interfaces` are the tunnel's and the external one.
    pub(super) async fn changed(
        &mut self,
        seats: &[Seat],
        routes: &Published,
        interfaces: [u32; 2],
    ) {
        loop {
            // With Don't Fragment, a narrow path that can't be measured would go unnoticed.
            let is_measuring = self.health.echoes.is_some();
            let below_ipv6 = self.below_ipv6(&routes.table.load());
            let always_fragmenting =
                !is_measuring || self.paths.mute().next().is_some() || !below_ipv6.is_empty();
            for seat in seats {
                seat.socket.set_always_fragmenting(always_fragmenting);
            }
            self.round(seats, &routes.table.load(), interfaces);
            if is_measuring {
                let now = Instant::now();
                let is_away = |peer: SocketAddr| self.health.machine.has_no_daemon(peer.ip(), now);
                let unknown = self.paths.unknown(is_away, now).chain(below_ipv6).collect();
                send_if_new(&self.unmeasured, Some(unknown));
            }
            let suspects = self.health.in_question(Instant::now());
            self.unresolved.look(suspects, seats[0].socket.address, interfaces[1], routes).await;
            if let Some(hosts) = self.source_ports.changed() {
                let table = routes.table.load();
                routes.spread.publish(hosts.iter().map(|host| table.host_key(*host)).collect());
            }
            let limits = self.limits_of_subnets(&routes.table.load());
            if limits != self.limits {
                self.limits = limits;
                return;
            }
            let now = Instant::now();
            let due = self.paths.next_due();
            let pause = due.map_or(LOOK_IDLE, |due| due.duration_since(now).clamp(ROUND_MIN, LOOK));
            tokio::select! {
                () = self.health.pause(pause) => {}
                () = self.unresolved.changed() => {}
            }
        }
    }

    /// Receives answers, then sends the echoes that are due: in this order, so that an answer that
    /// came before a late look is not taken for lost.
    fn round(&mut self, seats: &[Seat], table: &Arc<Table>, interfaces: [u32; 2]) {
        let now = Instant::now();
        let is_known = |(known, at): &(_, _)| Arc::ptr_eq(known, table) && *at == interfaces;
        if !self.known.as_ref().is_some_and(is_known) {
            self.known = Some((Arc::clone(table), interfaces));
            let [tunnel, external] = interfaces;
            self.health.machine.set_hosts(hosts(table, tunnel), external);
            let peers = table.peers().iter().filter(|peer| peer.takes_source_ports);
            let target = |peer: &Arc<Peer>| (peer.address.ip(), asked(peer));
            let ports = sources(seats).count();
            self.source_ports.set_peers(ports, &peers.map(target).collect(), now);
        }
        let tunnel = seats[0].socket.address.ip();
        let Self { paths, open, source_ports, .. } = self;
        let others = |reply: Reply| {
            let is_trial = source_ports.answered(reply.source, reply.sequence, now);
            if !is_trial && open.remove(&reply.sequence) {
                paths.answered(reply.source, reply.total_bytes, now);
            }
        };
        self.health.receive(&[self.own, tunnel], now, others);
        if self.health.is_look_due(LOOK_AT_COUNTS, now) {
            let taken = &self.taken;
            let count = |host, leases: &[Reached]| sample(seats, taken, table, host, leases);
            self.health.look(count, &self.limits, now);
        }
        for ask in self.health.tick(now) {
            // The tunnel's own socket is told why it can't send.
            let endpoint = SocketAddr::new(ask.host, seats[0].socket.address.port());
            let probe = Probe { endpoint, target: ask.target, bytes: ECHO_BYTES };
            self.ask(seats, probe, ask.sequence);
        }
        self.try_source_ports(seats, now);
        self.note_use(seats, table, now);
        for probe in self.paths.tick(now) {
            self.sequence = self.sequence.wrapping_add(1);
            self.open.insert(self.sequence);
            self.open.remove(&self.sequence.wrapping_sub(OPEN_MAX));
            self.ask(seats, probe, self.sequence);
        }
    }

    /// Sends the echoes that show whether what leaves from workers' own ports arrives.
    fn try_source_ports(&mut self, seats: &[Seat], now: Instant) {
        let ports: Vec<_> = sources(seats).collect();
        let Self { health, source_ports, paths, .. } = self;
        if ports.is_empty() || health.echoes.is_none() {
            return;
        }
        for ask in source_ports.tick(|host| health.machine.is_in_use(host, now), now) {
            self.sequence = self.sequence.wrapping_add(1);
            source_ports.asked(ask.host, self.sequence, now);
            let Some(socket) = ports.get(ask.port) else { continue };
            let Some(echoes) = health.echoes.as_mut() else { return };
            let endpoint = SocketAddr::new(ask.host, socket.address.port());
            // As long as packets may be: what one way takes, another may not.
            let bytes = paths.longest(endpoint);
            let Some(packet) = echoes.packet([self.own, ask.target], bytes, self.sequence) else {
                continue;
            };
            // What can't be sent is not answered.
            let _unsent = socket.send_from_source(packet, endpoint);
        }
        for (host, port) in source_ports.given_up() {
            let Some(socket) = ports.get(port) else { continue };
            let Some(source) = socket.source_port() else { continue };
            let tunnel = socket.address.port();
            info!(
                "no long echo to {host} from UDP port {source} was answered {TRIES} times in a \
                 row: all workers send to it from port {tunnel} until those from all their ports \
                 are again"
            );
        }
    }

    /// Asks a TUN address for an echo. One that the kernel refuses to send counts as lost, like one
    /// that a router drops.
    fn ask(&mut self, seats: &[Seat], Probe { endpoint, target, bytes }: Probe, sequence: u16) {
        let Some(echoes) = self.health.echoes.as_mut() else { return };
        let Some(packet) = echoes.packet([self.own, target], bytes, sequence) else { return };
        if let Err(error) = seats[0].socket.send_whole(packet, endpoint)
            && bytes == ECHO_BYTES
        {
            self.health.note_error(endpoint.ip(), &error);
        }
    }

    /// A peer may have several leases, all at the end of one path.
    fn limits_of_subnets(&self, table: &Table) -> BTreeMap<Prefixes, u16> {
        let by_peer: BTreeMap<_, _> = self.paths.limits().collect();
        if by_peer.is_empty() {
            return BTreeMap::new();
        }
        let limit = |peer: &Arc<Peer>| Some((peer.subnets.first(), *by_peer.get(&peer.address)?));
        table.peers().iter().filter_map(limit).collect()
    }

    fn note_use(&mut self, seats: &[Seat], table: &Table, now: Instant) {
        let mut used = std::mem::take(&mut *lock(&self.taken.long_sends));
        used.extend(seats.iter().flat_map(|seat| seat.stats.by_peer.take_long_sends()));
        if !used.is_empty() {
            // From anywhere, so that of too many all get their turns.
            let (before, from) = table.peers().split_at(fastrand::usize(..=table.peers().len()));
            for peer in from.iter().chain(before) {
                if used.contains(&table.host_key(peer.address.ip())) {
                    self.paths.used(peer.address, asked(peer), now);
                }
            }
        }
        self.paths.retain(|endpoint, address| {
            let owner = table.owner(address);
            owner.is_some_and(|peer| peer.address == endpoint && asked(peer) == address)
        });
    }
}

/// What answers echoes there: the peer's TUN address, that of IPv4 if it has one.
fn asked(peer: &Peer) -> IpAddr {
    peer.subnets.first_address()
}

/// The peers' leases by their hosts, behind this interface.
fn hosts(table: &Table, interface: u32) -> Hosts {
    let mut hosts = Hosts::new();
    for peer in table.peers() {
        let (subnet, target) = (peer.subnets.first(), asked(peer));
        let lease = Reached { subnet, target, interface };
        evidence::add(&mut hosts, peer.address.ip(), lease);
    }
    hosts
}

/// The sockets that have a port of their own to send from.
fn sources(seats: &[Seat]) -> impl Iterator<Item = &TunnelSocket> {
    seats.iter().map(|seat| &*seat.socket).filter(|socket| socket.has_source())
}

/// What was counted of a peer by workers and by the kernel's programs.
fn sample(
    seats: &[Seat],
    taken: &Taken,
    table: &Table,
    host: IpAddr,
    leases: &[Reached],
) -> Sample {
    let workers = seats.iter().map(|seat| &*seat.stats);
    let by_workers = WorkerStats::traffic(workers, table.host_key(host));
    let (mut sent, mut received) =
        (by_workers.packets_sent + by_workers.failed_sends, by_workers.packets_received);
    let endpoint = SocketAddr::new(host, seats[0].socket.address.port());
    for subnet in leases.iter().map(|lease| lease.subnet) {
        let by_kernel = taken.of_peer(subnet, endpoint);
        sent += by_kernel.packets_sent;
        received += by_kernel.packets_received;
    }
    Sample { used: Use::Sent(sent), received }
}

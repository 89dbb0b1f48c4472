//! How the peers of the vxlan and host-gw backends are. The kernel carries their packets and counts
//! none of them apart, but it notes when it last sent to each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use crate::backend::peer::evidence::{Hosts, Reached, Sample, Use};
use crate::backend::peer::health::{Health, Manner};
use crate::host::netlink::{self, NetlinkError, neighbours};
use crate::host::state::EntryTable;
use crate::host::tables::{Way, Ways};
use crate::route::Prefix;

/// Between two looks at whom the kernel has sent to: with the four seconds in which a peer that was
/// idle and is dead leaves its echoes unanswered, it is known within nine.
const LOOK: Duration = Duration::from_secs(4);

/// What was sent by the kernel expires at the peer, which wants to route it.
const TTL_BEYOND: u8 = 1;

/// The longest wait, should nothing ever be due.
const PAUSE_MAX: Duration = Duration::from_secs(60);

pub(super) struct KernelHealth {
    pub(super) health: Health,
    port: Option<u16>,
    /// The tables in which the kernel notes the peers' use.
    tables: BTreeSet<(u32, EntryTable)>,
    own: Vec<Ipv4Addr>,
    /// Those that must be in a forwarding database.
    forwarded: BTreeSet<Ipv4Addr>,
    /// Whom the kernel listed at the last look, and whether one of those was missing.
    listed: BTreeSet<Ipv4Addr>,
    was_missing: bool,
}

impl KernelHealth {
    /// `port` of the tunnel, if there is one.
    pub(super) fn open(port: Option<u16>) -> Self {
        let manner = Manner { port, ttl: TTL_BEYOND, is_use_rare: true };
        Self {
            health: Health::open(manner),
            port,
            tables: BTreeSet::new(),
            own: Vec::new(),
            forwarded: BTreeSet::new(),
            listed: BTreeSet::new(),
            was_missing: false,
        }
    }

    /// Those that are `set` up are the peers from now on, with their hosts, behind the interface
    /// with this index; this host has the `own` addresses.
    pub(super) fn follow(
        &mut self,
        set: &Ways,
        peers: &BTreeMap<Prefix, Ipv4Addr>,
        own: Vec<Ipv4Addr>,
        external: u32,
    ) {
        self.own = own;
        let mut hosts = Hosts::new();
        for (subnet, host) in peers {
            // What answers there: the VXLAN device, or the host itself.
            let target = if self.port.is_some() { subnet.network() } else { *host };
            let interface = set.get(subnet).map_or(external, |way| way.route.interface.index);
            let lease = Reached { subnet: *subnet, target, interface };
            hosts.entry(*host).or_default().push(lease);
        }
        let table = |way: &Way| match way.entries.is_empty() {
            true => EntryTable::Neighbours,
            false => EntryTable::Forwarding,
        };
        let entries = set.values().flat_map(|way| &way.entries);
        let forwarded = entries.filter(|entry| entry.table == EntryTable::Forwarding);
        self.forwarded = forwarded.map(|entry| entry.address).collect();
        self.tables = set.values().map(|way| (way.route.interface.index, table(way))).collect();
        self.health.machine.set_hosts(hosts, external);
    }

    /// Asks them, until the kernel lacks the forwarding entry of one, or has it again. Cancel-safe.
    pub(super) async fn run(&mut self) {
        while !self.round().await {
            self.health.pause(PAUSE_MAX).await;
        }
    }

    /// Whether the kernel's tables are to be compared with what must be there.
    async fn round(&mut self) -> bool {
        let (mut now, mut wants_comparison) = (Instant::now(), false);
        self.health.receive(&self.own, now, |_| {});
        if self.health.is_look_due(LOOK, now) {
            let ages = self.ages().await;
            now = Instant::now();
            let used = |host: Ipv4Addr| {
                ages.get(&host).copied().flatten().and_then(|age| now.checked_sub(age))
            };
            let count = |host, _: &[Reached]| Sample { used: Use::At(used(host)), received: 0 };
            self.health.look(count, &BTreeMap::<Prefix, u16>::new(), now);
            self.listed = ages.into_keys().collect();
            let is_missing = !self.forwarded.is_subset(&self.listed);
            wants_comparison = is_missing || self.was_missing;
            self.was_missing = is_missing;
        }
        for ask in self.health.tick(now) {
            // A tunnel's packets are lost without a word where no route leads.
            let path = match (self.port, self.own.first()) {
                (Some(port), Some(from)) => {
                    let [from, to] = [*from, ask.host].map(|host| SocketAddrV4::new(host, port));
                    netlink::path_of_datagram(from, to).await
                }
                _ => netlink::path_to(ask.host).await,
            };
            if let Err(NetlinkError::Refused(_, source)) = path {
                self.health.note_error(ask.host, &source);
            }
        }
        wants_comparison
    }

    /// How long ago the kernel last sent to each that it lists.
    async fn ages(&self) -> BTreeMap<Ipv4Addr, Option<Duration>> {
        let mut all = BTreeMap::new();
        for (index, table) in &self.tables {
            // One that can't be listed now can be at the next look.
            all.extend(neighbours::used(*index, *table, &self.listed).await.unwrap_or_default());
        }
        all
    }
}

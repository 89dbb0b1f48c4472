//! How the peers are whose packets the kernel carries. It and counts
//! none of them apart, but it notes when it last sent to each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::backend::peer::evidence::{self, Hosts, Reached, Sample, Use};
use crate::backend::peer::health::{Health, Manner};
use crate::host::netlink::{self, NetlinkError, neighbours};
use crate::host::state::{EntryTable, KernelFamily, PathToHost};
use crate::host::tables::Ways;
use crate::route::{Families, Prefix, Prefixes};

/// Between two looks at whom the kernel has sent to: with the four seconds in which a peer that was
/// idle and is dead leaves its echoes unanswered, it is known within nine.
const LOOK: Duration = Duration::from_secs(4);

/// What was sent by the kernel expires at the peer, which wants to route it.
const TTL_BEYOND: u8 = 1;

/// The longest wait, should nothing ever be due.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What answers echoes at a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answerer {
    /// The tunnel's device, at the subnet's network address.
    Device,
    /// The host itself.
    Host,
    /// The bridge of the pods, or the host in its place where there is none: what shows that the
    /// route to the subnet leads there.
    Subnet,
}

pub(super) struct KernelHealth {
    pub(super) health: Health,
    port: Option<u16>,
    answerer: Answerer,
    /// The tables in which the kernel notes the peers' use, and whether they are of IPv6.
    tables: BTreeSet<(u32, EntryTable, bool)>,
    own: Vec<IpAddr>,
    /// Those that must be in a forwarding database.
    forwarded: BTreeSet<IpAddr>,
    /// Whom the kernel listed at the last look, and whether one of those was missing.
    listed: BTreeSet<IpAddr>,
    was_missing: bool,
}

/// What is set up of one family, and the hosts of those peers that are asked over it.
pub(super) type Followed<'a, A> = (&'a Ways<A>, BTreeMap<Prefix<A>, A>);

impl KernelHealth {
    /// `port` of the tunnel, if it has one.
    pub(super) fn open(families: Families<(), ()>, port: Option<u16>, answerer: Answerer) -> Self {
        let may_expire = answerer == Answerer::Subnet;
        let manner = Manner { families, port, ttl: TTL_BEYOND, may_expire, is_use_rare: true };
        Self {
            health: Health::open(manner),
            port,
            answerer,
            tables: BTreeSet::new(),
            own: Vec::new(),
            forwarded: BTreeSet::new(),
            listed: BTreeSet::new(),
            was_missing: false,
        }
    }

    /// These are the peers from now on, as far as they are set up, and come by the interface with
    /// this index unless they have a device; this host has the `own` addresses.
    pub(super) fn follow(
        &mut self,
        v4: &Followed<'_, Ipv4Addr>,
        v6: &Followed<'_, Ipv6Addr>,
        own: Vec<IpAddr>,
        external: u32,
    ) {
        (self.own, self.tables, self.forwarded) = (own, BTreeSet::new(), BTreeSet::new());
        let mut hosts = Hosts::new();
        self.add(v4, &mut hosts);
        if self.health.asks_over_ipv6() {
            self.add(v6, &mut hosts);
        }
        self.health.machine.set_hosts(hosts, external);
    }

    fn add<A: KernelFamily>(&mut self, (set, peers): &Followed<'_, A>, hosts: &mut Hosts)
    where
        Prefixes: From<Prefix<A>>,
    {
        for (subnet, host) in peers {
            let Some(way) = set.get(subnet) else { continue };
            let target = match self.answerer {
                Answerer::Device => subnet.network(),
                Answerer::Host => *host,
                Answerer::Subnet => subnet.first_host(),
            };
            let target = target.into();
            let interface = way.route.interface.index;
            let lease = Reached { subnet: (*subnet).into(), target, interface };
            evidence::add(hosts, (*host).into(), lease);
            let table = match way.entries.is_empty() {
                true => EntryTable::Neighbours,
                false => EntryTable::Forwarding,
            };
            self.tables.insert((interface, table, target.is_ipv6()));
            let entries = way.entries.iter().filter(|it| it.table == EntryTable::Forwarding);
            self.forwarded.extend(entries.map(|entry| entry.address.into()));
        }
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
            let used = |host: IpAddr| {
                ages.get(&host).copied().flatten().and_then(|age| now.checked_sub(age))
            };
            let count = |host, _: &[Reached]| Sample { used: Use::At(used(host)), received: 0 };
            self.health.look(count, &BTreeMap::new(), now);
            self.listed = ages.into_keys().collect();
            let is_missing = !self.forwarded.is_subset(&self.listed);
            wants_comparison = is_missing || self.was_missing;
            self.was_missing = is_missing;
        }
        for ask in self.health.tick(now) {
            let path = self.path(ask.host).await;
            if let Err(NetlinkError::Refused(_, source)) = path {
                self.health.note_error(ask.host, &source);
            }
        }
        wants_comparison
    }

    /// A tunnel's packets are lost without a word where no route leads.
    async fn path(&self, host: IpAddr) -> Result<PathToHost, NetlinkError> {
        let from = self.own.iter().find(|own| own.is_ipv4() == host.is_ipv4());
        match self.port.zip(from) {
            Some((port, from)) => {
                let [from, to] = [*from, host].map(|address| SocketAddr::new(address, port));
                netlink::path_of_datagram(from, to).await
            }
            None => netlink::path_to(host).await,
        }
    }

    /// How long ago the kernel last sent to each that it lists.
    async fn ages(&self) -> BTreeMap<IpAddr, Option<Duration>> {
        let mut all = BTreeMap::new();
        for (index, table, is_ipv6) in &self.tables {
            let listed = match is_ipv6 {
                false => neighbours::used::<Ipv4Addr>(*index, *table, &self.listed).await,
                true => neighbours::used::<Ipv6Addr>(*index, *table, &self.listed).await,
            };
            // One that can't be listed now can be at the next look.
            all.extend(listed.unwrap_or_default());
        }
        all
    }
}

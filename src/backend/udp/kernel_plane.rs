//! Whether the kernel's programs (`crate::fast_path`) may carry this host's packets, and for whom:
//! looks at what could forbid it, gives them the published table, and takes it back when something
//! changes. What they do not carry, the workers do.

pub(in crate::backend) mod attachment;
mod entries;
mod hops;
pub(super) mod merging;
pub(super) mod obstacle;
mod placement;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use crate::backend::status::Taken;
use crate::control::clock::boot_time;
use crate::control::lease::LeaseAttributes;
use crate::failure::{lock, with_causes};
use crate::fast_path::{FastPath, LENGTHS_MAX, PEERS_MAX, Settings};
use crate::host::netlink::events::Events;
use crate::host::netlink::policies::has_policies;
use crate::host::netlink::{self, NetlinkError, neighbours, request_all};
use crate::host::state::MacAddress;
use crate::route::{HostSet, IpAddress, Peer, Prefix, Published, Table};
use crate::status;

use super::owner::Owner;
use super::peers::announcement;
use super::prober::Unmeasured;

use self::attachment::Attacher;
use self::entries::Entries;
use self::hops::Hops;
use self::obstacle::{Obstacle, off};
use self::placement::Placement;

pub(super) use self::attachment::Ground;
pub(crate) use self::merging::pair_names;

/// How long the programs go on without weftd: longer than any pause of a living one.
const LIFE: Duration = Duration::from_secs(60);

/// How long they and the device's routes go on without a weftd that was stopped and is to be
/// followed by another one: enough to exchange it. Meanwhile nobody watches what could forbid them.
pub(super) const LIFE_BETWEEN: Duration = Duration::from_secs(120);

/// How long they leave fast streams to the workers without being told again: some looks, so that
/// streams go on soon after weftd was killed.
const STREAMS_LIFE: Duration = Duration::from_secs(3);

/// How often the counts are looked at, and the programs' life is prolonged: as often as the prober
/// looks at the workers' marks while somebody is sent long packets, and else once a second.
const LOOK: Duration = Duration::from_millis(200);
const LOOK_IDLE: Duration = Duration::from_secs(1);

/// Everything is looked at again after this time, should an event have been lost, or sooner after a
/// failure.
const PERIOD: Duration = Duration::from_secs(30);

/// After a look at everything at least this time passes before what changes all the time in a large
/// network, routes and neighbours, causes the next one; and so many times as long as the look took.
const REST: Duration = Duration::from_millis(200);
const REST_FACTOR: u32 = 20;

/// How often the kernel is asked to find out whether a neighbour that is sent to is still there:
/// the programs do not count as use, and what is not used for a minute may be forgotten.
const USE: Duration = Duration::from_secs(10);

/// How long this node tells the others to go on without checksums while its device is made again:
/// the store is not to be written for that.
const ANNOUNCED: Duration = Duration::from_secs(60);

/// Longer packets are the workers'. The kernel makes room for headers in a packet of up to 16,064
/// bytes, or 15,616 as it was built (`BPF_SKB_MAX_LEN` in net/core/filter.c, by `MAX_SKB_FRAGS`);
/// the second step of that may fail where the first did not, and the packet would be lost.
const PACKET_BYTES_MAX: u16 = 15_000;

/// What the kernel plane learns from the rest of the backend.
pub(super) struct Inputs {
    pub(super) owner: Owner,
    pub(super) subnet: Option<Prefix>,
    /// If it has one, and the kernel's programs can carry that family.
    pub(super) subnet_v6: Option<Prefix<Ipv6Addr>>,
    pub(super) routes: Published,
    /// Changes when another table was published.
    pub(super) tables: watch::Receiver<()>,
    pub(super) ground: watch::Receiver<Option<Ground>>,
    pub(super) unmeasured: watch::Receiver<Unmeasured>,
    /// What this node publishes.
    pub(super) attributes: watch::Sender<LeaseAttributes>,
    /// What the programs count.
    pub(super) taken: Arc<Taken>,
    /// Whether workers send from ports of their own, and share out what peers send from theirs.
    pub(super) has_sources: bool,
    /// Whether the programs outlive weftd.
    pub(super) is_kept: bool,
}

pub(super) struct KernelPlane {
    inputs: Inputs,
    fast_path: Option<FastPath>,
    entries: Entries,
    /// How each peer's address is reached, as far as it was asked for since routes changed.
    hops: Hops,
    /// Neighbours that were sent to since the kernel was last asked about them.
    used: BTreeSet<Ipv4Addr>,
    used_until: Instant,
    placement: Placement,
    /// What the programs go by while they take packets.
    published: Option<Settings>,
    pub(super) state: watch::Sender<status::FastPath>,
    off_since: Instant,
}

impl KernelPlane {
    /// Of programs that take nothing yet, or without any, for the reason given.
    pub(super) fn new(fast_path: Result<FastPath, status::FastPath>, inputs: Inputs) -> Self {
        let (fast_path, state) = match fast_path {
            Ok(fast_path) => (Some(fast_path), off("starting", "starting".to_owned())),
            Err(off) => (None, off),
        };
        Self {
            entries: Entries::new(Arc::clone(&inputs.taken)),
            inputs,
            fast_path,
            hops: Hops::new(),
            used: BTreeSet::new(),
            used_until: Instant::now() + USE,
            placement: Placement::default(),
            published: None,
            state: watch::Sender::new(state),
            off_since: Instant::now(),
        }
    }

    /// Has the programs end with weftd.
    pub(super) fn let_go(&mut self) {
        self.inputs.is_kept = false;
    }

    /// Follows the table and the host for ever.
    pub(super) async fn run(&mut self) -> Infallible {
        // Programs that an earlier weftd has left know the peers; nobody else does before that.
        if self.inputs.tables.changed().await.is_err() {
            return std::future::pending().await;
        }
        if self.fast_path.is_none() {
            let ground = self.inputs.ground.borrow().clone();
            if let Some(ground) = ground
                && let Err(error) = placement::clear(self.inputs.owner, &ground).await
            {
                let text = with_causes(&error);
                warn!("an earlier weftd's programs may take packets of this one: {text}");
            }
            return std::future::pending().await;
        }
        loop {
            let Err(error) = self.follow().await;
            self.stop(&Obstacle::Netlink(error));
            tokio::time::sleep(LOOK_IDLE).await;
        }
    }

    /// Ends when the kernel's events are lost.
    async fn follow(&mut self) -> Result<Infallible, NetlinkError> {
        // Subscribed before the first look, or a change between them is lost.
        let (mut events, mut neighbours) = (Events::of_ways()?, Events::of_neighbours()?);
        let mut policies = Events::of_policies()?;
        self.hops.clear();
        // Apart from what else causes a look, which may come all the time.
        let mut hops_due = Instant::now() + PERIOD;
        let mut counts_due = Instant::now();
        loop {
            let start = Instant::now();
            if start >= hops_due {
                self.hops.clear();
                hops_due = start + PERIOD;
            }
            let due = match self.look().await {
                Ok(()) => hops_due,
                Err(obstacle) => {
                    self.stop(&obstacle);
                    self.displace().await;
                    Instant::now() + LOOK_IDLE
                }
            };
            let rest = Instant::now() + REST.max(start.elapsed() * REST_FACTOR);
            loop {
                let rested = async |events: &mut Events| {
                    sleep_until(rest).await;
                    events.changed().await
                };
                tokio::select! {
                    result = policies.changed_at_once() => {
                        result?;
                        // At once, and asked afterwards: a packet that a new policy wants encrypted
                        // must not leave as it is.
                        self.pause();
                        break;
                    }
                    Ok(()) = self.inputs.ground.changed() => {
                        if self.inputs.ground.borrow_and_update().is_none() {
                            self.pause();
                            self.placement.attached = None;
                        }
                        self.hops.clear();
                        break;
                    }
                    Ok(()) = self.inputs.tables.changed() => break,
                    Ok(()) = self.inputs.unmeasured.changed() => break,
                    result = rested(&mut events) => {
                        result?;
                        self.hops.clear();
                        break;
                    }
                    result = rested(&mut neighbours) => break result?,
                    () = sleep_until(counts_due) => {
                        counts_due = Instant::now() + self.look_at_counts();
                        self.use_neighbours().await;
                        if self.is_delivery_new() || !self.placement.is_there().await? {
                            break;
                        }
                    }
                    () = sleep_until(due) => break,
                }
            }
        }
    }

    /// Looks at everything that counts, and has the programs run if nothing forbids it.
    async fn look(&mut self) -> Result<(), Obstacle> {
        let ground = self.inputs.ground.borrow_and_update().clone().ok_or(Obstacle::NoGround)?;
        self.inputs.tables.borrow_and_update();
        let devices = (ground.tun_device, ground.underlay_device);
        let is_moved =
            |settings: &Settings| (settings.tun_device, settings.underlay_device) != devices;
        if self.published.as_ref().is_some_and(is_moved) {
            self.pause();
        }
        // There are none where hosts have no IPv4.
        let own = self.fast_path.as_ref().zip(self.inputs.subnet);
        let (Some((fast_path, subnet)), SocketAddr::V4(underlay)) = (own, ground.underlay) else {
            return Ok(());
        };
        let Inputs { owner, is_kept, .. } = self.inputs;
        let attacher = Attacher { fast_path, owner, is_kept };
        self.placement.check(&ground).await?;
        if has_policies().await? {
            return Err(Obstacle::Policies);
        }
        let mac = hardware_address(&ground).await?;
        let unmeasured = self.inputs.unmeasured.borrow_and_update().clone();
        let unmeasured = unmeasured.ok_or(Obstacle::Unmeasured)?;
        let table = self.inputs.routes.table.load();
        if table.peers().len() > PEERS_MAX as usize {
            return Err(Obstacle::Peers);
        }
        hops::find(&mut self.hops, &table, ground.underlay).await?;
        let neighbours = neighbours::hardware_addresses(ground.underlay_device).await?;
        let (masks, masks_v6) = masks(&table)?;
        // Of more than the programs know, IPv6 is the workers'.
        let subnet_v6 = self.inputs.subnet_v6.filter(|_| masks_v6.len() <= LENGTHS_MAX);
        let maps = &fast_path.maps;
        let mut settings = Settings {
            until_ns: 0,
            streams_until_ns: 0,
            subnet,
            underlay_address: *underlay.ip(),
            port: underlay.port(),
            mtu_bytes: ground.mtu_bytes.min(PACKET_BYTES_MAX),
            masks,
            underlay_device: ground.underlay_device,
            hardware_address: mac.0,
            tun_device: ground.tun_device,
            gro_device: 0,
            subnet_v6,
            masks_v6,
        };
        if self.published.is_none() {
            // The program behind the pair goes by them as soon as it is there.
            maps.publish(&settings)?;
        }
        self.placement.settle_pair(attacher, &ground.tun_name).await?;
        settings.gro_device = self.placement.gro_device();
        // Again, since all this took its time.
        if has_policies().await? {
            return Err(Obstacle::Policies);
        }
        (settings.until_ns, settings.streams_until_ns) = (until_ns(LIFE), until_ns(STREAMS_LIFE));
        let may_send_to = |peer: &Peer| !unmeasured.contains(&peer.address);
        self.entries.publish(maps, &table, &settings, &self.hops, &neighbours, may_send_to)?;
        maps.publish(&settings)?;
        self.published = Some(settings);
        // After all that they go by is there: those that an earlier weftd has left carry packets
        // until these do.
        self.placement.attach(attacher, &ground).await?;
        self.report_on(table.peers().len());
        Ok(())
    }

    /// Has programs that take nothing in the place of those that an earlier weftd may have left.
    async fn displace(&mut self) {
        let ground = self.inputs.ground.borrow().clone();
        if let (Some(fast_path), Some(ground)) = (&self.fast_path, ground) {
            let Inputs { owner, is_kept, .. } = self.inputs;
            let attacher = Attacher { fast_path, owner, is_kept };
            // What fails is tried again with the next look.
            self.placement.attach(attacher, &ground).await.ok();
        }
    }

    fn report_on(&mut self, peers: usize) {
        let carried = self.entries.sent_to();
        let now = status::FastPath { on: true, peers: Some(carried), ..Default::default() };
        let before = self.state.send_replace(now);
        self.announce(true);
        let text = format!(
            "the kernel carries the packets to {carried} of {peers} peers, workers the rest"
        );
        // Peers that are not used come and go.
        match (before.on, before.peers == Some(carried)) {
            (true, true) => {}
            (true, false) => debug!("{text}"),
            (false, _) => info!("{text}"),
        }
    }

    /// Reports that the workers carry everything, and has them do so.
    fn stop(&mut self, obstacle: &Obstacle) {
        self.pause();
        let reason = with_causes(obstacle);
        let now = off(obstacle.word(), reason.clone());
        let before = self.state.send_replace(now.clone());
        if !matches!(obstacle, Obstacle::NoGround) {
            self.announce(false);
        }
        if before != now {
            if before.on {
                self.off_since = Instant::now();
            }
            warn!("workers carry all packets, without the kernel's fast path: {reason}");
        }
    }

    /// Has the programs take no packet, at once.
    fn pause(&mut self) {
        let (Some(fast_path), Some(settings)) = (&self.fast_path, self.published.take()) else {
            return;
        };
        if fast_path.maps.publish(&Settings { until_ns: 0, ..settings }).is_err() {
            // They cannot be told, so they have to go.
            self.placement.attached = None;
        }
    }

    /// Says to the other nodes whether they may leave the checksum out.
    fn announce(&self, is_on: bool) {
        self.inputs.attributes.send_if_modified(|attributes| {
            let data = announcement(is_on, self.inputs.has_sources);
            std::mem::replace(&mut attributes.backend_data, data) != attributes.backend_data
        });
    }

    /// Prolongs the programs' life and passes on what their counts say; returns when to look again.
    fn look_at_counts(&mut self) -> Duration {
        if let (Some(fast_path), Some(settings)) = (&self.fast_path, &mut self.published) {
            settings.until_ns = until_ns(LIFE);
            settings.streams_until_ns = until_ns(STREAMS_LIFE);
            // It was accepted before, and what fails now ends by itself.
            fast_path.maps.publish(settings).ok();
        } else if self.off_since.elapsed() >= ANNOUNCED {
            self.announce(false);
        }
        let table = self.inputs.routes.table.load();
        let (mut is_active, mut heard) = (false, HostSet::new());
        for (subnet, peer, [before, now]) in self.inputs.taken.news() {
            let long_packets = now.long_packets_received - before.long_packets_received;
            let buffers = now.buffers_received - before.buffers_received;
            self.placement.delivery.add(long_packets, buffers, Instant::now());
            if now.packets_sent != before.packets_sent
                && let Some(Some((_, hop))) =
                    Ipv4Addr::of(peer.ip()).and_then(|peer| self.hops.get(&peer))
            {
                self.used.insert(*hop);
            }
            if now.long_packets_sent != before.long_packets_sent {
                is_active = true;
                lock(&self.inputs.taken.long_sends).insert(table.host_key(peer.ip()));
            }
            if now.packets_received == before.packets_received {
                continue;
            }
            heard.insert(table.host_key(peer.ip()));
            let known = table.owner(subnet.first_address());
            let known = known.filter(|known| known.address == peer);
            if let Some(known) = known {
                known.source_proven.store(true, Ordering::Relaxed);
            }
        }
        if *self.inputs.routes.heard.load() != heard {
            self.inputs.routes.heard.publish(heard);
        }
        if is_active { LOOK } else { LOOK_IDLE }
    }

    /// Whether the interface delivers otherwise than the programs were told.
    fn is_delivery_new(&self) -> bool {
        let published = self.published.as_ref();
        published
            .is_some_and(|settings| (settings.gro_device != 0) != self.placement.delivery.is_single)
    }

    /// Has the kernel look after the neighbours that were sent to.
    async fn use_neighbours(&mut self) {
        let now = Instant::now();
        let Some(settings) = self.published.as_ref().filter(|_| now >= self.used_until) else {
            return;
        };
        self.used_until = now + USE;
        let device = settings.underlay_device;
        let ask = async |address| neighbours::use_neighbour(device, IpAddr::V4(address)).await;
        // One that fails is noticed when the kernel forgets the neighbour.
        request_all(std::mem::take(&mut self.used), ask).await;
    }
}

impl Drop for KernelPlane {
    fn drop(&mut self) {
        if !self.inputs.is_kept {
            return;
        }
        if let (Some(fast_path), Some(settings)) = (&self.fast_path, &mut self.published) {
            settings.until_ns = until_ns(LIFE_BETWEEN);
            settings.streams_until_ns = 0;
            // What fails now ends a little earlier.
            fast_path.maps.publish(settings).ok();
        }
        self.placement.leave();
    }
}

/// Those of the peers' subnets of each family, the longest first; no more of IPv4 than the programs
/// know.
fn masks(table: &Table) -> Result<(Vec<u32>, Vec<u128>), Obstacle> {
    let subnets = || table.peers().iter().map(|peer| peer.subnets);
    let v4: BTreeSet<_> = subnets().filter_map(|it| Some(it.v4()?.mask())).collect();
    let v6: BTreeSet<_> = subnets().filter_map(|it| Some(it.v6()?.mask())).collect();
    if v4.len() > LENGTHS_MAX {
        return Err(Obstacle::Lengths);
    }
    Ok((v4.into_iter().rev().collect(), v6.into_iter().rev().collect()))
}

/// That of the interface which carries the tunnel, if the programs can send by it.
async fn hardware_address(ground: &Ground) -> Result<MacAddress, Obstacle> {
    let interface = || ground.interface.clone();
    let link = netlink::link_named(&ground.interface).await?;
    let link = link.filter(|link| link.id.index == ground.underlay_device);
    let link = link.ok_or_else(|| Obstacle::NoInterface(interface()))?;
    let mac = link.mac.filter(|_| !link.is_loopback);
    let mac = mac.ok_or_else(|| Obstacle::NotEthernet(interface()))?;
    if link.is_bridge { Err(Obstacle::Bridge(interface())) } else { Ok(mac) }
}

/// When the programs end unless they are told again.
fn until_ns(life: Duration) -> u64 {
    u64::try_from((boot_time() + life).as_nanos()).unwrap_or(u64::MAX)
}

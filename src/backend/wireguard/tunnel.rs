//! One device: its addresses and routes, and its peers, made what the leases ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tracing::{info, warn};

use crate::backend::closure;
use crate::backend::family::CarriedFamily;
use crate::backend::setup::Setup;
use crate::backend::status::Unusable;
use crate::config::network::WireguardBackendConfig;
use crate::control::clock;
use crate::control::lease::Lease;
use crate::host::follower::HostFollower;
use crate::host::listing::Listing;
use crate::host::netlink::wireguard::FoundDevice;
use crate::host::netlink::{NetlinkError, devices};
use crate::host::state::{LinkId, RouteSpec};
use crate::host::tables::edit::apply_all;
use crate::host::tables::{Desired, Device, Way};
use crate::route::{Prefix, Prefixes};
use crate::wireguard::difference::{PeerChange, PeerEdit, difference};
use crate::wireguard::keys::{PrivateKey, PublicKey};
use crate::wireguard::peer::PeerConfig;

use super::device::{WireguardDevice, WireguardError};
use super::peers::{Peer, carried, resolve};
use super::plan::{self, Plan};

/// What a comparison goes by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Goal<'a> {
    /// The leases of this backend; nothing before the first listing of them, when it is unknown
    /// which of the device's peers are stale.
    pub(super) leases: Option<&'a [&'a Lease]>,
    pub(super) settings: &'a WireguardBackendConfig,
    /// Whether what no lease asks for goes.
    pub(super) removes: bool,
}

/// What came of comparisons.
#[derive(Debug, Default)]
pub(super) struct Made {
    /// The peers that are set up, each with the index of its device.
    pub(super) peers: Vec<(Peer, u32)>,
    /// The leases whose peers could not be.
    pub(super) not_set_up: BTreeSet<Prefixes>,
    /// What somebody had changed.
    pub(super) repaired: Vec<String>,
    /// Why something is not as it must be.
    pub(super) refused: Vec<NetlinkError>,
    /// The leases that can't be used.
    pub(super) unusable: Unusable,
}

impl Made {
    /// Adds what came of another device.
    pub(super) fn join(&mut self, more: Self) {
        self.peers.extend(more.peers);
        self.not_set_up.extend(more.not_set_up);
        self.repaired.extend(more.repaired);
        self.refused.extend(more.refused);
        for (subnets, why) in more.unusable {
            let both = |all: &mut String| *all += &format!("; {why}");
            self.unusable.entry(subnets).and_modify(both).or_insert(why);
        }
    }
}

/// A device, and what it was told last.
#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) plan: Plan,
    device: WireguardDevice,
    key: PrivateKey,
    /// What of the own subnets goes by it.
    subnets: Option<Prefixes>,
    /// What of the whole overlay does, and of the one of the run before.
    networks: Option<Prefixes>,
    former_networks: Option<Prefixes>,
    /// Its index, once it was seen.
    index: Option<u32>,
    imposed_mtu_bytes: Option<u32>,
    /// The endpoints that leases named when it was told last.
    told: BTreeMap<PublicKey, SocketAddr>,
    /// The peers that it had then.
    set: Vec<PeerConfig>,
}

impl Tunnel {
    pub(super) fn new(setup: &Setup, plan: Plan, device: WireguardDevice, key: PrivateKey) -> Self {
        Self {
            plan,
            device,
            key,
            subnets: carried(setup.subnets, &plan),
            networks: carried(setup.networks, &plan),
            former_networks: setup.former_networks.and_then(|it| carried(it, &plan)),
            index: None,
            imposed_mtu_bytes: None,
            told: BTreeMap::new(),
            set: Vec::new(),
        }
    }

    /// The device in one line, for the log and the status.
    pub(super) fn describe(&self, mtu_bytes: u32) -> String {
        let Plan { name, port, .. } = self.plan;
        format!("{name} mtu {mtu_bytes}: WireGuard port {port} key {}", self.key.public())
    }

    /// Its own addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let v4 = self.subnets.and_then(Prefixes::v4).map(|subnet| subnet.network().into());
        let v6 = self.subnets.and_then(Prefixes::v6).map(|subnet| subnet.network().into());
        v4.into_iter().chain(v6)
    }

    /// Of which of `leases` it has to have a peer.
    pub(super) fn carried<'a>(
        &self,
        leases: impl Iterator<Item = &'a Lease>,
    ) -> impl Iterator<Item = Prefixes> {
        let plan = self.plan;
        leases.map(|lease| lease.subnets).filter(move |subnets| carried(*subnets, &plan).is_some())
    }

    /// Removes the device, for the end of a process.
    pub(super) fn remove_now(&self) {
        let Some(index) = self.index else { return };
        if let Err(error) = devices::remove_link_now(index) {
            warn!("cannot remove {}: {error}; run `weft cleanup`", self.plan.name);
        }
    }

    /// Makes sure of the device, then of the routes into it, so that nothing goes another way
    /// unencrypted, then of its peers.
    pub(super) async fn reconcile(
        &mut self,
        goal: Goal<'_>,
        host: &HostFollower,
        listing: &mut Listing,
    ) -> Result<Made, WireguardError> {
        let mut made = Made::default();
        let (name, external) = (self.plan.name, host.external());
        let mtu_bytes = plan::mtu_bytes(goal.settings, external);
        if let Some(networks) = self.networks {
            closure::close(networks).await?;
        }
        let (link, found, is_new) = self.device.ensure(&self.plan, &self.key, mtu_bytes).await?;
        let index = link.id.index;
        // Of those that are listed it may be another one, or none.
        if !listing.links.iter().any(|listed| listed.id.index == index && listed.is_up) {
            *listing = host.read().await?;
        }
        if is_new && self.index.is_some() {
            made.repaired.push(format!("{name} was deleted, or had failed; made again"));
        }
        if is_new {
            self.set.clear();
            self.imposed_mtu_bytes = None;
        }
        self.index = Some(index);
        let imposed = Some(mtu_bytes).filter(|_| self.imposed_mtu_bytes != Some(mtu_bytes));
        if let Some(networks) = self.networks {
            let (subnets, former) = (self.subnets, self.former_networks);
            let v4 = subnets.and_then(Prefixes::v4).zip(networks.v4());
            let v6 = subnets.and_then(Prefixes::v6).zip(networks.v6());
            let former_v4 = former.and_then(Prefixes::v4);
            let former_v6 = former.and_then(Prefixes::v6);
            place::<Ipv4Addr>(v4, former_v4, &link.id, imposed, listing, &mut made).await?;
            place::<Ipv6Addr>(v6, former_v6, &link.id, imposed, listing, &mut made).await?;
        }
        if let Some(from) = self.imposed_mtu_bytes.replace(mtu_bytes).filter(|it| *it != mtu_bytes)
        {
            let below = &external.name;
            info!("the MTU of {name} went from {from} to {mtu_bytes}: it follows that of {below}");
        }
        if let Some(leases) = goal.leases {
            let own = self.key.public();
            let leases = leases.iter().copied();
            let (peers, unusable) = resolve(leases, &self.plan, goal.settings, own, external);
            made.unusable = unusable;
            self.set_peers(peers, &found, goal.removes, index, &mut made).await;
        }
        Ok(made)
    }

    /// Gives the device its peers.
    async fn set_peers(
        &mut self,
        peers: Vec<Peer>,
        found: &FoundDevice,
        removes: bool,
        index: u32,
        made: &mut Made,
    ) {
        let name = self.plan.name;
        let wanted: Vec<_> = peers.iter().map(|peer| peer.config.clone()).collect();
        let now_unix = clock::unix_seconds();
        let mut edits = difference(&wanted, &found.peers, &self.told, now_unix);
        edits.retain(|edit| removes || edit.change != PeerChange::Remove);
        for edit in edits.iter().filter(|edit| self.is_repair(edit, &wanted)) {
            let key = edit.public_key;
            made.repaired
                .push(format!("{name} lacked the peer {key} or a setting of it; set again"));
        }
        let refused = self.device.edit_peers(name, &edits).await;
        let failed: BTreeSet<_> = refused.iter().map(|(edit, _)| edit.public_key).collect();
        made.refused.extend(refused.into_iter().map(|(_, error)| error));
        let lacks = |peer: &&Peer| failed.contains(&peer.config.public_key);
        made.not_set_up.extend(peers.iter().filter(lacks).map(|peer| peer.subnets));
        let set = peers.into_iter().filter(|peer| !failed.contains(&peer.config.public_key));
        made.peers.extend(set.map(|peer| (peer, index)));
        let is_set = |peer: &PeerConfig| !failed.contains(&peer.public_key);
        self.set = wanted.into_iter().filter(is_set).collect();
        let endpoint = |peer: &PeerConfig| Some((peer.public_key, peer.endpoint?));
        self.told = self.set.iter().filter_map(endpoint).collect();
    }

    /// Whether it sets again what was set: an endpoint changes by itself.
    fn is_repair(&self, edit: &PeerEdit, wanted: &[PeerConfig]) -> bool {
        let is_its = |peer: &&PeerConfig| peer.public_key == edit.public_key;
        let before = self.set.iter().find(is_its);
        let PeerChange::Set { preshared_key, allowed, keepalive_seconds, .. } = &edit.change else {
            return false;
        };
        let is_more = preshared_key.is_some() || allowed.is_some() || keepalive_seconds.is_some();
        is_more && before.is_some() && before == wanted.iter().find(is_its)
    }
}

/// Gives the device the address of its `own` subnet and the route to the whole network, of one
/// family. `mtu_bytes` are imposed if they are given.
async fn place<A: CarriedFamily>(
    own: Option<(Prefix<A>, Prefix<A>)>,
    former: Option<Prefix<A>>,
    link: &LinkId,
    mtu_bytes: Option<u32>,
    listing: &Listing,
    made: &mut Made,
) -> Result<(), WireguardError> {
    let Some((subnet, network)) = own else { return Ok(()) };
    let route = RouteSpec::into_device(network, link.clone());
    let way = Way { route, entries: Vec::new(), yields: false };
    let device = Device {
        link: link.clone(),
        address: subnet.network(),
        mac: None,
        mtu_bytes,
        is_ours_alone: true,
    };
    let desired = Desired {
        device: Some(device),
        networks: std::iter::once(network).chain(former).collect(),
        ways: BTreeMap::from([(network, way)]),
    };
    // It has vanished: the kernel says so at once, and another comparison follows.
    let Some(diff) = desired.diff(&A::found(listing), &[]) else { return Ok(()) };
    for edit in &diff.device {
        edit.apply().await?;
    }
    let edits = [diff.sets, diff.removals].concat();
    made.refused.extend(apply_all(&edits).await.into_iter().filter_map(|(_, done)| done.err()));
    Ok(())
}

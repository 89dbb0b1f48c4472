//! The vxlan and host-gw backends: make the kernel's routes, neighbours and forwarding entries what
//! the leases ask for. The kernel carries the packets, and goes on without weftd.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use crate::backend::host_gw;
use crate::backend::setup::{Setup, SetupError, next_leases};
use crate::backend::status::{PeerHosts, Reporter};
use crate::backend::tables::{self, Actual, Step, TableDiff, Wanted};
use crate::backend::vxlan::{VxlanDevice, VxlanReserved};
use crate::backend_kind::BackendKind;
use crate::control::lease::Peers;
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::{Following, HostFollower, Listing};
use crate::host::netlink::{Netlink, NetlinkError, request_all};
use crate::host::state::{LinkEntry, LinkId, Route, RouteProtocol};
use crate::route::Prefix;

/// The longest time between two comparisons: flannel's for routes, whose changes the kernel
/// reports; the kernel reports no change of neighbours and forwarding entries.
const HOST_GW_PERIOD: Duration = Duration::from_secs(10);
const VXLAN_PERIOD: Duration = Duration::from_secs(30);

/// A running vxlan or host-gw backend.
pub struct KernelBackend {
    kind: BackendKind,
    host: HostFollower,
    /// Where our routes may lie.
    networks: Vec<Prefix>,
    control: Arc<ControlStatus>,
    pub(super) reporter: Reporter,
    /// `None` for host-gw.
    device: Option<VxlanDevice>,
    /// What the last comparison left in place.
    set: Wanted,
    logged: BTreeMap<&'static str, LogOnce>,
}

impl KernelBackend {
    /// Makes the VXLAN device, or takes over the one that an earlier run left. host-gw needs
    /// nothing before the first leases.
    pub(super) async fn start(
        setup: &Setup,
        vxlan: Option<VxlanReserved>,
    ) -> Result<Self, SetupError> {
        let period = if vxlan.is_some() { VXLAN_PERIOD } else { HOST_GW_PERIOD };
        let networks: Vec<_> = std::iter::once(setup.network).chain(setup.former_network).collect();
        // Whether a peer is reached without a router depends on routes to anywhere.
        let all_route_events = vxlan.as_ref().is_some_and(VxlanReserved::goes_by_routes);
        let following = setup.following(networks.clone(), period);
        let mut backend = Self {
            kind: if vxlan.is_some() { BackendKind::Vxlan } else { BackendKind::HostGw },
            host: HostFollower::new(Following { all_route_events, ..following })?,
            networks,
            control: Arc::clone(&setup.control),
            reporter: Reporter::new(String::new(), setup.external.mtu_bytes, setup),
            device: vxlan.map(|reserved| VxlanDevice::new(reserved, setup)),
            set: Wanted::new(),
            logged: BTreeMap::new(),
        };
        if let Some(device) = &mut backend.device {
            let listing = backend.host.list().await?;
            device.establish(&backend.host, &listing.addresses, &backend.reporter).await?;
        }
        info!("{}", backend.report_external());
        Ok(backend)
    }

    /// Follows the leases and repairs what breaks. Everything stays when this is dropped.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let mut peers = None;
        loop {
            let listing = tokio::select! {
                listing = self.host.next() => listing,
                changed = next_leases(&mut leases) => {
                    peers = Some(changed);
                    self.host.look_now();
                    continue;
                }
            };
            match self.reconcile(listing, peers.as_deref()).await {
                Ok(is_complete) => self.host.finish(is_complete),
                Err(error) => {
                    self.reporter.counters.failures.add(1);
                    self.host.fail(&error);
                }
            }
        }
    }

    /// Compares and edits; whether everything is in place. `peers` are missing before the first
    /// listing of leases, when it is unknown which of the kernel's entries are stale.
    async fn reconcile(
        &mut self,
        listing: Listing,
        peers: Option<&Peers>,
    ) -> Result<bool, NetlinkError> {
        if self.host.is_briefly_away() {
            return Ok(false);
        }
        let Listing { addresses, mut routes, .. } = listing;
        let device = match &mut self.device {
            None => None,
            Some(device) => {
                let found = device.establish(&self.host, &addresses, &self.reporter).await?;
                if found.is_new {
                    // With an old device its routes went as well.
                    routes = Listing::read(self.host.netlink(), &self.networks).await?.routes;
                }
                Some(found.link.id)
            }
        };
        self.report_external();
        let is_complete = match peers {
            None => true,
            Some(peers) => self.reconcile_peers(device.as_ref(), peers, routes).await?,
        };
        self.reporter.state(|state| (state.is_up, state.wrong) = (true, None));
        Ok(is_complete)
    }

    /// Reports the interface, and gives the backend in one line.
    fn report_external(&self) -> String {
        let external = self.host.external();
        let (description, mtu_bytes) = match &self.device {
            None => (host_gw::describe(external), external.mtu_bytes),
            Some(device) => (device.describe(external), device.mtu_bytes(external)),
        };
        self.reporter.follow(external, mtu_bytes);
        self.reporter.state(|state| {
            state.description.clone_from(&description);
            state.tunnel = self.device.as_ref().and_then(VxlanDevice::tunnel);
            state.device = self.device.as_ref().map(VxlanDevice::name);
        });
        description
    }

    async fn reconcile_peers(
        &mut self,
        device: Option<&LinkId>,
        peers: &Peers,
        routes: Vec<Route>,
    ) -> Result<bool, NetlinkError> {
        let leases = self.reporter.of_kind(peers, self.kind);
        let netlink = self.host.netlink();
        let (wanted, entries) = match (&self.device, device) {
            (Some(vxlan), Some(link)) => {
                let (wanted, unusable) = vxlan.wanted(netlink, leases, link).await;
                self.reporter.counters.unusable.set(unusable.len());
                let entries = netlink.entries(link).await?;
                if let Some(first) = unusable.first() {
                    let more = unusable.len() - 1;
                    self.log("unusable", &format!("ignored lease {first} (and {more} more)"));
                }
                (wanted, entries)
            }
            _ => (host_gw::wanted(leases, self.host.external()), Vec::new()),
        };
        let networks = self.networks.clone();
        let is_own = |route: &Route| {
            let is_into_device = device.is_some_and(|device| {
                route.next_hops.iter().any(|hop| hop.interface_index == device.index)
            });
            (is_into_device || route.protocol == RouteProtocol::WEFT)
                && networks.iter().any(|network| network.covers(route.destination))
        };
        let actual = Actual { entries: entries.into_iter().collect(), routes };
        let mut diff = tables::diff(&wanted, &actual, is_own);
        let failed = self.set(device, &diff.steps, &wanted, &actual).await;
        if device.is_none() {
            // A peer that moved to where no route leads must not get its packets at the old place.
            let old = actual.routes.iter().filter(|route| is_own(route));
            let old = old.filter(|route| failed.contains(&route.destination));
            diff.stale_routes.extend(old.filter_map(tables::removal));
        }
        let is_removed = self.remove(device, &diff).await;
        let is_complete = failed.is_empty() && is_removed;
        self.report(wanted, &failed);
        Ok(is_complete)
    }

    /// Gives peers what they lack. Returns those that could not be set up in full.
    async fn set(
        &mut self,
        device: Option<&LinkId>,
        steps: &[Step],
        wanted: &Wanted,
        actual: &Actual,
    ) -> BTreeSet<Prefix> {
        let netlink = self.host.netlink();
        let set_step = async |step| (step, set_one(netlink, device, step, actual).await);
        let results = request_all(steps, set_step).await;
        let (mut failed, mut errors, mut repaired) = (BTreeSet::new(), Vec::new(), Vec::new());
        for (step, result) in results {
            if let Err(error) = result {
                failed.insert(step.subnet);
                errors.push(error);
            } else if self.set.get(&step.subnet) == wanted.get(&step.subnet) {
                repaired.push(step);
            }
        }
        self.reporter.counters.repairs.add(repaired.len());
        if let Some(first) = repaired.first() {
            let (subnet, more) = (first.subnet, repaired.len() - 1);
            let what = if device.is_some() { "Entries and route" } else { "Route" };
            self.log("repaired", &format!("{what} recovered for {subnet} (and {more} more)"));
        }
        let advice = match device {
            Some(_) => "retrying".to_owned(),
            None => format!(
                "host-gw needs every host on the same link as {}; use a backend with a tunnel for \
                 others",
                self.host.external().name
            ),
        };
        self.refused("peer", &errors, &advice);
        failed
    }

    /// Removes what no peer asks for; whether all of it is gone. Not while the peers are from the
    /// cache, which may be older than what the kernel has.
    async fn remove(&mut self, device: Option<&LinkId>, diff: &TableDiff) -> bool {
        if self.control.read().cached_as_of_unix.is_some() {
            return true;
        }
        let netlink = self.host.netlink();
        let remove_route = async |route| netlink.remove_route(route).await;
        let mut results = request_all(&diff.stale_routes, remove_route).await;
        if let Some(device) = device {
            let remove_entry = async |entry: &LinkEntry| netlink.remove_entry(device, *entry).await;
            results.extend(request_all(&diff.stale_entries, remove_entry).await);
        }
        let errors = results.into_iter().filter_map(Result::err);
        let errors: Vec<_> = errors.filter(|error| !error.is_already_gone()).collect();
        self.refused("removal", &errors, "retrying");
        errors.is_empty()
    }

    fn report(&mut self, wanted: Wanted, failed: &BTreeSet<Prefix>) {
        self.set = wanted;
        self.set.retain(|subnet, _| !failed.contains(subnet));
        let counters = &self.reporter.counters;
        counters.failed.set(failed.len());
        counters.programmed.set(self.set.len());
        let hosts: PeerHosts =
            self.set.iter().map(|(subnet, peer)| (*subnet, peer.public_ip)).collect();
        self.reporter.hosts(hosts);
    }

    /// Counts and logs what the kernel refused.
    fn refused(&mut self, subject: &'static str, errors: &[NetlinkError], advice: &str) {
        self.reporter.counters.failures.add(errors.len());
        if let Some(first) = errors.first() {
            let more = match errors.len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            self.log(subject, &format!("{}{more}; {advice}", with_causes(first)));
        }
    }

    /// Logs something about `subject` when it is new, and once a minute while it lasts.
    fn log(&mut self, subject: &'static str, text: &str) {
        self.logged.entry(subject).or_default().once(text, |text| warn!("{text}"));
    }
}

/// Sets a peer's neighbour, forwarding entry and route, in this order. After a refusal the new
/// entries are removed again.
async fn set_one(
    netlink: &Netlink,
    device: Option<&LinkId>,
    step: &Step,
    actual: &Actual,
) -> Result<(), NetlinkError> {
    let entries =
        || device.into_iter().flat_map(|device| step.entries.iter().map(move |e| (device, *e)));
    let result = async {
        for (device, entry) in entries() {
            netlink.set_entry(device, entry).await?;
        }
        match &step.route {
            Some(route) => netlink.replace_route(route).await,
            None => Ok(()),
        }
    };
    let result = result.await;
    if result.is_err() {
        let is_new =
            |entry| !actual.entries.iter().any(|old| tables::key(*old) == tables::key(entry));
        for (device, entry) in entries().filter(|(_, entry)| is_new(*entry)) {
            // Best effort: the next comparison lists it.
            netlink.remove_entry(device, entry).await.ok();
        }
    }
    result
}

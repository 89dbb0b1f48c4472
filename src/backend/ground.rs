//! What backends that configure the kernel have in common: the loop of looking, comparing and
//! waiting, a connection to the kernel, its news, and the external interface as it is now.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::backend::address::NextAddress;
use crate::backend::network::{Settings, Setup, StartError};
use crate::backend::status::Teller;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::host::interface::ExternalInterface;
use crate::host::netlink::{Events, Netlink, NetlinkError};
use crate::host::state::{Address, Link, Route, RouteProtocol, RouteSpec};
use crate::host::underlay::carrier;
use crate::route::Prefix;

/// Requests to the kernel that are under way at once: enough that a thousand peers cost little
/// more than the kernel's own work, and few enough that their answers fit a socket's buffer of
/// 212,992 bytes many times over.
pub(super) const REQUESTS_MAX: usize = 64;

/// After each pass the backend rests this many times as long as the pass took before it looks at
/// news again, so that it never uses more than a fifth of a processor, but no longer than half a
/// second.
const REST_FACTOR: u32 = 4;
const REST_MAX: Duration = Duration::from_millis(500);

/// How often a lost address is looked for: whoever replaces it removes the old one first.
const AWAY: Duration = Duration::from_millis(300);

/// Pauses before what failed is tried again, doubled each time.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// A backend that compares what the leases ask for with what the kernel has.
pub(super) trait Grounded {
    /// Everything is compared this often even if the kernel reports no change.
    const RECHECK: Duration;

    fn ground(&mut self) -> &mut Ground;

    /// Compares and edits. `peers` are missing before the first listing, when nobody knows which
    /// of those that the kernel has are stale.
    async fn compare(&mut self, seen: Seen, peers: Option<&Peers>) -> Result<Pass, NetlinkError>;
}

/// Follows the leases and repairs what breaks. Everything stays when this is dropped.
pub(super) async fn follow<B: Grounded>(
    backend: &mut B,
    mut leases: watch::Receiver<Arc<Peers>>,
) -> Infallible {
    let mut is_listed = false;
    loop {
        let begun = Instant::now();
        let peers = {
            let listed = leases.borrow_and_update();
            is_listed |= listed.has_changed();
            Arc::clone(&listed)
        };
        let pass = match pass(backend, is_listed.then_some(&*peers)).await {
            Ok(pass) => pass,
            Err(error) => {
                backend.ground().fail(&error);
                Pass::Partly
            }
        };
        is_listed |= backend.ground().wait(&mut leases, begun.elapsed(), pass, B::RECHECK).await;
    }
}

async fn pass(backend: &mut impl Grounded, peers: Option<&Peers>) -> Result<Pass, NetlinkError> {
    let ground = backend.ground();
    let mut seen = ground.look().await?;
    if seen.external.is_none() && ground.look_for_address().await {
        seen = ground.look().await?;
    }
    if seen.external.is_none() {
        return Ok(Pass::Away);
    }
    backend.compare(seen, peers).await
}

/// The common part of such a backend.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) netlink: Netlink,
    events: Events,
    pub(super) external: ExternalInterface,
    next_address: NextAddress,
    /// Where our routes may lie.
    networks: Vec<Prefix>,
    /// Whether routes that lie elsewhere matter too.
    is_direct: bool,
    control: Arc<ControlStatus>,
    pub(super) teller: Teller,
    retry: Duration,
    told: BTreeMap<&'static str, LogOnce>,
}

/// What the kernel says, as far as every such backend asks.
#[derive(Debug)]
pub(super) struct Seen {
    /// The external interface; `None` while no link has its address.
    pub(super) external: Option<Link>,
    pub(super) addresses: Vec<Address>,
    pub(super) routes: Vec<Route>,
}

/// What a pass came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// Everything is in place.
    Whole,
    /// Something was refused.
    Partly,
    /// No link has the external interface's address.
    Away,
}

impl Pass {
    pub(super) fn is_whole_if(is_whole: bool) -> Self {
        if is_whole { Self::Whole } else { Self::Partly }
    }
}

impl Ground {
    pub(super) fn new(
        setup: &Setup,
        kind: &'static str,
        teller: Teller,
    ) -> Result<Self, StartError> {
        let failed = |source| StartError::Netlink { kind, source };
        // In this order: a change between listing and subscription would be lost.
        let networks: Vec<_> = std::iter::once(setup.network).chain(setup.former_network).collect();
        // Whether a peer is reached without a router depends on routes to anywhere.
        let is_direct = matches!(&setup.settings, Settings::Vxlan(vxlan) if vxlan.direct_routing);
        let events = listen(&networks, is_direct).map_err(failed)?;
        let netlink = Netlink::open().map_err(failed)?;
        Ok(Self {
            netlink,
            events,
            external: setup.external.clone(),
            next_address: NextAddress::new(&setup.interface, setup.follow_address),
            networks,
            is_direct,
            control: Arc::clone(&setup.control),
            teller,
            retry: RETRY.0,
            told: BTreeMap::new(),
        })
    }

    /// Whether a route leads to a subnet of this weftd's networks.
    pub(super) fn is_inside(networks: &[Prefix], route: &Route) -> bool {
        networks.iter().any(|network| network.covers(route.destination))
    }

    /// Whether a route was set by a weftd of this network, by its mark.
    pub(super) fn is_marked(networks: &[Prefix], route: &Route) -> bool {
        route.protocol == RouteProtocol::WEFT && Self::is_inside(networks, route)
    }

    /// Whether what no peer asks for may be removed. The cache of a start without the store may be
    /// older than what the kernel has: nobody knows yet which of that is stale.
    pub(super) fn may_remove(&self) -> bool {
        self.control.cached_as_of_unix().is_none()
    }

    pub(super) fn networks(&self) -> &[Prefix] {
        &self.networks
    }

    /// The routes that lie where ours may.
    pub(super) async fn routes(&self) -> Result<Vec<Route>, NetlinkError> {
        let is_inside = |to| self.networks.iter().any(|network| network.covers(to));
        Netlink::routes_to(is_inside).await
    }

    /// Lists what the kernel has. An external interface that was renamed, made again or given
    /// another MTU is known by its address.
    pub(super) async fn look(&mut self) -> Result<Seen, NetlinkError> {
        let links = self.netlink.links().await?;
        let addresses = self.netlink.addresses().await?;
        let routes = self.routes().await?;
        let ExternalInterface { address, name, .. } = &self.external;
        let link = carrier(*address, name, &links, &addresses).cloned();
        if let Some(link) = &link {
            self.external.name.clone_from(&link.id.name);
            self.external.index = link.id.index;
            self.external.mtu_bytes = link.mtu_bytes;
        }
        Ok(Seen { external: link, addresses, routes })
    }

    /// The external interface has lost its address: takes its next one, if it has one. Gives
    /// whether the backend has to be set up for another address.
    async fn look_for_address(&mut self) -> bool {
        let Some(found) = self.next_address.look(&self.netlink, &self.external).await else {
            return false;
        };
        self.teller.moved(&self.external, &found);
        self.external = found;
        true
    }

    /// Waits until there is something to do: other leases, news of the kernel, or `period` over.
    /// `took` is how long the last pass took. Gives whether it was the leases.
    async fn wait(
        &mut self,
        leases: &mut watch::Receiver<Arc<Peers>>,
        took: Duration,
        pass: Pass,
        period: Duration,
    ) -> bool {
        let pause = match pass {
            Pass::Whole => period,
            Pass::Partly => self.retry,
            Pass::Away => AWAY,
        };
        self.retry = if pass == Pass::Partly { (self.retry * 2).min(RETRY.1) } else { RETRY.0 };
        let events = &mut self.events;
        let news = async {
            sleep((took * REST_FACTOR).min(REST_MAX)).await;
            events.changed().await
        };
        let lost = tokio::select! {
            changed = leases.changed() => {
                if changed.is_err() {
                    // The control plane has ended; everything stays as it is.
                    std::future::pending::<()>().await;
                }
                return true;
            }
            result = news => result.err(),
            () = sleep(pause) => None,
        };
        if let Some(error) = lost {
            self.reopen(&error);
        }
        false
    }

    /// Goes on over another connection to the kernel, if one can be had.
    fn reopen(&mut self, error: &NetlinkError) {
        let text = format!("lost touch with the kernel, opening it again: {}", with_causes(error));
        self.tell("connection", text);
        let events = listen(&self.networks, self.is_direct);
        let reopened = events.and_then(|events| Ok((events, Netlink::open()?)));
        match reopened {
            Ok((events, netlink)) => (self.events, self.netlink) = (events, netlink),
            Err(error) => {
                warn!("cannot open the kernel's network state again: {}", with_causes(&error))
            }
        }
    }

    /// Tells of a pass that could not even look.
    fn fail(&mut self, error: &NetlinkError) {
        self.teller.counters.failures.add(1);
        if error.is_connection_lost() {
            self.reopen(error);
        } else {
            self.tell("pass", format!("{}; trying again", with_causes(error)));
        }
    }

    /// Logs a complaint about `subject` when it is new, and once a minute while it lasts.
    pub(super) fn tell(&mut self, subject: &'static str, text: String) {
        self.told.entry(subject).or_default().once(&text, |text| warn!("{text}"));
    }

    /// Removes routes of ours. Gives how many could not be removed.
    pub(super) async fn remove_routes(&mut self, routes: &[RouteSpec]) -> usize {
        let netlink = &self.netlink;
        let results = stream::iter(routes).map(async |route| {
            netlink.remove_route(route).await.err().filter(|error| !error.is_already_gone())
        });
        let failed: Vec<_> =
            results.buffer_unordered(REQUESTS_MAX).filter_map(async |error| error).collect().await;
        self.refused("removal", &failed)
    }

    /// Counts and tells of what the kernel refused.
    pub(super) fn refused(&mut self, subject: &'static str, errors: &[NetlinkError]) -> usize {
        self.teller.counters.failures.add(errors.len());
        if let Some(first) = errors.first() {
            let more = errors.len() - 1;
            let text = with_causes(first);
            let more = if more == 0 { String::new() } else { format!(" (and {more} more)") };
            self.tell(subject, format!("{text}{more}; trying again"));
        }
        errors.len()
    }
}

fn listen(networks: &[Prefix], is_direct: bool) -> Result<Events, NetlinkError> {
    let events = Netlink::events()?;
    Ok(if is_direct { events } else { events.only_about(networks) })
}

/// The peers of one backend type among all; counts the others, and says once how many.
pub(super) fn of_type<'a>(
    peers: &'a Peers,
    backend_type: &'static str,
    teller: &Teller,
) -> impl Iterator<Item = &'a Lease> {
    let is_ours = move |attributes: &LeaseAttributes| attributes.backend_type == backend_type;
    let ignored = peers.values().filter(|lease| !is_ours(&lease.attributes)).count();
    if teller.counters.ignored.get() != ignored as u64 {
        info!("Ignoring {ignored} leases of nodes with another backend than {backend_type}");
    }
    teller.counters.ignored.set(ignored);
    peers.values().filter(move |lease| is_ours(&lease.attributes))
}

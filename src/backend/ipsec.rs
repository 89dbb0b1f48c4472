//! The ipsec backend: its lease; the connections that charon must have, one for each peer; and the
//! kernel's policies, or what stands in for them where charon encrypts the packets itself. All of
//! it goes on without weftd.

pub mod charon;
mod client;
mod connections;
mod session;
pub mod vici;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::backend::closure;
use crate::backend::error::{StartError, StartResult};
use crate::backend::family::CarriedFamily;
use crate::backend::setup::{Setup, addresses, check_room};
use crate::backend::status::{PeerHosts, Reporter, Unusable};
use crate::backend_kind::BackendKind;
use crate::config::network::IpsecBackendConfig;
use crate::control::changes::next_value;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::netlink::tunnel_policies::{self, Selector};
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::Address;
use crate::route::Prefix;
use crate::status::IpsecPeer;

use self::charon::CharonError;
use self::client::{Client, ViciError};
use self::connections::{Connection, End, EspPlane};
use self::session::{Connections, Outcome, Session};

const KIND: BackendKind = BackendKind::Ipsec;

/// The longest time between two comparisons: neither charon nor the kernel reports all changes.
const PERIOD: Duration = Duration::from_secs(10);

/// Of a peer with keys whose packets do not reach charon, which encrypts them.
const UNROUTED: &str = "charon has keys for it, but packets for it do not reach charon: the route \
                        in table 220, or the rule to look there (`ip rule`), is gone, as after \
                        the end of a second charon on this host; restart charon";

/// Of a host without pods.
const NO_ADDRESS: &str = "charon, which encrypts packets itself here, takes no keys for them \
                          before an interface of this host has an address of its subnet: the \
                          bridge of its first pod, as a rule";

/// The MTU of charon's own device, `ipsec0`: TUN_DEFAULT_MTU of strongSwan's tun_device.c, which
/// nothing sets.
const CHARON_MTU_BYTES: u32 = 1400;

/// Of a charon that weftd has started, and can't once more, without the rights of the start.
const KEEPER_GONE: &str = "; its process weft-charon starts it again, but if that is gone too \
                           (`pgrep weft-charon`), restart weftd, which starts both";

/// What a start has got.
#[derive(Debug)]
pub(super) struct IpsecReserved {
    settings: IpsecBackendConfig,
    session: Session,
    is_charon_ours: bool,
}

/// Finds charon, or starts it: what a host lacks is known before anything is leased.
pub(super) async fn prepare(
    settings: &IpsecBackendConfig,
    external: &ExternalInterface,
) -> StartResult<(LeaseAttributes, IpsecReserved)> {
    check_room::<Ipv4Addr>(None, external, settings.overhead_bytes())?;
    let session = charon::find_or_start().await?;
    let IpsecBackendConfig { is_in_udp, esp_proposal, .. } = settings;
    info!("IPSec config: UDPEncap={is_in_udp} ESPProposal={esp_proposal}");
    let is_charon_ours = charon::is_ours();
    let reserved = IpsecReserved { settings: settings.clone(), session, is_charon_ours };
    Ok((addresses(KIND, external), reserved))
}

fn mtu_bytes(settings: &IpsecBackendConfig, plane: EspPlane, external: &ExternalInterface) -> u32 {
    let of_link = external.mtu_bytes.saturating_sub(settings.overhead_bytes());
    if plane == EspPlane::Charon { of_link.min(CHARON_MTU_BYTES) } else { of_link }
}

/// Removes what takes the packets of these networks to another backend's peers, and ends charon if
/// it is ours and has no other connection. Gives what was there.
pub async fn remove_leftovers(networks: &[Prefix]) -> StartResult<Vec<String>> {
    let mut removed = Vec::new();
    if let Ok(client) = Client::connect().await {
        let mut session = Session::new(client).await.map_err(CharonError::from)?;
        let (names, others) = session.clear(networks).await.map_err(CharonError::from)?;
        removed.extend(names.into_iter().map(|name| format!("the IPsec connection {name}")));
        drop(session);
        if others == 0 && charon::end_ours().await? {
            removed.push("charon".to_owned());
        }
    } else if charon::end_ours().await? {
        // It runs without its socket, which somebody has removed, or another charon has taken.
        removed.push("charon".to_owned());
    }
    for selector in policies(networks).await?.keys() {
        tunnel_policies::remove(selector).await?;
        removed
            .push(format!("the IPsec policy of {} to {}", selector.source, selector.destination));
    }
    Ok(removed)
}

async fn policies(networks: &[Prefix]) -> Result<BTreeMap<Selector, [Ipv4Addr; 2]>, NetlinkError> {
    let mut found = tunnel_policies::list().await?;
    let is_inside = |it: Prefix| networks.iter().any(|network| network.covers(it));
    found.retain(|it, _| is_inside(it.source) && is_inside(it.destination));
    Ok(found)
}

/// A running backend.
pub struct IpsecBackend {
    settings: IpsecBackendConfig,
    networks: Vec<Prefix>,
    subnet: Prefix,
    host: HostFollower,
    /// Nothing while charon is away.
    session: Option<Session>,
    is_charon_ours: bool,
    plane: EspPlane,
    version: String,
    control: Arc<ControlStatus>,
    pub(super) reporter: Reporter,
    logged: BTreeMap<&'static str, LogOnce>,
}

impl IpsecBackend {
    /// Goes on with charon.
    pub(super) async fn start(setup: &Setup, reserved: IpsecReserved) -> StartResult<Self> {
        let IpsecReserved { settings, session, is_charon_ours } = reserved;
        let networks = setup.networks_v4();
        let backend = Self {
            settings,
            subnet: setup.subnets.v4().ok_or(StartError::NoSubnet)?,
            host: HostFollower::new(setup.following(networks.clone(), PERIOD))?,
            networks,
            plane: session.plane,
            version: session.version.clone(),
            session: Some(session),
            is_charon_ours,
            control: Arc::clone(&setup.control),
            reporter: Reporter::new(setup),
            logged: BTreeMap::new(),
        };
        backend.set_policies(None, false).await?;
        info!("{}", backend.report_external());
        Ok(backend)
    }

    /// Follows the leases and repairs what breaks. Everything stays when this is dropped.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let (mut peers, mut has_news) = (None, false);
        loop {
            // It is there until the next comparison, which must not be kept from its end.
            let session = self.session.as_ref().filter(|_| !has_news);
            let news = OptionFuture::from(session.map(Session::news));
            tokio::select! {
                _ = self.host.next() => {}
                Some(()) = news => {
                    has_news = true;
                    self.host.look_now();
                    continue;
                }
                changed = next_value(&mut leases) => {
                    peers = Some(changed);
                    self.host.look_now();
                    continue;
                }
            }
            let is_complete = self.reconcile(peers.as_deref()).await;
            has_news = false;
            self.host.finish(is_complete);
        }
    }

    /// Compares and edits; whether everything is in place. `peers` are missing before the first
    /// listing of leases.
    async fn reconcile(&mut self, peers: Option<&Peers>) -> bool {
        if self.host.is_briefly_away() {
            return false;
        }
        // Not while the peers are from the cache, which may be older than what is there.
        let removes = peers.is_some() && self.control.read().cached_as_of_unix.is_none();
        let leases: Vec<_> =
            peers.into_iter().flat_map(|peers| self.reporter.of_kind(peers, KIND)).collect();
        let wanted = self.wanted(&leases);
        let listed = peers.map(|_| &wanted);
        let set = self.set_policies(listed, removes).await;
        let charon = self.have_loaded(listed, removes).await;
        self.report_external();
        let failures = [
            set.as_ref().err().map(|error| with_causes(error)),
            charon.as_ref().err().map(|error| self.told(error)),
        ];
        let failures: Vec<_> = failures.into_iter().flatten().collect();
        if let Some(first) = failures.first() {
            self.reporter.count(|done| done.failures += 1);
            self.log("failed", &format!("{first}; retrying"));
        } else {
            self.logged.remove("failed");
        }
        let lost = self.host.lost_address().cloned();
        // The kernel goes on with the keys that it has.
        let is_up = charon.is_ok() || self.plane == EspPlane::Kernel;
        let wrong = lost.or_else(|| failures.first().cloned());
        self.reporter.state(|state| (state.is_up, state.wrong) = (is_up, wrong));
        let outcome = charon.ok();
        let is_refused = outcome.as_ref().is_some_and(|it| !it.refused.is_empty());
        let is_complete = failures.is_empty() && !is_refused;
        if peers.is_some() {
            self.follow_peers(&leases, &wanted, outcome.as_ref()).await;
        }
        is_complete
    }

    /// The connections to the nodes with these leases.
    fn wanted(&mut self, leases: &[&Lease]) -> Connections {
        let Some(own) = self.host.external().v4() else { return Connections::new() };
        let (public_address, address) = (own.public_address, own.address);
        let own = End { public_address, address, subnet: self.subnet };
        let peers = leases.iter().filter_map(|lease| Ipv4Addr::peer(lease));
        let wanted = peers.map(|(subnet, address)| {
            let peer = End { public_address: address, address, subnet };
            let connection = Connection { own, peer };
            (connection.name(), connection)
        });
        wanted.collect()
    }

    /// Makes the kernel's policies those of the `wanted` connections; where charon encrypts, there
    /// are none, and nothing leaves for the network but by charon's own routes.
    async fn set_policies(
        &self,
        wanted: Option<&Connections>,
        removes: bool,
    ) -> Result<(), NetlinkError> {
        let network = self.networks.first().copied();
        let mut found = policies(&self.networks).await?;
        match (self.plane, network) {
            (EspPlane::Charon, Some(network)) => {
                closure::close(network.into()).await?;
            }
            (EspPlane::Charon, None) => {}
            (EspPlane::Kernel, _) => {
                for network in &self.networks {
                    closure::open((*network).into()).await?;
                }
                let all = wanted.into_iter().flatten();
                for (selector, ends) in all.flat_map(|(_, connection)| connection.policies()) {
                    if found.remove(&selector) != Some(ends) {
                        tunnel_policies::set(&(selector, ends)).await?;
                    }
                }
            }
        }
        let stale = found.keys().filter(|_| removes || self.plane == EspPlane::Charon);
        for selector in stale {
            tunnel_policies::remove(selector).await?;
        }
        Ok(())
    }

    /// Has charon load what is `wanted`, and connects to it if it was away.
    async fn have_loaded(
        &mut self,
        wanted: Option<&Connections>,
        removes: bool,
    ) -> Result<Outcome, ViciError> {
        let mut session = match self.session.take() {
            Some(session) => session,
            None => Session::new(Client::connect().await?).await?,
        };
        if session.plane != self.plane {
            let (before, now) = (self.plane, session.plane);
            warn!("ESP was carried by {before} and is by {now}, as the charon of now has it");
            self.plane = session.plane;
            self.host.look_now();
        }
        self.version.clone_from(&session.version);
        let Some(wanted) = wanted else {
            self.session = Some(session);
            return Ok(Outcome::default());
        };
        let outcome = session.reconcile(wanted, &self.networks, removes, &self.settings).await?;
        self.session = Some(session);
        self.reporter.count(|done| done.repairs += outcome.repaired as u64);
        Ok(outcome)
    }

    /// Reports the peers as they are now; without an `outcome`, as charon did not answer, nobody
    /// knows what is agreed on with them.
    async fn follow_peers(
        &mut self,
        leases: &[&Lease],
        wanted: &Connections,
        outcome: Option<&Outcome>,
    ) {
        let names: BTreeMap<_, _> =
            wanted.iter().map(|(name, connection)| (connection.peer.subnet, name)).collect();
        let (mut hosts, mut known, mut unusable) =
            (PeerHosts::new(), BTreeMap::new(), Unusable::new());
        let (mut lacking, mut unreachable) = (BTreeSet::new(), 0);
        let addresses = netlink::addresses().await.ok();
        for lease in leases {
            let Some((subnet, host)) = Ipv4Addr::peer(lease) else {
                unusable.extend(Ipv4Addr::without_host(lease).map(|why| (lease.subnets, why)));
                continue;
            };
            let name = names.get(&subnet).map(|name| name.as_str()).unwrap_or_default();
            if let Some(refused) = outcome.and_then(|it| it.refused.get(name)) {
                unusable.insert(lease.subnets, with_causes(refused));
                unreachable += 1;
                continue;
            }
            let association =
                outcome.map(|it| it.associations.get(name).copied().unwrap_or_default());
            if let Some(why) = self.amiss(subnet, association, addresses.as_deref()).await {
                unusable.insert(lease.subnets, why.to_owned());
                unreachable += 1;
                continue;
            }
            if association.is_some_and(|it| it.installed_unix.is_none()) {
                lacking.insert(subnet);
            }
            hosts.insert(subnet.into(), host.into());
            known.extend(association.map(|it| (subnet.into(), it)));
        }
        for (subnets, why) in unusable.iter().take(1) {
            let all = unusable.len();
            self.log("unusable", &format!("{subnets} is not set up: {why} ({all} in all)"));
        }
        let (done, failed) = (hosts.len() - lacking.len(), lacking.len() + unreachable);
        self.reporter.hosts(hosts, done, failed);
        self.reporter.ipsec.send_replace(Arc::new(known));
        self.reporter.state(|state| {
            // The others' leases are as they should be.
            state.done.leases_unusable = (unusable.len() - unreachable) as u64;
            state.unusable = Arc::new(unusable);
        });
    }

    /// What this host itself lacks for packets to a peer, where charon encrypts them: a way to
    /// charon once there are keys, and before that something that charon asks for.
    async fn amiss(
        &self,
        subnet: Prefix,
        association: Option<IpsecPeer>,
        addresses: Option<&[Address]>,
    ) -> Option<&'static str> {
        let IpsecPeer { established_unix, installed_unix, .. } = association?;
        if self.plane == EspPlane::Kernel || established_unix.is_none() {
            return None;
        }
        if installed_unix.is_some() {
            let some_pod = Ipv4Addr::from(u32::from(subnet.network()) | 1);
            let path = netlink::path_to(some_pod).await;
            return matches!(path, Err(NetlinkError::Refused(..))).then_some(UNROUTED);
        }
        let has_one = addresses?.iter().any(|it| self.subnet.contains(it.address));
        (!has_one).then_some(NO_ADDRESS)
    }

    /// What is to be said of a failure of charon's.
    fn told(&self, error: &ViciError) -> String {
        let is_gone = self.is_charon_ours && matches!(error, ViciError::Absent(_));
        let next = if is_gone { KEEPER_GONE } else { "" };
        with_causes(error) + next
    }

    /// Logs something about `subject` when it is new, and once a minute while it lasts.
    fn log(&mut self, subject: &'static str, text: &str) {
        self.logged.entry(subject).or_default().once(text, |text| warn!("{text}"));
    }

    /// Reports the interface, and gives the backend in one line.
    fn report_external(&self) -> String {
        let external = self.host.external();
        let mtu_bytes = mtu_bytes(&self.settings, self.plane, external);
        let by = if self.is_charon_ours { ", which weftd started" } else { "" };
        let in_udp = self.settings.is_in_udp || self.plane == EspPlane::Charon;
        let form = if in_udp { "ESP in UDP" } else { "ESP" };
        let (version, plane, below) = (&self.version, self.plane, &external.name);
        let description = format!(
            "ipsec mtu {mtu_bytes} over {below}: {form} by {plane}, keys by charon {version}{by}"
        );
        self.reporter.follow(external, mtu_bytes);
        self.reporter.state(|state| state.description.clone_from(&description));
        description
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_equals_flannels_byte_for_byte() {
        let lease = LeaseAttributes::of(KIND, Ipv4Addr::new(1, 2, 3, 4), None).to_json().unwrap();
        let flannels = r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"ipsec"}"#;
        assert_eq!(String::from_utf8(lease).unwrap(), flannels);
    }
}

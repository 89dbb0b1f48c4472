//! How a start gets its network configuration, interface, subnet and backend, in flanneld's order:
//! waits for what may still appear, fails on what cannot, and uses the cache if there is no store.

use std::net::IpAddr;
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use crate::backend::handover::Handover;
use crate::backend::running::{Backend, Prepared};
use crate::backend::setup::{Claim, Setup, addresses};
use crate::backend_kind::BackendKind;
use crate::config::network::{NetworkConfig, NetworkConfigError};
use crate::config::options::{InterfaceOptions, Options};
use crate::config::subnet_file::Previous;
use crate::control::backoff::{BACKOFF, Backoff};
use crate::control::error::AcquireError;
use crate::control::error::StoreResult;
use crate::control::lease::LeaseAttributes;
use crate::control::manager::SubnetManager;
use crate::control::run::Held;
use crate::control::snapshot::OwnLease;
use crate::daemon::configured::{
    BACKEND_PHRASE, Configured, Former, MANAGER_PHRASE, REGISTRATION_PHRASE,
};
use crate::daemon::node_guard::NodeGuard;
use crate::daemon::rules;
use crate::daemon::warm_start::{Remembered, WarmStart, is_unreachable};
use crate::failure::{LogOnce, with_causes};
use crate::host::interface::{ExternalInterface, discover, look};
use crate::host::lock::LockError;
use crate::route::{Families, Prefixes};

/// First and longest pause between two attempts to read the network configuration. flanneld's is a
/// second; with a little less a node is ready within a second of its store.
const CONFIG_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(800));

/// What a start does that has no subnet yet, as the status shows it.
const ASKING: &str = "asking the store for a subnet";

/// A start that has its subnet.
pub(super) struct Begun {
    pub(super) plan: Configured,
    external: ExternalInterface,
    /// The options by which the interface was found.
    pub(super) interface: InterfaceOptions,
    pub(super) held: Held,
    /// The lock against a second daemon for this node.
    pub(super) guard: NodeGuard,
}

/// What a start has to go by.
#[derive(Clone, Copy)]
pub(super) struct Start<'a> {
    pub(super) options: &'a Options,
    pub(super) manager: &'a SubnetManager,
    pub(super) previous: &'a Previous,
    /// What the last weftd has left.
    pub(super) handover: &'a Handover,
}

impl Start<'_> {
    /// Starts; with a `former` run as often as it takes, while the tunnel that it left goes on.
    pub(super) async fn start(self, former: Option<&Former>) -> Result<(Begun, Backend)> {
        let status = self.manager.status();
        let Some(former) = former else {
            let begun = self.begin().await?;
            status.start_is_at(Some("setting up the backend"));
            return self.start_backend(begun).await;
        };
        status.start_is_at(Some("going on with the subnet and the tunnel of before"));
        let (mut backoff, mut told) = (Backoff::between(BACKOFF), LogOnce::default());
        loop {
            let started = async { self.start_backend(self.begin_again(former).await?).await };
            let error = match started.await {
                Ok(started) => return Ok(started),
                Err(error) => format!("{error:#}"),
            };
            status.start_is_hindered(&error);
            told.once(&error, |text| error!("cannot start again: {text}; retrying"));
            sleep(backoff.next_wait()).await;
        }
    }

    /// Has the packets carried.
    async fn start_backend(self, (begun, prepared): (Begun, Prepared)) -> Result<(Begun, Backend)> {
        let Self { options, manager, previous, handover } = self;
        let setup = Setup {
            external: begun.external.clone(),
            interface: begun.interface.clone(),
            follow_address: options.follow_address,
            networks: begun.plan.network.networks(),
            former_networks: previous.networks,
            subnets: begun.held.subnets(),
            attributes: prepared.attributes.clone(),
            control: manager.status(),
            dataplane: options.dataplane,
            handover: handover.clone(),
            subnet_range: begun.plan.network.v4(),
            cloud_period: manager.timing().cloud_period,
        };
        let backend = prepared.start(setup).await.context(REGISTRATION_PHRASE)?;
        Ok((begun, backend))
    }

    /// Gets configuration and subnet from the store, or from the cache if the store can't be
    /// reached.
    async fn begin(self) -> Result<(Begun, Prepared)> {
        let Self { options, manager, .. } = self;
        let mut warm = WarmStart::prepare(options, self.previous).await;
        let mut plan = match wait_for_config(manager, &mut warm).await? {
            ControlFlow::Continue(plan) => plan,
            ControlFlow::Break(remembered) => return self.begin_from(remembered, None).await,
        };
        info!("Found network config - Backend type: {}", plan.network.backend.kind);
        rules::check_bridge(options, &plan.network)?;
        let mut interface = options.interface.clone();
        warn_of_idle_addresses(&interface, plan.families());
        let (public_ip, public_ipv6) = manager.sync().await.context(MANAGER_PHRASE)?;
        interface.public_ip = public_ip.or(interface.public_ip);
        interface.public_ipv6 = public_ipv6.or(interface.public_ipv6);
        loop {
            interface.families = plan.families();
            let external = discover(&interface).await?;
            warn_of_overlap(&external, plan.network.networks());
            let address = external.node_address();
            let guard = NodeGuard::take(options, manager.cluster(), address).await?;
            match self.acquire_until_leased(plan, &external, &interface, &mut warm).await? {
                Acquired::Leased(acquired) => {
                    let (plan, own, prepared) = *acquired;
                    let held = Held::Leased(own);
                    return Ok((Begun { plan, external, interface, held, guard }, prepared));
                }
                Acquired::Remembered(remembered, prepared) => {
                    // It takes its own.
                    drop(guard);
                    let is_for_it = remembered.external.address() == external.address();
                    return self.begin_from(*remembered, prepared.filter(|_| is_for_it)).await;
                }
                Acquired::Moved(unchanged) => plan = unchanged,
            }
        }
    }

    /// Goes by the cache. What is prepared for it already is not prepared again: the queues that
    /// an earlier weftd has left can be taken once.
    async fn begin_from(
        self,
        remembered: Remembered,
        prepared: Option<Prepared>,
    ) -> Result<(Begun, Prepared)> {
        let Remembered { plan, external, known } = remembered;
        rules::check_bridge(self.options, &plan.network)?;
        let guard = NodeGuard::take(self.options, known.cluster, external.node_address()).await?;
        let families = plan.families();
        let interface = InterfaceOptions { families, ..self.options.interface.clone() };
        let held = Held::Cached(known);
        self.go_on(Begun { plan, external, interface, held, guard }, prepared).await
    }

    /// Goes by what an earlier run of this process had: neither store nor interface need be there.
    async fn begin_again(self, former: &Former) -> Result<(Begun, Prepared)> {
        let (external, held) = (former.external(), former.held());
        let (cluster, address) = (self.manager.cluster(), external.node_address());
        let guard = NodeGuard::take(self.options, cluster, address).await?;
        let (plan, interface) = (former.plan.clone(), former.interface.clone());
        self.go_on(Begun { plan, external, interface, held, guard }, None).await
    }

    async fn go_on(
        self,
        mut begun: Begun,
        prepared: Option<Prepared>,
    ) -> Result<(Begun, Prepared)> {
        let Begun { plan, external, held, .. } = &mut begun;
        let attributes = held.attributes();
        let prepared = match prepared {
            Some(prepared) => prepared,
            None => self.prepare(plan, external, Some(attributes)).await?,
        };
        // What a node publishes does not depend on the cache, but which entry is its own does.
        if attributes.is_of_node_of(&prepared.attributes) {
            attributes.clone_from(&prepared.attributes);
        }
        Ok((begun, prepared))
    }

    /// Has the backend get what the host might refuse later, such as port and device. `former` is
    /// what the node has published before.
    async fn prepare(
        self,
        plan: &Configured,
        external: &ExternalInterface,
        former: Option<&LeaseAttributes>,
    ) -> Result<Prepared> {
        let claim = Claim {
            external,
            networks: plan.network.networks(),
            previous_subnet: self.previous.subnet(),
            dataplane: self.options.dataplane,
            handover: self.handover,
            wireguard_key_file: &self.options.wireguard_key_file,
        };
        let is_ipsec = plan.settings.kind() == BackendKind::Ipsec;
        let step = if is_ipsec { "waiting for charon" } else { "preparing the backend" };
        self.manager.status().start_is_at(Some(step));
        plan.settings.prepare(claim, former).await.context(REGISTRATION_PHRASE)
    }

    /// What this node has published before, where the backend goes by that.
    async fn former(
        self,
        plan: &Configured,
        external: &ExternalInterface,
    ) -> StoreResult<Option<LeaseAttributes>> {
        if !plan.settings.goes_by_former() {
            return Ok(None);
        }
        let own = addresses(plan.settings.kind(), external);
        self.manager.former(&plan.network, &own).await
    }

    /// Acquires a subnet, for as long as it takes. The remedy for a full network is to enlarge it,
    /// so its configuration is read again before each retry.
    async fn acquire_until_leased(
        self,
        mut plan: Configured,
        external: &ExternalInterface,
        interface: &InterfaceOptions,
        warm: &mut WarmStart,
    ) -> Result<Acquired> {
        let mut backoff = Backoff::between(BACKOFF);
        let (mut told, mut told_config) = (LogOnce::default(), LogOnce::default());
        let (manager, mut ready) = (self.manager, None);
        let status = manager.status();
        status.start_is_at(Some(ASKING));
        loop {
            // Made once: what a node publishes may be the output of a command.
            let made = match ready.take() {
                Some(made) => Ok(made),
                None => match self.former(&plan, external).await {
                    Ok(former) => {
                        let made = self.prepare(&plan, external, former.as_ref()).await?;
                        status.start_is_at(Some(ASKING));
                        Ok(made)
                    }
                    Err(error) => Err(error),
                },
            };
            let error = match made {
                Ok(made) => match manager.acquire(&plan.network, &made.attributes).await {
                    Ok(own) => return Ok(Acquired::Leased(Box::new((plan, own, made)))),
                    Err(error) => {
                        ready = Some(made);
                        error
                    }
                },
                Err(error) => error.into(),
            };
            if error.is_final() {
                return Err(error).context(REGISTRATION_PHRASE);
            }
            let is_exhausted = matches!(error, AcquireError::Exhausted { .. });
            let error = anyhow::Error::from(error);
            if is_unreachable(&error)
                && let Some(remembered) = warm.take(&format!("{error:#}"), Some(&plan.network))
            {
                return Ok(Acquired::Remembered(Box::new(remembered), ready));
            }
            status.start_is_hindered(&format!("no subnet: {error:#}"));
            let text = format!("No subnet yet, retrying: {error:#}");
            told.once(&text, |text| warn!("{text}"));
            sleep(backoff.next_wait()).await;
            let found = look(interface, &mut Vec::new()).await;
            if self.options.follow_address
                && found.is_ok_and(|it| it.address() != external.address())
            {
                info!("{} is not the address for the tunnel any more", external.address());
                return Ok(Acquired::Moved(plan));
            }
            if !is_exhausted {
                continue;
            }
            if let Some(changed) = changed_plan(manager, &plan, &mut told_config).await? {
                plan = changed;
                ready = None;
                if plan.families() != interface.families {
                    // The interface has to have an address of each family.
                    return Ok(Acquired::Moved(plan));
                }
            }
        }
    }
}

/// What the network configuration in the store says by now, if that isn't `plan`. One that can't be
/// read may contain a typo: `plan` stays.
async fn changed_plan(
    manager: &SubnetManager,
    plan: &Configured,
    told: &mut LogOnce,
) -> Result<Option<Configured>> {
    match read_config(manager).await? {
        Ok(network) if network == plan.network => Ok(None),
        Ok(network) => {
            info!("the network configuration has changed; trying with the new one");
            Configured::new(network).map(Some)
        }
        Err(error) => {
            let text = format!("Couldn't fetch network config: {error:#}");
            told.once(&text, |text| error!("{text}; continuing with the last one"));
            Ok(None)
        }
    }
}

/// What comes of asking the store for a subnet.
enum Acquired {
    Leased(Box<(Configured, OwnLease, Prepared)>),
    /// The cache is used; with what is prepared already, if anything is.
    Remembered(Box<Remembered>, Option<Prepared>),
    /// The host has another address by now, or has to have one of another family.
    Moved(Configured),
}

/// Warns of addresses for peers that none of them will see.
fn warn_of_idle_addresses(given: &InterfaceOptions, used: Families<(), ()>) {
    if given.public_ipv6.is_some() && used.v6().is_none() {
        warn!("--public-ipv6 has no effect: the hosts of this network do not use IPv6 addresses");
    }
    if given.public_ip.is_some() && used.v4().is_none() {
        warn!("--public-ip has no effect: the hosts of this network do not use IPv4 addresses");
    }
}

fn warn_of_overlap(external: &ExternalInterface, networks: Prefixes) {
    let name = &external.name;
    let warn = |address: IpAddr, network: String| {
        warn!(
            "{address} of {name} is in the overlay network {network}, as a pod's address is: in \
             Kubernetes weftd's pod needs hostNetwork: true, elsewhere choose another network or \
             --iface"
        );
    };
    if let Some((v4, network)) = external.v4().zip(networks.v4())
        && network.contains(v4.address)
    {
        warn(v4.address.into(), network.to_string());
    }
    if let Some((v6, network)) = external.v6().zip(networks.v6())
        && network.contains(v6.address)
    {
        warn(v6.address.into(), network.to_string());
    }
}

/// Like flanneld, waits for the configuration for ever: it may be written after the nodes start.
/// A backend that can't be run is an error, as in flanneld. Breaks to use the cache.
async fn wait_for_config(
    manager: &SubnetManager,
    warm: &mut WarmStart,
) -> Result<ControlFlow<Remembered, Configured>> {
    let (mut told, status) = (LogOnce::default(), manager.status());
    status.start_is_at(Some("asking the store for the network configuration"));
    let mut backoff = Backoff::between(CONFIG_RETRY);
    loop {
        let patience = warm.patience();
        let Ok(read) = timeout(patience, read_config(manager)).await else {
            let why = format!("no network configuration within {patience:?}");
            match warm.take(&why, None) {
                Some(remembered) => return Ok(ControlFlow::Break(remembered)),
                None => continue,
            }
        };
        match read? {
            Ok(network) => return Configured::new(network).map(ControlFlow::Continue),
            Err(error) => {
                if is_unreachable(&error)
                    && let Some(remembered) = warm.take(&format!("{error:#}"), None)
                {
                    return Ok(ControlFlow::Break(remembered));
                }
                status.start_is_hindered(&format!("no network configuration: {error:#}"));
                let text = format!("Couldn't fetch network config: {error:#}; retrying");
                told.once(&text, |text| error!("{text}"));
            }
        }
        sleep(backoff.next_wait()).await;
    }
}

/// The inner error may go away when somebody writes the configuration; the outer one is final.
async fn read_config(manager: &SubnetManager) -> Result<Result<NetworkConfig>> {
    let bytes = match manager.network_config().await {
        Ok(bytes) => bytes,
        Err(error) => return Ok(Err(error.into())),
    };
    match NetworkConfig::parse(&bytes) {
        Err(error @ NetworkConfigError::NoBackendType) => Err(error).context(BACKEND_PHRASE),
        Err(error @ NetworkConfigError::NoFamily) => Err(error.into()),
        parsed => Ok(parsed.map_err(anyhow::Error::from)),
    }
}

/// Fails if another daemon uses this subnet file. If the lock fails for another reason, such as a
/// read-only directory, the daemon runs without it, as it does without a subnet file.
pub(super) fn unless_taken<T>(locked: Result<T, LockError>) -> Result<Option<T>> {
    match locked {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ LockError::Unusable(_)) => {
            let why = with_causes(&error);
            warn!("continuing without a lock, so a second daemon would not be noticed: {why}");
            Ok(None)
        }
        Err(error @ (LockError::Taken { .. } | LockError::NoFileName(_))) => Err(error.into()),
    }
}

/// What the last weftd or flanneld has left in the subnet file.
pub(super) fn read_previous(options: &Options) -> Previous {
    let previous = Previous::read(&options.subnet_file).unwrap_or_else(|error| {
        let why = with_causes(&error);
        warn!("cannot read the last subnet file, continuing without it: {why}");
        Previous::default()
    });
    for complaint in &previous.complaints {
        warn!("{}: {complaint}", options.subnet_file.display());
    }
    previous
}

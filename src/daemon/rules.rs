//! Starts the reconciler of the firewall rules by the flags, decides how long a start waits for it,
//! and keeps the blackhole route.

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::config::network::NetworkConfig;
use crate::config::options::{Options, RuleOptions, StoreOptions};
use crate::config::subnet_file::Previous;
use crate::failure::{LogOnce, with_causes};
use crate::host::netlink::{self, BLACKHOLE_METRIC, NetlinkError};
use crate::host::node_lock::NodeLock;
use crate::host::state::KernelFamily;
use crate::netfilter::diff::Trigger;
use crate::netfilter::reconciler::{Flavour, RuleError, RuleReconciler};
use crate::netfilter::rules::Wanted;
use crate::route::{Prefix, Prefixes};
use crate::status::Kept;

/// How long a start waits for its rules before it continues without them. Setting them takes about
/// 30 ms for each family; another program's lock may take a minute, and packets need not wait for
/// it.
const PATIENCE: Duration = Duration::from_millis(300);

/// For IPv4 and IPv6; they exist only with the module br_netfilter.
const BRIDGE_FILTERS: [&str; 2] = [
    "/proc/sys/net/bridge/bridge-nf-call-iptables",
    "/proc/sys/net/bridge/bridge-nf-call-ip6tables",
];

/// How the rules are first compared: again, or for the first time, alone here or beside the daemons
/// of other networks.
pub(super) async fn trigger(is_again: bool) -> Trigger {
    if is_again {
        return Trigger::Resync;
    }
    match NodeLock::is_alone().await {
        Ok(false) => Trigger::StartBesideOthers,
        Ok(true) | Err(_) => Trigger::Start,
    }
}

/// Reconciles the rules that the options ask for.
pub(super) fn reconciler(
    options: &Options,
    network: &NetworkConfig,
    subnets: Prefixes,
    previous: &Previous,
) -> RuleReconciler {
    let RuleOptions { masquerade, random_ports, forward, resync, .. } = options.rules;
    let networks = network.networks();
    let wanted = Wanted { networks, subnets, masquerade, forward, random_ports };
    let flavour = if network.enable_nftables { Flavour::Nftables } else { Flavour::Iptables };
    if !wanted.is_nothing() {
        log_recycling(flavour, &wanted, previous);
    }
    RuleReconciler::new(flavour, wanted, resync)
}

/// flanneld's phrase. The first pass of the reconciler removes the earlier run's rules in any case.
fn log_recycling(flavour: Flavour, wanted: &Wanted, previous: &Previous) {
    let (Some(network), Some(subnet)) = (previous.networks, previous.subnets) else { return };
    if (network, subnet) != (wanted.networks, wanted.subnets) {
        info!(
            "Current network or subnet ({}, {}) is not equal to previous one ({network}, \
             {subnet}), trying to recycle old {} rules",
            wanted.networks,
            wanted.subnets,
            flavour.name()
        );
    }
}

/// Without br_netfilter iptables does not see what passes between pods of one bridge. The overlay's
/// own rules are about what leaves the bridge, but Kubernetes' services need it: with the
/// Kubernetes store the start fails, with flanneld's message.
pub(super) fn check_bridge(options: &Options, network: &NetworkConfig) -> anyhow::Result<()> {
    let RuleOptions { masquerade, forward, .. } = options.rules;
    if network.enable_nftables || !(masquerade || forward) {
        return Ok(());
    }
    let asked = [network.v4().is_some(), network.v6().is_some()];
    let asked = BRIDGE_FILTERS.iter().zip(asked).filter(|(_, is_asked)| *is_asked);
    let missing =
        asked.map(|(path, _)| path).find_map(|path| Some((path, std::fs::metadata(path).err()?)));
    let Some((path, error)) = missing else { return Ok(()) };
    if matches!(options.store, StoreOptions::Kube(_)) {
        anyhow::bail!(
            "Failed to check br_netfilter: stat {path}: {error}; services of Kubernetes \
             do not work between pods of this host without it: load the kernel module \
             br_netfilter"
        );
    }
    info!(
        "{path}: {error}: iptables does not see traffic between pods of this host; \
         services of Kubernetes need the kernel module br_netfilter"
    );
    Ok(())
}

/// Waits for the rules that `keep` sets, though not for long; an error if a start can't do without.
/// Once the firewall has `refused` them, waits for the end of that: a weftd that hands over must
/// not be gone by then.
pub(super) async fn settled(
    mut keep: Pin<&mut impl Future<Output = RuleError>>,
    mut state: watch::Receiver<Kept>,
    mut refused: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let settled = timeout(PATIENCE, state.wait_for(|state| state.settled));
    let is_late = tokio::select! {
        error = keep.as_mut() => return Err(fatal(error)),
        settled = settled => settled.is_err(),
    };
    if is_late {
        tokio::select! {
            error = keep => return Err(fatal(error)),
            _ = refused.wait_for(|is_refused| !is_refused) => {}
        }
        if !state.borrow().settled {
            info!("starting without the firewall rules: they are still being set");
        }
    }
    Ok(())
}

/// The error that ends a start without its rules.
pub(super) fn fatal(error: RuleError) -> anyhow::Error {
    anyhow::Error::from(error).context("Failed to setup masq rules")
}

/// Keeps the blackhole routes of the own subnets, if they were asked for, and removes those of the
/// subnets that this host had before.
pub(super) async fn keep_blackholes(
    options: RuleOptions,
    subnets: Prefixes,
    previous: &Previous,
) -> Infallible {
    if !options.blackhole_route {
        return pending().await;
    }
    let (resync, previous) = (options.resync, previous.subnets);
    tokio::select! {
        never = keep_blackhole(resync, subnets.v4(), previous.and_then(Prefixes::v4)) => never,
        never = keep_blackhole(resync, subnets.v6(), previous.and_then(Prefixes::v6)) => never,
    }
}

async fn keep_blackhole<A: KernelFamily>(
    resync: Duration,
    subnet: Option<Prefix<A>>,
    previous: Option<Prefix<A>>,
) -> Infallible {
    let mut stale = previous.filter(|_| previous != subnet);
    let mut told = LogOnce::default();
    while subnet.is_some() || stale.is_some() {
        match settle_blackhole(subnet, &mut stale).await {
            Ok(()) => _ = told.forget(),
            Err(error) => told.once(&with_causes(&error), |text| {
                warn!("blackhole route: {text}; retrying");
            }),
        }
        sleep(resync).await;
    }
    pending().await
}

/// Adds the route, and removes that of an earlier subnet.
async fn settle_blackhole<A: KernelFamily>(
    subnet: Option<Prefix<A>>,
    stale: &mut Option<Prefix<A>>,
) -> Result<(), NetlinkError> {
    if let Some(subnet) = subnet {
        match netlink::add_blackhole(subnet).await {
            Ok(()) => info!("added a blackhole route for {subnet}"),
            Err(error) if error.is_already_there() => {}
            Err(error) => return Err(error),
        }
    }
    let Some(earlier) = *stale else { return Ok(()) };
    match netlink::remove_blackhole(earlier, BLACKHOLE_METRIC).await {
        Ok(()) => info!("removed the blackhole route of the earlier subnet {earlier}"),
        Err(error) if error.is_already_gone() => {}
        Err(error) => return Err(error),
    }
    *stale = None;
    Ok(())
}

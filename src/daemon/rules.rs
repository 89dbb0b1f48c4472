//! Rules and the blackhole route in the daemon's life: what is wanted after the flags, what a start
//! waits for, and what it does not start without.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::config::network::NetworkConfig;
use crate::config::options::{Options, RuleOptions, StoreOptions};
use crate::config::subnet_file::Previous;
use crate::failure::with_causes;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::netfilter::keeper::{Flavour, RuleError, RuleKeeper, RuleState};
use crate::netfilter::rules::Wanted;
use crate::route::Prefix;

/// For how long a start waits for its rules before it goes on without. Setting them takes some
/// 30 ms; another program's lock may take a minute, and packets need not wait for it.
const PATIENCE: Duration = Duration::from_millis(300);

/// What the kernel has only with the module br_netfilter.
const BRIDGE_FILTER: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

/// The keeper of the rules that were asked for.
pub(super) fn keeper(
    options: &Options,
    network: &NetworkConfig,
    subnet: Prefix,
    previous: &Previous,
) -> RuleKeeper {
    let RuleOptions { masquerade, random_ports, forward, resync, .. } = options.rules;
    let wanted = Wanted { network: network.network, subnet, masquerade, forward, random_ports };
    let flavour = if network.enable_nftables { Flavour::Nftables } else { Flavour::Iptables };
    if !wanted.is_nothing() {
        tell_of_recycling(&wanted, previous);
    }
    RuleKeeper::new(flavour, wanted, resync)
}

/// flanneld's phrase. What the earlier run left goes with the first pass in any case.
fn tell_of_recycling(wanted: &Wanted, previous: &Previous) {
    let (Some(network), Some(subnet)) = (previous.network, previous.subnet) else { return };
    if (network, subnet) != (wanted.network, wanted.subnet) {
        info!(
            "Current network or subnet ({}, {}) is not equal to previous one ({network}, \
             {subnet}), trying to recycle old iptables rules",
            wanted.network, wanted.subnet
        );
    }
}

/// Without br_netfilter iptables does not see what passes between pods of one bridge. The overlay's
/// own rules are about what leaves the bridge; it is Kubernetes' services that need it, and with
/// the Kubernetes store flanneld's words end the start.
pub(super) fn check_bridge(options: &Options, network: &NetworkConfig) -> anyhow::Result<()> {
    let RuleOptions { masquerade, forward, .. } = options.rules;
    if network.enable_nftables || !(masquerade || forward) {
        return Ok(());
    }
    let Err(error) = std::fs::metadata(BRIDGE_FILTER) else { return Ok(()) };
    match options.store {
        StoreOptions::Etcd(_) | StoreOptions::Local(_) => {
            info!(
                "{BRIDGE_FILTER}: {error}: iptables does not see traffic between pods of this \
                 host; services of Kubernetes need the kernel module br_netfilter"
            );
            Ok(())
        }
        #[cfg(feature = "kube")]
        StoreOptions::Kube(_) => anyhow::bail!(
            "Failed to check br_netfilter: stat {BRIDGE_FILTER}: {error}; services of Kubernetes \
             do not work between pods of this host without it: load the kernel module \
             br_netfilter, or set EnableNFTables in the network configuration"
        ),
    }
}

/// Waits for the rules, though not for long.
pub(super) async fn settled(mut state: watch::Receiver<RuleState>) {
    let settled = state.wait_for(|state| state.is_settled);
    if timeout(PATIENCE, settled).await.is_err() {
        info!("the start goes on without its rules; they are still being set");
    }
}

/// The end of a start without its rules.
pub(super) fn fatal(error: RuleError) -> anyhow::Error {
    anyhow::Error::from(error).context("Failed to setup masq rules")
}

/// Keeps the blackhole route of the own subnet, if it was asked for, and removes that of the subnet
/// that this host had before.
pub(super) async fn keep_blackhole(
    options: RuleOptions,
    subnet: Prefix,
    previous: Option<Prefix>,
) -> Infallible {
    if !options.blackhole_route {
        return std::future::pending().await;
    }
    let netlink = loop {
        match Netlink::open() {
            Ok(netlink) => break netlink,
            Err(error) => tell_of_route(subnet, &error),
        }
        sleep(options.resync).await;
    };
    if let Some(stale) = previous.filter(|previous| *previous != subnet) {
        match netlink.remove_blackhole(stale).await {
            Ok(()) => info!("removed the blackhole route of the earlier subnet {stale}"),
            Err(error) if error.is_already_gone() => {}
            Err(error) => tell_of_route(stale, &error),
        }
    }
    loop {
        match netlink.add_blackhole(subnet).await {
            Ok(()) => info!("added a blackhole route for {subnet}"),
            Err(error) if error.is_already_there() => {}
            Err(error) => tell_of_route(subnet, &error),
        }
        sleep(options.resync).await;
    }
}

fn tell_of_route(subnet: Prefix, error: &NetlinkError) {
    warn!("blackhole route of {subnet}: {}; trying again", with_causes(error));
}

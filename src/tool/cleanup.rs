//! `weft cleanup`: removes what weftd and flanneld leave on a host when they end, for a host that
//! leaves the network, or is to run another backend.

use std::error::Error;
use std::fmt::Display;
use std::fs::remove_file;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, bail};

use crate::backend::ipsec::remove_leftovers;
use crate::backend::tunnel_device::is_tunnel_device;
use crate::backend::udp::{pair_names, remove_kept};
use crate::config::subnet_file::Previous;
use crate::config::whole_file;
use crate::daemon::cache_writer::cache_path;
use crate::failure::with_causes;
use crate::host::lock::{DaemonLock, LockError};
use crate::host::netlink::filters::FilterPlace;
use crate::host::netlink::{self, NetlinkError, routes};
use crate::host::node_lock::{NodeLock, NodeLockError};
use crate::host::state::{KernelFamily, Link, Route, RouteKind, RouteProtocol};
use crate::netfilter::guard_keeper::remove_guards;
use crate::netfilter::reconciler::Flavour;
use crate::netfilter::rules::Family;
use crate::route::{Prefix, Prefixes};
use crate::tool::ask::wait_for;

/// What was done, line by line.
#[derive(Debug, Default)]
struct Account {
    done: Vec<String>,
    failed: Vec<String>,
}

impl Account {
    /// Whether there was anything to remove, or why it stays.
    fn take<E: Error + 'static>(&mut self, what: impl Display, removed: Result<bool, E>) {
        match removed {
            Ok(true) => self.done.push(format!("removed {what}")),
            Ok(false) => {}
            Err(error) => self.failed.push(format!("{what}: {}", with_causes(&error))),
        }
    }
}

/// Removes everything, of the daemon with this subnet file too; what fails does not keep the rest
/// in place. Refuses beside a running weftd, for what is removed may be that one's, whatever its
/// subnet file.
pub(super) fn run(subnet_file: &Path) -> anyhow::Result<String> {
    let lock = lock(subnet_file)?;
    let mut account = Account::default();
    wait_for(async {
        refuse_beside_others().await?;
        clean_host(subnet_file, &mut account).await
    })??;
    for path in [subnet_file, &cache_path(subnet_file)] {
        let removed = match remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            result => result.map(|()| true),
        };
        account.take(path.display(), removed);
    }
    lock.map(DaemonLock::remove).transpose()?;
    let Account { mut done, failed } = account;
    if !failed.is_empty() {
        bail!("{}\nnot removed:\n{}", done.join("\n"), failed.join("\n"));
    }
    if done.is_empty() {
        done.push("nothing to remove".to_owned());
    }
    Ok(done.join("\n") + "\n")
}

/// Keeps weftd from a start meanwhile; nothing where no weftd can have been.
fn lock(subnet_file: &Path) -> anyhow::Result<Option<DaemonLock>> {
    // It would be made, only to be left behind.
    if !whole_file::directory_of(subnet_file).is_dir() {
        return Ok(None);
    }
    match DaemonLock::acquire(subnet_file) {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ LockError::Taken { .. }) => Err(error).context("weftd is running"),
        Err(LockError::Unusable(_) | LockError::NoFileName(_)) => Ok(None),
    }
}

async fn refuse_beside_others() -> anyhow::Result<()> {
    let others = NodeLock::held_by_others().await.context("cannot see whether a weftd runs")?;
    let Some(NodeLockError::Taken { address, pid }) = others.first() else { return Ok(()) };
    let pid = pid.map_or_else(|| "in another container".to_owned(), |pid| format!("pid {pid}"));
    bail!(
        "weftd is running with another subnet file ({pid}, the node {address}), and devices, \
         filters, routes and rules may be its own: stop it first"
    )
}

async fn clean_host(subnet_file: &Path, account: &mut Account) -> anyhow::Result<()> {
    // First what packets are taken by, last what keeps them from going elsewhere.
    for link in netlink::links().await.context("cannot list links")? {
        let cleared = FilterPlace::clear_all(link.id.index).await;
        account.take(format!("the filters of {}", link.id), cleared.map(|count| count > 0));
    }
    // All: where no weftd runs, what has one is the service manager's, for a weftd to come.
    match remove_kept(|_, _| true).await {
        Ok(removed) => account.done.extend(removed.iter().map(|(id, _)| format!("removed {id}"))),
        Err(error) => account.take("a kept device", Err(error)),
    }
    let links = netlink::links().await.context("cannot list links")?;
    for link in links.iter().filter(|link| is_tunnel_device(link) || is_of_a_pair(link, &links)) {
        account.take(&link.id, netlink::remove_link(&link.id).await.map(|()| true));
    }
    let networks = Previous::read(subnet_file).unwrap_or_default().networks;
    let network = networks.and_then(Prefixes::v4);
    match remove_leftovers(network.as_slice()).await {
        Ok(removed) => account.done.extend(removed.iter().map(|what| format!("removed {what}"))),
        Err(error) => account.take("what ipsec has left", Err(error)),
    }
    remove_routes(network, account).await?;
    remove_routes(networks.and_then(Prefixes::v6), account).await?;
    for flavour in [Flavour::Nftables, Flavour::Iptables] {
        let removed = flavour.remove_rules(Family::ALL).await;
        account.take(format!("the rules of {}", flavour.name()), removed);
    }
    account.take("the guard of the tunnel's port", remove_guards(|_, _| true).await);
    Ok(())
}

/// The first end of a veth pair that merged packets for a TUN device which is gone: the other end
/// goes with it.
fn is_of_a_pair(link: &Link, links: &[Link]) -> bool {
    let other = links.iter().find(|other| link.is_paired_with(other));
    let Some((other, tun)) = other.zip(link.id.name.strip_suffix("-gro0")) else { return false };
    pair_names(tun) == [link.id.name.as_str(), &other.id.name]
        && links.iter().all(|found| found.id.name != tun)
}

async fn remove_routes<A: KernelFamily>(
    network: Option<Prefix<A>>,
    account: &mut Account,
) -> anyhow::Result<()> {
    for route in routes::routes_to(|_| true).await.context("cannot list routes")? {
        let removed = remove_route(&route, network).await;
        account.take(format!("the route to {}", route.destination), removed);
    }
    Ok(())
}

/// Removes a route that flanneld or weftd has set: with weftd's own mark, through a host to a
/// subnet of the network, or a blackhole in it.
async fn remove_route<A: KernelFamily>(
    route: &Route<A>,
    network: Option<Prefix<A>>,
) -> Result<bool, NetlinkError> {
    let is_inside = network.is_some_and(|network| network.covers(route.destination));
    let is_flannels = route.protocol == RouteProtocol::BOOT && is_inside;
    if route.kind == RouteKind::BLACKHOLE && is_flannels {
        netlink::remove_blackhole(route.destination, route.metric).await?;
        return Ok(true);
    }
    // Of several ways or of none it is not ours.
    let is_through_host = is_flannels && route.next_hops.iter().any(|hop| hop.gateway.is_some());
    let is_ours = route.protocol == RouteProtocol::WEFT || is_through_host;
    let Some(removal) = route.removal().filter(|_| is_ours) else { return Ok(false) };
    netlink::remove_route(&removal).await.map(|()| true)
}

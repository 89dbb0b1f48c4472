//! `weft cleanup`: removes what weftd and flanneld leave on a host when they end, for a host that
//! leaves the network, or is to run another backend.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use anyhow::{Context, bail};

use crate::backend::udp::{pair_names, remove_kept};
use crate::config::subnet_file::Previous;
use crate::config::whole_file;
use crate::daemon::cache_writer::cache_path;
use crate::failure::with_causes;
use crate::host::lock::{DaemonLock, LockError};
use crate::host::netlink::filters::FilterPlace;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::node_lock::{NodeLock, NodeLockError};
use crate::host::state::{Link, LinkId, Route, RouteKind, RouteProtocol};
use crate::netfilter::guard_keeper::remove_guards;
use crate::netfilter::reconciler::remove_rules;
use crate::route::Prefix;

/// `RTN_BLACKHOLE`.
const BLACKHOLE: RouteKind = RouteKind::Other(6);

/// What is removed, and of which daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cleanup {
    pub(super) subnet_file: PathBuf,
}

/// What was done, line by line.
#[derive(Debug, Default)]
struct Account {
    done: Vec<String>,
    failed: Vec<String>,
}

impl Account {
    fn take<E: std::error::Error + 'static>(&mut self, what: impl Display, result: Result<(), E>) {
        match result {
            Ok(()) => self.done.push(format!("removed {what}")),
            Err(error) => self.failed.push(format!("{what}: {}", with_causes(&error))),
        }
    }
}

impl Cleanup {
    /// Removes everything; what fails does not keep the rest in place. Refuses beside a running
    /// weftd, for what is removed may be that one's, whatever its subnet file.
    pub(super) fn run(&self) -> anyhow::Result<String> {
        let lock = self.lock()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut account = Account::default();
        runtime.block_on(async {
            refuse_beside_others().await?;
            self.on_host(&mut account).await
        })?;
        self.files(&mut account);
        lock.map(DaemonLock::remove).transpose()?;
        let Account { done, failed } = account;
        if !failed.is_empty() {
            bail!("{}\nnot removed:\n{}", done.join("\n"), failed.join("\n"));
        }
        if done.is_empty() {
            return Ok("nothing to remove\n".to_owned());
        }
        Ok(done.join("\n") + "\n")
    }

    /// Keeps weftd from a start meanwhile; nothing where no weftd can have been.
    fn lock(&self) -> anyhow::Result<Option<DaemonLock>> {
        // It would be made, only to be left behind.
        if !whole_file::directory_of(&self.subnet_file).is_dir() {
            return Ok(None);
        }
        match DaemonLock::acquire(&self.subnet_file) {
            Ok(lock) => Ok(Some(lock)),
            Err(error @ LockError::Taken { .. }) => {
                Err(anyhow::Error::from(error).context("weftd is running"))
            }
            Err(LockError::Unusable { .. } | LockError::NoFileName(_)) => Ok(None),
        }
    }

    async fn on_host(&self, account: &mut Account) -> anyhow::Result<()> {
        let previous = Previous::read(&self.subnet_file).unwrap_or_default();
        let netlink = Netlink::open()?;
        // First what packets are taken by, last what keeps them from going elsewhere.
        for link in netlink.links().await.context("cannot list links")? {
            filters(&netlink, &link.id, account).await;
        }
        match remove_kept(&netlink, None).await {
            Ok(removed) => {
                account.done.extend(removed.iter().map(|(link, _)| format!("removed {link}")))
            }
            Err(error) => account.take("a kept device", Err(error)),
        }
        let links = netlink.links().await.context("cannot list links")?;
        for link in links.iter().filter(|link| is_vxlan(link) || is_of_a_pair(link, &links)) {
            account.take(&link.id, netlink.remove_link(&link.id).await);
        }
        let in_network = |destination| {
            previous.network.is_some_and(|network: Prefix| network.covers(destination))
        };
        let routes = Netlink::routes_to(|_| true).await.context("cannot list routes")?;
        for route in routes {
            if let Some(result) = remove_route(&netlink, &route, in_network).await {
                account.take(format!("the route to {}", route.destination), result);
            }
        }
        for (flavour, result) in remove_rules().await {
            account.take(format!("the rules of {}", flavour.name()), result);
        }
        match remove_guards(|_| true).await {
            Ok(false) => {}
            result => account.take("the guard of the tunnel's port", result.map(|_removed| ())),
        }
        Ok(())
    }

    fn files(&self, account: &mut Account) {
        for path in [&self.subnet_file, &cache_path(&self.subnet_file)] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => account.take(path.display(), result),
            }
        }
    }
}

async fn refuse_beside_others() -> anyhow::Result<()> {
    let others = NodeLock::held_by_others().await.context("cannot see whether a weftd runs")?;
    let Some(NodeLockError::Taken { public_ip, pid }) = others.first() else { return Ok(()) };
    let pid = pid.map_or_else(|| "in another container".to_owned(), |pid| format!("pid {pid}"));
    bail!(
        "weftd is running with another subnet file ({pid}, the node {public_ip}), and devices, \
         filters, routes and rules may be its own: stop it first"
    )
}

async fn filters(netlink: &Netlink, link: &LinkId, account: &mut Account) {
    match FilterPlace::clear_all(netlink, link.index).await {
        Ok(0) => {}
        Ok(count) => account.done.push(format!("removed {count} filters of {link}")),
        Err(error) => account.take(format!("filters of {link}"), Err(error)),
    }
}

/// `flannel.1` and the like.
fn is_vxlan(link: &Link) -> bool {
    let number = link.id.name.strip_prefix("flannel.");
    link.vxlan.is_some() && number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The first end of a veth pair that merged packets for a TUN device which is gone: the other end
/// goes with it.
fn is_of_a_pair(link: &Link, links: &[Link]) -> bool {
    let other = links.iter().find(|other| link.is_paired_with(other));
    let Some((other, tun)) = other.zip(link.id.name.strip_suffix("-gro0")) else { return false };
    pair_names(tun) == [link.id.name.as_str(), &other.id.name]
        && links.iter().all(|found| found.id.name != tun)
}

/// Removes a route that flanneld or weftd has set: with weftd's own mark, through a host to a
/// subnet of the network, or a blackhole in it.
async fn remove_route(
    netlink: &Netlink,
    route: &Route,
    in_network: impl Fn(Prefix) -> bool,
) -> Option<Result<(), NetlinkError>> {
    let is_flannels = route.protocol == RouteProtocol::BOOT && in_network(route.destination);
    if route.kind == BLACKHOLE && is_flannels {
        return Some(netlink.remove_blackhole(route.destination, route.metric).await);
    }
    let [hop] = route.next_hops.as_slice() else { return None };
    let is_through_host = is_flannels && hop.gateway.is_some();
    if route.protocol != RouteProtocol::WEFT && !is_through_host {
        return None;
    }
    Some(netlink.remove_route(&route.removal()?).await)
}

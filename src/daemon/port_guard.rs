//! Follows the peers and the tunnel for the guard of the tunnel's port, if it was asked for; else
//! removes what an earlier run left.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;

use anyhow::Context;
use tokio::sync::watch;
use tracing::warn;

use crate::backend::status::PlaneState;
use crate::config::options::RuleOptions;
use crate::config::subnet_file::Previous;
use crate::control::changes::next_change;
use crate::control::lease::Peers;
use crate::daemon::configured::Configured;
use crate::netfilter::guard::{Guard, TunnelGuard, table_name};
use crate::netfilter::guard_keeper::{GuardKeeper, remove_left_guard};
use crate::route::Prefixes;
use crate::status::{self, TunnelEnd};

/// Who may send to the tunnel's port.
pub(super) struct PortGuard {
    /// Those of the families that a tunnel runs over.
    networks: Prefixes,
    /// The networks of the run before, if they were others.
    former: Option<Prefixes>,
    /// Nothing if it was not asked for.
    keeper: Option<GuardKeeper>,
}

impl PortGuard {
    /// By the options.
    pub(super) fn new(options: RuleOptions, plan: &Configured, previous: &Previous) -> Self {
        let (networks, kind) = (plan.network.networks(), plan.settings.kind());
        let networks = if kind.has_ipv6_underlay() { networks } else { networks.first() };
        let former = previous.networks.filter(|it| table_name(*it) != table_name(networks));
        if options.guard && !kind.needs_guard() {
            warn!("--guard has no effect: the {kind} backend has no port that needs one");
        }
        let is_kept = options.guard && kind.needs_guard();
        let keeper = is_kept.then(|| GuardKeeper::new(options.resync));
        Self { networks, former, keeper }
    }

    /// An error if it was asked for and nft can't be run: the operator counts on it.
    pub(super) async fn check(&self) -> anyhow::Result<()> {
        match self.keeper {
            Some(_) => GuardKeeper::is_possible().await.context("--guard can't be kept"),
            None => Ok(()),
        }
    }

    /// For a report: the guard's state, if it is kept.
    pub(super) fn state(&self) -> Option<watch::Receiver<status::Guard>> {
        self.keeper.as_ref().map(GuardKeeper::state)
    }

    /// Keeps it for `peers`, or removes what an earlier run left.
    pub(super) async fn keep(
        self,
        mut peers: watch::Receiver<Arc<Peers>>,
        mut plane: watch::Receiver<PlaneState>,
    ) -> Infallible {
        if let Some(former) = self.former {
            remove_left_guard(former).await;
        }
        let Some(keeper) = self.keeper else {
            remove_left_guard(self.networks).await;
            return pending().await;
        };
        let networks = self.networks;
        let (wanted, receiver) = watch::channel(None);
        let follow = async {
            // Before the first time nobody knows the peers.
            next_change(&mut peers).await;
            loop {
                let guard = guard(&peers.borrow_and_update(), &plane.borrow_and_update(), networks);
                wanted.send_if_modified(|last| std::mem::replace(last, guard.clone()) != guard);
                tokio::select! {
                    () = next_change(&mut peers) => {}
                    () = next_change(&mut plane) => {}
                }
            }
        };
        tokio::select! {
            never = keeper.run(receiver) => never,
            never = follow => never,
        }
    }
}

/// The guard for these peers; nothing while there is no tunnel.
fn guard(peers: &Peers, plane: &PlaneState, networks: Prefixes) -> Option<Guard> {
    let (tunnel, table) = (plane.tunnel?, table_name(networks));
    // Of WireGuard's peers keys say who they are.
    let peers = Some(peers).filter(|_| !matches!(tunnel, TunnelEnd::Wireguard { .. }));
    let addresses = || peers.into_iter().flat_map(Peers::values).map(|lease| &lease.attributes);
    let v4 = networks.v4().map(|network| {
        let peers = addresses().filter_map(|it| it.public_ip).collect();
        TunnelGuard { table: table.clone(), tunnel, network, peers }
    });
    let v6 = networks.v6().map(|network| {
        let peers = addresses().filter_map(|it| it.public_ipv6).collect();
        TunnelGuard { table: table.clone(), tunnel, network, peers }
    });
    Some(Guard { table, tunnel, v4, v6 })
}

//! Keeps the guard of the tunnel's port as the peers are: sets it once they are known, follows
//! them, and checks it at each resync. Decides when; `guard` decides what to change.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use crate::failure::{LogOnce, with_causes};
use crate::netfilter::guard::{
    Dropped, Frame, Guard, ListedGuard, TunnelGuard, is_guard, table_name,
};
use crate::netfilter::program::NFT;
use crate::netfilter::reconciler::{
    RETRY, RuleError, apply_nftables, list_table, note, remove_tables,
};
use crate::route::{IpAddress, Prefixes};
use crate::status::{self, TunnelEnd};

/// Shortest pause between two edits: each starts nft twice, and the peers of a starting cluster
/// come one by one.
const EDIT_PAUSE: Duration = Duration::from_millis(100);

/// Keeps the guard of one daemon's tunnel.
#[derive(Debug)]
pub struct GuardKeeper {
    resync: Duration,
    /// What was set of each family, and how nft printed it right afterwards, which differs by nft's
    /// version.
    kept: BTreeMap<&'static str, (TunnelEnd, Frame)>,
    logged: LogOnce,
    state: watch::Sender<status::Guard>,
}

impl GuardKeeper {
    /// Will check the guard every `resync`.
    pub fn new(resync: Duration) -> Self {
        let state = watch::Sender::new(status::Guard::default());
        Self { resync, kept: BTreeMap::new(), logged: LogOnce::default(), state }
    }

    /// The state of the guard, and each change of it.
    pub fn state(&self) -> watch::Receiver<status::Guard> {
        self.state.subscribe()
    }

    /// Whether a guard can be set here at all: nft is there, and may list tables. What may pass is
    /// no reason against it: it is retried when there are peers.
    pub async fn is_possible() -> Result<(), RuleError> {
        match NFT.run(&["-j", "list", "tables"], "").await {
            Err(error) if !error.is_passing() => Err(error.into()),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Keeps the guard that is `wanted`, from the first time that it is known. What an earlier run
    /// left stays until then, and stays when this is dropped.
    pub async fn run(mut self, mut wanted: watch::Receiver<Option<Guard>>) -> Infallible {
        let mut is_news = true;
        // Before the peers are known there is nothing to keep.
        let mut pause = Duration::MAX;
        loop {
            match timeout(pause, wanted.changed()).await {
                Ok(Ok(())) => is_news = true,
                // Its sender goes with the daemon, and so does this.
                Ok(Err(_)) => pending().await,
                Err(_elapsed) => {}
            }
            let Some(guard) = wanted.borrow_and_update().clone() else { continue };
            pause = match self.reconcile(&guard, is_news).await {
                Ok(()) => {
                    is_news = false;
                    self.resync * 9 / 10
                }
                Err(error) => {
                    self.logged.once(&with_causes(&error), |text| {
                        error!("{guard} can't be kept: {text}; retrying");
                    });
                    self.resync.min(RETRY)
                }
            };
            sleep(EDIT_PAUSE).await;
        }
    }

    /// Makes the kernel's guard this one. If `is_news`, a difference is no fault.
    async fn reconcile(&mut self, guard: &Guard, is_news: bool) -> Result<(), RuleError> {
        let result = self.look_and_edit_all(guard).await;
        let of_v6 = || guard.v6.as_ref().map_or(0, |v6| v6.peers.len());
        let peer_count = guard.v4.as_ref().map_or_else(of_v6, |v4| v4.peers.len());
        self.state.send_modify(|state| {
            state.port = guard.port();
            let is_repaired = result.as_ref().ok().map(|(_, is_changed)| *is_changed && !is_news);
            note(&mut state.kept, is_repaired);
            state.kept.settled = true;
            if let Ok((dropped, _)) = &result {
                state.peers = peer_count;
                state.dropped_from_strangers = dropped.from_strangers;
                state.dropped_from_pods = dropped.from_pods;
            }
        });
        let (_, is_changed) = result?;
        if self.logged.forget() {
            info!("{guard} is kept again");
        } else if is_changed && is_news {
            match guard.port() {
                Some(port) => info!("Peers that may send to UDP port {port}: {peer_count}"),
                None => info!("Packets in the clear with addresses of pods are kept out"),
            }
        } else if is_changed {
            info!("{guard} was changed; repaired it");
        }
        Ok(())
    }

    /// The same of both families. Where IPv6 has no tunnel, what an earlier run guarded one with
    /// goes.
    async fn look_and_edit_all(&mut self, guard: &Guard) -> Result<(Dropped, bool), RuleError> {
        let is_first = self.kept.is_empty();
        let (mut dropped, is_changed) = match &guard.v4 {
            Some(v4) => self.look_and_edit(v4).await?,
            None => (Dropped::default(), false),
        };
        let Some(v6) = &guard.v6 else {
            if !is_first {
                return Ok((dropped, is_changed));
            }
            let name = &guard.table;
            let is_left = |family: &str, found: &str| family == "ip6" && found == name;
            return Ok((dropped, remove_guards(is_left).await? | is_changed));
        };
        let (of_v6, is_changed_v6) = self.look_and_edit(v6).await?;
        dropped.from_strangers += of_v6.from_strangers;
        dropped.from_pods += of_v6.from_pods;
        Ok((dropped, is_changed | is_changed_v6))
    }

    /// What was dropped so far, and whether anything had to be edited.
    async fn look_and_edit<A: IpAddress>(
        &mut self,
        guard: &TunnelGuard<A>,
    ) -> Result<(Dropped, bool), RuleError> {
        if let Some((tunnel, frame)) = self.kept.get(TunnelGuard::<A>::FAMILY)
            && *tunnel == guard.tunnel
            && let Some(found) = found(guard).await?
            && found.frame == *frame
        {
            let Some(text) = guard.edits(&found) else { return Ok((found.dropped, false)) };
            apply_nftables(&text).await?;
            return Ok((found.dropped, true));
        }
        apply_nftables(&guard.whole()).await?;
        let frame = found(guard).await?.map(|found| found.frame).unwrap_or_default();
        self.kept.insert(TunnelGuard::<A>::FAMILY, (guard.tunnel, frame));
        Ok((Dropped::default(), true))
    }
}

/// What there is of a guard; nothing if it can't be read, as when somebody gave the table flags,
/// which nft 1.0.6 does not print as JSON.
async fn found<A: IpAddress>(guard: &TunnelGuard<A>) -> Result<Option<ListedGuard<A>>, RuleError> {
    let printed = list_table((TunnelGuard::<A>::FAMILY, &guard.table)).await?;
    Ok(printed.and_then(|text| ListedGuard::parse(&text).ok()))
}

/// Removes the guard of `networks` that an earlier run with --guard left, or else new peers would
/// not be heard.
pub async fn remove_left_guard(networks: Prefixes) {
    let table = table_name(networks);
    match remove_guards(|_, name| name == table).await {
        Ok(true) => info!("removed the guard of {networks} of an earlier run"),
        Ok(false) => {}
        Err(error) => warn!(
            "a guard of an earlier run may be left, which new peers don't pass: {}; if `nft list \
             tables` shows {table}, delete it",
            with_causes(&error)
        ),
    }
}

/// Removes the guards whose tables `is_meant` takes by family and name; whether there were any.
/// None were made where nft is not installed.
pub async fn remove_guards(is_meant: impl Fn(&str, &str) -> bool) -> Result<bool, RuleError> {
    match remove_tables(|family, name| is_guard(family, name) && is_meant(family, name)).await {
        Err(error) if error.is_missing_program() => Ok(false),
        result => result,
    }
}

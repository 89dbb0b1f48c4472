//! Keeps the guard of the tunnel's port as the peers are: sets it once they are known, follows
//! them, and checks it at each resync. Decides when; `guard` decides what to change.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::pending;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use crate::failure::{LogOnce, with_causes};
use crate::netfilter::guard::{Dropped, Found, Guard, removal, table_name};
use crate::netfilter::program::{NFT, ProgramError};
use crate::netfilter::reconciler::{RETRY, RuleError, RuleState};
use crate::route::Prefix;

/// Shortest pause between two edits: each starts nft twice, and the peers of a starting cluster
/// come one by one.
const EDIT_PAUSE: Duration = Duration::from_millis(100);

/// The state of a guard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardState {
    /// As of other rules.
    pub rules: RuleState,
    /// Addresses that may send.
    pub peers: usize,
    /// What it dropped, as of the last check.
    pub dropped: Dropped,
}

/// Keeps the guard of one tunnel's port.
#[derive(Debug)]
pub struct GuardKeeper {
    guard: Guard,
    resync: Duration,
    logged: LogOnce,
    state: watch::Sender<GuardState>,
}

impl GuardKeeper {
    /// Will guard `port` and check that every `resync`.
    pub fn new(port: u16, network: Prefix, resync: Duration) -> Self {
        Self {
            guard: Guard { port, network, peers: BTreeSet::new() },
            resync,
            logged: LogOnce::default(),
            state: watch::Sender::new(GuardState::default()),
        }
    }

    /// The state of the guard, and each change of it.
    pub fn state(&self) -> watch::Receiver<GuardState> {
        self.state.subscribe()
    }

    /// Whether the guard can be set here at all: nft is there, and may list tables.
    pub async fn is_possible() -> Result<(), RuleError> {
        NFT.run(&["-j", "list", "tables"], "", |_| {}).await?;
        Ok(())
    }

    /// Lets in the `addresses` of the peers, from the first time that those are known. What an
    /// earlier run left stays until then, and stays when this is dropped.
    pub async fn run<T>(
        mut self,
        mut peers: watch::Receiver<T>,
        addresses: impl Fn(&T) -> BTreeSet<Ipv4Addr>,
    ) -> Infallible {
        let mut is_set = false;
        // Before the peers are known there is nothing to keep.
        let mut pause = Duration::MAX;
        loop {
            let is_news = match timeout(pause, peers.changed()).await {
                Ok(Ok(())) => {
                    self.guard.peers = addresses(&peers.borrow_and_update());
                    true
                }
                // Its sender goes with the daemon, and so does this.
                Ok(Err(_)) => pending().await,
                Err(_elapsed) => !is_set,
            };
            pause = match self.reconcile(is_news).await {
                Ok(()) => {
                    is_set = true;
                    self.resync * 9 / 10
                }
                Err(error) => {
                    self.logged.once(&with_causes(&error), |text| {
                        error!(
                            "the guard of UDP port {} can't be kept: {text}; retrying",
                            self.guard.port
                        );
                    });
                    self.resync.min(RETRY)
                }
            };
            sleep(EDIT_PAUSE).await;
        }
    }

    /// Makes the kernel's guard this one. If `is_news`, a difference is no fault.
    async fn reconcile(&mut self, is_news: bool) -> Result<(), RuleError> {
        let result = self.look_and_edit().await;
        self.state.send_modify(|GuardState { rules, peers, dropped }| {
            rules.is_settled = true;
            rules.is_in_place = result.is_ok();
            match &result {
                Ok((found, is_changed)) => {
                    *peers = self.guard.peers.len();
                    *dropped = *found;
                    rules.checks += 1;
                    rules.repairs += u64::from(*is_changed && !is_news);
                }
                Err(_) => rules.failures += 1,
            }
        });
        let (_, is_changed) = result?;
        let (port, count) = (self.guard.port, self.guard.peers.len());
        if self.logged.forget() {
            info!("the guard of UDP port {port} is in place");
        } else if is_changed && is_news {
            info!("Peers that may send to UDP port {port}: {count}");
        } else if is_changed {
            info!("The guard of UDP port {port} was changed; repaired it");
        }
        Ok(())
    }

    async fn look_and_edit(&self) -> Result<(Dropped, bool), RuleError> {
        let found = self.found().await?;
        let Some(text) = self.guard.transaction(&found) else { return Ok((found.dropped, false)) };
        NFT.run(&["-f", "-"], &text, |_| {}).await?;
        Ok((found.dropped, true))
    }

    async fn found(&self) -> Result<Found, RuleError> {
        let table = table_name(self.guard.port);
        match NFT.print(&["-j", "list", "table", "ip", &table]).await {
            Ok(text) => Ok(Found::parse(&text)?),
            Err(error) if error.is_absence() => Ok(Found::default()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Removes the guard of `port` that an earlier run with --guard left, or else new peers would not
/// be heard.
pub async fn remove_left_guard(port: u16) {
    let table = table_name(port);
    match remove_guards(|name| name == table).await {
        Ok(true) => info!("removed the guard of UDP port {port} of an earlier run"),
        Ok(false) => {}
        Err(error) => warn!(
            "a guard of an earlier run may be left, which new peers don't pass: {}; if `nft list \
             tables` shows {table}, delete it",
            with_causes(&error)
        ),
    }
}

/// Removes the guards whose tables' names `is_meant` takes; whether there were any. None were made
/// where nft is not installed.
pub async fn remove_guards(is_meant: impl Fn(&str) -> bool) -> Result<bool, RuleError> {
    let tables = match NFT.print(&["-j", "list", "tables"]).await {
        Err(ProgramError::Missing(_)) => return Ok(false),
        tables => tables?,
    };
    let Some(text) = removal(&tables, is_meant)? else { return Ok(false) };
    NFT.run(&["-f", "-"], &text, |_| {}).await?;
    Ok(true)
}

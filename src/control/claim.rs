//! Keeps this node's claim on its PublicIP while it runs, and raises an alarm while another node
//! has it. Packets flow whatever becomes of the claim.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::Receiver;
use tokio::time::{Instant, timeout};
use tracing::{debug, error, info, warn};

use crate::control::backoff::jittered;
use crate::control::changes::next_change;
use crate::control::error::{StoreError, StoreResult, field_of};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::control::manager::SubnetManager;
use crate::control::store::Leased;
use crate::failure::with_causes;

/// How often in its life a claim is kept alive, so that two tries may fail.
const KEEPS_PER_TTL: u32 = 3;
/// How often in its life it is retried after a failure.
const RETRIES_PER_TTL: u32 = 10;
/// Share by which both are spread.
const KEEP_JITTER: f64 = 0.2;
/// Between two alarms about the same address.
const ALARM_PERIOD: Duration = Duration::from_secs(60 * 60);
/// Between two readings of the nodes' names, of which each is a claim of 150 bytes: a thousand
/// nodes read 17 times a second at most, and not at all while no new one comes.
const NAMES_PAUSE: Duration = Duration::from_secs(60);
/// How long a stop may wait for the store to take the claim back.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

impl SubnetManager {
    /// Gives up the claim, for a node that stops: another may have the address at once. Waits a
    /// moment at most, and not at all for a store that is known to be away.
    pub async fn release_claim(&self) {
        let is_up = self.status.edit().store.up;
        if let Some(store) = self.store.leased() {
            timeout(RELEASE_TIMEOUT, store.release_claim(is_up)).await.ok();
        }
    }

    /// Claims `address`, or keeps that claim alive, and returns whether it is claimed. A store
    /// that takes no claims of this node is logged once, and no reason not to carry packets.
    pub(super) async fn claim(&self, store: &Leased, address: IpAddr) -> StoreResult<bool> {
        let field = field_of(address);
        let claimed = store.claim(address, self.timing.claim_ttl).await;
        let refusal = match &claimed {
            Err(error @ (StoreError::Refused { .. } | StoreError::File { .. })) => {
                Some(with_causes(error))
            }
            Ok(()) => None,
            Err(_) => return claimed.map(|()| true),
        };
        let is_claimed = refusal.is_none();
        let before = std::mem::replace(&mut self.status.edit().claim_refusal, refusal.clone());
        match refusal {
            Some(why) if before.as_ref() != Some(&why) => warn!(
                "Cannot claim {field} {address}: {why}. Another node with the same {field} would \
                 not be noticed; going on without a claim, and trying again"
            ),
            None if before.is_some() => info!("{field} {address} is claimed now"),
            Some(_) | None => {}
        }
        Ok(is_claimed)
    }

    /// Keeps the claim on the PublicIP, and claims the next one when the node moves.
    pub(super) async fn keep_claim(
        &self,
        store: &Leased,
        mut attributes: Receiver<LeaseAttributes>,
        mut peers: Receiver<Arc<Peers>>,
    ) -> Infallible {
        let mut names_at = Instant::now();
        let mut random = fastrand::Rng::new();
        let mut alarm_at = Instant::now();
        loop {
            let address = attributes.borrow_and_update().node_address();
            let kept = self.claim(store, address).await;
            match &kept {
                Ok(true) if self.status.set_duplicate(None) => {
                    let field = field_of(address);
                    info!("{field} {address} is claimed by no other node any more");
                    alarm_at = Instant::now();
                }
                Ok(_) => {}
                Err(error @ StoreError::Duplicate { holder, .. }) => {
                    self.status.set_duplicate(Some(holder));
                    if alarm_at <= Instant::now() {
                        alarm_at = Instant::now() + ALARM_PERIOD;
                        error!("ALARM: {error}. This node goes on carrying packets");
                    }
                }
                // The lease machine reports outages.
                Err(error) => debug!("Cannot keep the claim: {}", with_causes(error)),
            }
            if peers.has_changed().unwrap_or(false) && names_at <= Instant::now() {
                names_at = Instant::now() + NAMES_PAUSE;
                let peers = peers.borrow_and_update().clone();
                self.learn_names(&peers).await;
            }
            let times = if kept.is_ok() { KEEPS_PER_TTL } else { RETRIES_PER_TTL };
            let pause = jittered(self.timing.claim_ttl / times, KEEP_JITTER, &mut random);
            timeout(pause, next_change(&mut attributes)).await.ok();
        }
    }

    /// Reads the names of the nodes that claim an address, if a peer's is not known and the store
    /// shows them all at once. Best effort: a node that runs flanneld has none.
    async fn learn_names(&self, peers: &Peers) {
        let Some(store) = self.store.etcd() else { return };
        let known = Arc::clone(&self.status.edit().names);
        if peers.values().all(|peer| known.contains_key(&peer.attributes.node_address())) {
            return;
        }
        match store.names().await {
            Ok(names) => self.status.edit().names = Arc::new(names),
            Err(error) => debug!("Cannot read the names of the nodes: {}", with_causes(&error)),
        }
    }
}

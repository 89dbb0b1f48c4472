//! What the backend does when the interface beneath it changes: the overlay's MTU follows.

use std::sync::atomic::Ordering;

use tracing::{info, warn};

use crate::host::chain::chain;
use crate::host::mtu::followed_mtu_bytes;
use crate::host::underlay::Underlay;

use super::Keeper;

impl Keeper {
    /// Fits the overlay to what the interface beneath it has become.
    pub(super) async fn follow(&mut self, underlay: Underlay) {
        let before = std::mem::replace(&mut self.known, underlay);
        self.setup.external.name.clone_from(&self.known.name);
        self.setup.external.mtu_bytes = self.known.mtu_bytes;
        let Underlay { name, mtu_bytes: external_bytes } = &self.known;
        let configured_bytes = self.setup.settings.mtu_bytes;
        let mtu_bytes = match followed_mtu_bytes(*external_bytes, configured_bytes) {
            Ok(mtu_bytes) => mtu_bytes,
            Err(error) => {
                warn!("the overlay keeps its MTU of {}: {}", self.mtu_bytes, chain(&error));
                return;
            }
        };
        if mtu_bytes == self.mtu_bytes {
            self.tell_is_up();
            return;
        }
        let device = self.device_name().to_owned();
        match self.plane.overlay.follow_mtu(mtu_bytes).await {
            Ok(true) => info!(
                "the MTU of {name} went from {} to {external_bytes}, and that of {device} follows \
                 from {} to {mtu_bytes}; pods that are there already keep theirs",
                before.mtu_bytes, self.mtu_bytes
            ),
            Ok(false) => warn!(
                "the MTU of {name} went from {} to {external_bytes}, so {mtu_bytes} would suit \
                 {device}, but someone else set its MTU; left as it is",
                before.mtu_bytes
            ),
            Err(error) => {
                warn!("{device} cannot follow the MTU of {name}, trying again: {}", chain(&error));
                self.known = before;
                self.listen_again(&error).await;
                return;
            }
        }
        self.mtu_bytes = mtu_bytes;
        self.workers_mtu_bytes.store(mtu_bytes, Ordering::Relaxed);
        self.tell_is_up();
    }
}

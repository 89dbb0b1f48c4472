//! The alloc backend: a subnet and its `subnet.env`. Somebody else carries the packets.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;

use crate::backend::network::Setup;
use crate::backend::status::Teller;
use crate::control::lease::Peers;

/// A running alloc backend.
#[derive(Debug)]
pub struct AllocNetwork {
    teller: Teller,
}

impl AllocNetwork {
    /// There is nothing to set up.
    #[must_use]
    pub fn start(setup: &Setup) -> Self {
        let external = &setup.external;
        let description = format!("alloc: subnet {} only, carried by nobody here", setup.subnet);
        Self { teller: Teller::new(description, external.mtu_bytes, setup) }
    }

    pub(super) fn teller(&self) -> &Teller {
        &self.teller
    }

    /// Leaves the leases to others.
    pub async fn run(&mut self, _leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        std::future::pending().await
    }
}

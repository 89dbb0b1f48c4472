//! The alloc backend: a subnet and its `subnet.env`. Somebody else carries the packets.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;

use crate::backend::network::Setup;
use crate::backend::status::{Carrier, PlaneState, Teller};
use crate::control::lease::{LeaseAttributes, Peers};

/// A running alloc backend.
#[derive(Debug)]
pub struct AllocNetwork {
    attributes: watch::Sender<LeaseAttributes>,
    teller: Teller,
}

impl AllocNetwork {
    /// There is nothing to set up.
    #[must_use]
    pub fn start(setup: &Setup) -> Self {
        let external = &setup.external;
        let description = format!("alloc: subnet {} only, carried by nobody here", setup.subnet);
        let teller = Teller::new(description, external.mtu_bytes, external);
        Self { attributes: watch::Sender::new(setup.attributes.clone()), teller }
    }

    /// Its state, which stays.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<PlaneState> {
        self.teller.state.subscribe()
    }

    /// What this node says of itself.
    #[must_use]
    pub fn attributes(&self) -> watch::Receiver<LeaseAttributes> {
        self.attributes.subscribe()
    }

    /// Nobody that weftd knows.
    #[must_use]
    pub fn carrier(&self) -> Carrier {
        self.teller.carrier()
    }

    /// Leaves the leases to others.
    pub async fn run(&mut self, _leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        std::future::pending().await
    }
}

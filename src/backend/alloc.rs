//! The alloc backend: a subnet and its `subnet.env`. Somebody else carries the packets.

use std::convert::Infallible;

use crate::backend::address::Beneath;
use crate::backend::network::{Setup, StartError};
use crate::backend::status::Teller;

/// A running alloc backend.
#[derive(Debug)]
pub struct AllocNetwork {
    beneath: Beneath,
    teller: Teller,
}

impl AllocNetwork {
    /// There is nothing to set up.
    pub fn start(setup: &Setup) -> Result<Self, StartError> {
        let failed = |source| StartError::Netlink { kind: "alloc", source };
        let beneath = Beneath::new(setup).map_err(failed)?;
        let description = format!("alloc: subnet {} only, carried by nobody here", setup.subnet);
        let teller = Teller::new(description, setup.external.mtu_bytes, setup);
        Ok(Self { beneath, teller })
    }

    pub(super) fn teller(&self) -> &Teller {
        &self.teller
    }

    /// Follows the interface, for the lease and `subnet.env`; leaves the leases to others.
    pub async fn run(&mut self) -> Infallible {
        loop {
            self.beneath.changed(&self.teller).await;
        }
    }
}

//! The alloc backend: a subnet and its `subnet.env`. Something else carries the packets.

use std::convert::Infallible;

use crate::backend::setup::{INTERFACE_PERIOD, Setup, SetupError};
use crate::backend::status::Reporter;
use crate::host::follower::HostFollower;

/// A running alloc backend.
pub struct AllocBackend {
    host: HostFollower,
    pub(super) reporter: Reporter,
}

impl AllocBackend {
    /// There is nothing to set up.
    pub fn start(setup: &Setup) -> Result<Self, SetupError> {
        let host = HostFollower::new(setup.following(Vec::new(), INTERFACE_PERIOD))?;
        let description = format!("alloc: subnet {} only, no data plane", setup.subnet);
        Ok(Self { host, reporter: Reporter::new(description, setup.external.mtu_bytes, setup) })
    }

    /// Follows the interface, for the lease and `subnet.env`. Leases of peers change nothing here.
    pub async fn run(&mut self) -> Infallible {
        loop {
            self.host.next().await;
            let external = self.host.external();
            self.reporter.follow(external, external.mtu_bytes);
            self.host.finish(true);
        }
    }
}

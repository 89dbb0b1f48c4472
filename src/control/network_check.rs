//! Whether the store still has the network that this node's lease was taken from. It is not
//! applied while the daemon runs, because every pod would lose its address: the operator is told.

use std::pin::Pin;

use tracing::warn;

use crate::config::network::NetworkConfig;
use crate::control::manager::SubnetManager;
use crate::route::Prefix;

/// Reads the configuration again after each listing, the first aside: a store that lost its data,
/// was replaced or was edited shows at the next one.
pub(super) struct NetworkCheck<'a> {
    network: Prefix,
    /// What was last said, so that it is said once.
    told: Option<Prefix>,
    listed: bool,
    under_way: Option<Pin<Box<dyn Future<Output = Option<Prefix>> + Send + 'a>>>,
}

impl<'a> NetworkCheck<'a> {
    /// For a lease from `network`.
    pub(super) fn new(network: Prefix) -> Self {
        Self { network, told: None, listed: false, under_way: None }
    }

    /// Everything was listed: asks for the configuration, beside all that goes on.
    pub(super) fn begin(&mut self, manager: &'a SubnetManager) {
        if std::mem::replace(&mut self.listed, true) {
            self.under_way = Some(Box::pin(network_of(manager)));
        }
    }

    /// Waits until the configuration is there, and says what is to be said. For ever if it was not
    /// asked for.
    pub(super) async fn done(&mut self) {
        let Some(under_way) = &mut self.under_way else { return std::future::pending().await };
        let found = under_way.await;
        self.under_way = None;
        let other = found.filter(|found| *found != self.network);
        if let Some(other) = other.filter(|_| other != self.told) {
            warn!(
                "The network configuration in the store is now for {other}, and not for {}, in \
                 which this node has its subnet; going on with {} as it is. To apply the new one, \
                 restart weftd and then the pods of this host",
                self.network, self.network
            );
        }
        // One that cannot be read is not news of another one.
        if found.is_some() {
            self.told = other;
        }
    }
}

async fn network_of(manager: &SubnetManager) -> Option<Prefix> {
    // Not there or not readable: leases are followed all the same, and the start tells why.
    let bytes = manager.network_config().await.ok()?;
    NetworkConfig::parse(&bytes).ok().map(|config| config.network)
}

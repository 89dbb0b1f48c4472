//! What a start goes by: the network configuration and the interface, and flanneld's phrases for
//! what is wrong with them.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use tokio::sync::watch;

use crate::backend::setup::BackendSettings;
use crate::backend::status::PlaneState;
use crate::config::network::NetworkConfig;
use crate::config::options::InterfaceOptions;
use crate::control::cache::Known;
use crate::control::run::Held;
use crate::daemon::cache_writer::CacheWriter;
use crate::host::interface::{ExternalAddress, ExternalInterface};
use crate::route::Families;
use crate::status::TunnelEnd;

/// flanneld's phrase, which operators grep for.
pub(super) const BACKEND_PHRASE: &str = "Error fetching backend";
/// flanneld's phrase for a store that cannot be used.
pub(super) const MANAGER_PHRASE: &str = "Failed to create SubnetManager";
/// flanneld's phrase for a node that gets no lease or no device.
pub(super) const REGISTRATION_PHRASE: &str = "Error registering network";

/// The network configuration, with the settings of its backend.
#[derive(Debug, Clone)]
pub(super) struct Configured {
    pub(super) network: NetworkConfig,
    pub(super) settings: BackendSettings,
}

impl Configured {
    pub(super) fn new(network: NetworkConfig) -> anyhow::Result<Self> {
        let settings = BackendSettings::parse(&network).context(BACKEND_PHRASE)?;
        Ok(Self { network, settings })
    }

    /// Of which families the interface has to have an address.
    pub(super) fn families(&self) -> Families<(), ()> {
        match self.settings.kind().has_ipv6_underlay() {
            true => self.network.ranges.map(|_| (), |_| ()),
            false => self.network.networks().first().families(),
        }
    }
}

/// What a run of the control plane leaves to the next one of this process: that one has a tunnel to
/// lose, and its pods have this subnet.
#[derive(Debug, Clone)]
pub(super) struct Former {
    pub(super) plan: Configured,
    /// The options by which the interface was found.
    pub(super) interface: InterfaceOptions,
    /// What the run began with.
    pub(super) began_with: Held,
    /// What it has learnt of the store, if it has.
    pub(super) known: watch::Receiver<Option<Arc<Known>>>,
    pub(super) plane: watch::Receiver<PlaneState>,
    /// The writer of the cache, if one is kept.
    pub(super) cache: Option<Arc<CacheWriter>>,
}

impl Former {
    /// The subnet, with the peers as far as they are known.
    pub(super) fn held(&self) -> Held {
        let known = self.known.borrow().as_deref().cloned();
        known.map_or_else(|| self.began_with.clone(), Held::Cached)
    }

    /// Has the cache hold all that is known, for the weftd that goes on.
    pub(super) async fn save_cache(&self) {
        let known = self.known.borrow().clone();
        if let (Some(cache), Some(known)) = (&self.cache, known) {
            cache.save(known).await;
        }
    }

    /// The interface, with the address that the tunnel has: the next run follows it from there.
    pub(super) fn external(&self) -> ExternalInterface {
        let plane = self.plane.borrow();
        let mut external = plane.external.clone();
        let (v4, v6) = (external.v4(), external.v6());
        match plane.tunnel {
            Some(TunnelEnd::Udp(SocketAddr::V4(at))) => {
                let v4 = v4.map(|v4| ExternalAddress { address: *at.ip(), ..v4 });
                external.addresses = Families::new(v4, v6).unwrap_or(external.addresses);
            }
            Some(TunnelEnd::Udp(SocketAddr::V6(at))) => {
                let v6 = v6.map(|v6| ExternalAddress { address: *at.ip(), ..v6 });
                external.addresses = Families::new(v4, v6).unwrap_or(external.addresses);
            }
            Some(TunnelEnd::Vxlan { .. } | TunnelEnd::Wireguard { .. }) | None => {}
        }
        external
    }
}

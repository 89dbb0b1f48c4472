//! What a start goes by: the network configuration and the interface, and flanneld's phrases for
//! what is wrong with them.

use anyhow::Context;

use crate::backend::setup::BackendSettings;
use crate::config::network::NetworkConfig;
use crate::config::options::InterfaceOptions;
use crate::host::interface::{ExternalInterface, discover};

/// flanneld's phrase, which operators grep for.
pub(super) const BACKEND_PHRASE: &str = "Error fetching backend";
/// flanneld's phrase for a store that cannot be used.
pub(super) const MANAGER_PHRASE: &str = "Failed to create SubnetManager";
/// flanneld's phrase for a node that gets no lease or no device.
pub(super) const REGISTRATION_PHRASE: &str = "Error registering network";

/// The network configuration, with the settings of its backend.
#[derive(Debug)]
pub(super) struct Configured {
    pub(super) network: NetworkConfig,
    pub(super) settings: BackendSettings,
}

impl Configured {
    pub(super) fn new(network: NetworkConfig) -> anyhow::Result<Self> {
        let settings = BackendSettings::parse(&network.backend).context(BACKEND_PHRASE)?;
        Ok(Self { network, settings })
    }
}

/// The interface that carries the tunnel, as of now.
pub(super) async fn external_interface(
    options: &InterfaceOptions,
) -> anyhow::Result<ExternalInterface> {
    Ok(discover(options).await?)
}

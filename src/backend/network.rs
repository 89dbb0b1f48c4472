//! The seam between the daemon and its backends: what a backend's settings are, what a node says
//! of itself with them, and a running backend that follows the leases.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::warn;

use crate::backend::alloc::AllocNetwork;
use crate::backend::extension::{self, ExtensionError, ExtensionNetwork};
use crate::backend::host_gw::{self, HostGwNetwork};
use crate::backend::status::View;
use crate::backend::udp::{self, UdpError, UdpNetwork, UdpReserved, UdpSetup};
use crate::backend::vxlan::{self, VxlanNetwork};
use crate::backend::{BackendError, BackendKind};
use crate::config::network::{
    BackendConfig, ExtensionBackendConfig, NetworkConfigError, UdpBackendConfig, VxlanBackendConfig,
};
use crate::config::options::{EngineChoice, InterfaceOptions, OffloadChoice, WorkersChoice};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::control::status::ControlStatus;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::OVERLAY_MTU_BYTES_MIN;
use crate::host::netlink::NetlinkError;
use crate::route::Prefix;

/// A backend with its own part of the network configuration, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settings {
    /// The userspace dataplane.
    Udp(UdpBackendConfig),
    /// The kernel's VXLAN.
    Vxlan(VxlanBackendConfig),
    /// Plain routes.
    HostGw,
    /// A subnet only.
    Alloc,
    /// Commands.
    Extension(ExtensionBackendConfig),
}

/// Why the network configuration's `Backend` is no use.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Its type.
    #[error(transparent)]
    Kind(#[from] BackendError),
    /// One of its keys.
    #[error(transparent)]
    Value(#[from] NetworkConfigError),
}

/// Why a backend cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The udp backend's reason.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The extension's reason.
    #[error(transparent)]
    Extension(#[from] ExtensionError),
    /// The interface leaves no sensible overlay MTU.
    #[error(
        "the external interface has MTU {external_bytes}, which leaves less than \
         {OVERLAY_MTU_BYTES_MIN} bytes in a vxlan tunnel; choose another interface (--iface) or \
         correct its MTU"
    )]
    NoRoom {
        /// MTU of the external interface.
        external_bytes: u32,
    },
    /// The kernel can't be asked, or refused.
    #[error("cannot set up the {kind} backend")]
    Netlink {
        /// The backend.
        kind: &'static str,
        /// The kernel's part.
        source: NetlinkError,
    },
    /// Routes between hosts need their real addresses.
    #[error(
        "the host-gw backend needs the interface's own address as PublicIP, but they are {address} \
         and {public_address}; leave --public-ip out, or choose a backend with a tunnel"
    )]
    NotTheInterfacesAddress {
        /// The interface's.
        address: std::net::Ipv4Addr,
        /// The advertised one.
        public_address: std::net::Ipv4Addr,
    },
}

/// What a backend is started with.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The interface that carries the traffic.
    pub external: ExternalInterface,
    /// How it was found, to find its next address.
    pub interface: InterfaceOptions,
    /// Whether the backend follows that.
    pub follow_address: bool,
    /// The backend and its own settings.
    pub settings: Settings,
    /// The whole overlay.
    pub network: Prefix,
    /// The overlay of the last run, if it was another: what that run left behind lies in it.
    pub former_network: Option<Prefix>,
    /// This host's lease.
    pub subnet: Prefix,
    /// What this node says of itself, as [`Settings::introduce`] made it.
    pub attributes: LeaseAttributes,
    /// Tells whether the peers are from the store, or from the cache of a start without it.
    pub control: Arc<ControlStatus>,
    /// Offloads that may be used by workers.
    pub offload: OffloadChoice,
    /// The engine that moves the packets of workers.
    pub engine: EngineChoice,
    /// How many workers share the work.
    pub workers: WorkersChoice,
}

/// What a backend is given to hold of the host, before the store hears of the node.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The interface that carries the traffic.
    pub external: &'a ExternalInterface,
    /// The whole overlay.
    pub network: Prefix,
    /// This host's lease of the last run, which it probably gets again.
    pub previous_subnet: Option<Prefix>,
    /// Offloads that may be used by workers.
    pub offload: OffloadChoice,
    /// How many workers share the work.
    pub workers: WorkersChoice,
}

/// What a backend holds of the host. Nothing that it could be refused is left to chance once the
/// node has a lease.
#[derive(Debug)]
pub enum Reserved {
    /// Port, device and route of the userspace dataplane.
    Udp(UdpReserved),
    /// The kernel's backends share what they make with later runs.
    Nothing,
}

/// A running backend.
pub enum Network {
    /// The userspace dataplane.
    Udp(Box<UdpNetwork>),
    /// The kernel's VXLAN.
    Vxlan(Box<VxlanNetwork>),
    /// Plain routes.
    HostGw(Box<HostGwNetwork>),
    /// A subnet only.
    Alloc(Box<AllocNetwork>),
    /// Commands.
    Extension(Box<ExtensionNetwork>),
}

impl Settings {
    /// Reads the backend's part of the network configuration.
    pub fn parse(backend: &BackendConfig) -> Result<Self, SettingsError> {
        let settings = &backend.settings;
        Ok(match BackendKind::parse(&backend.kind)? {
            BackendKind::Udp => Self::Udp(UdpBackendConfig::parse(settings)?),
            BackendKind::Vxlan => Self::Vxlan(VxlanBackendConfig::parse(settings)?),
            BackendKind::HostGw => Self::HostGw,
            BackendKind::Alloc => Self::Alloc,
            BackendKind::Extension => Self::Extension(ExtensionBackendConfig::parse(settings)?),
        })
    }

    /// The backend.
    #[must_use]
    pub fn kind(&self) -> BackendKind {
        match self {
            Self::Udp(_) => BackendKind::Udp,
            Self::Vxlan(_) => BackendKind::Vxlan,
            Self::HostGw => BackendKind::HostGw,
            Self::Alloc => BackendKind::Alloc,
            Self::Extension(_) => BackendKind::Extension,
        }
    }

    /// Whether [`Self::introduce`] goes by what the node said of itself before.
    #[must_use]
    pub fn goes_by_former(&self) -> bool {
        match self {
            Self::Vxlan(_) => true,
            Self::Udp(_) | Self::HostGw | Self::Alloc | Self::Extension(_) => false,
        }
    }

    /// Takes what another program may have, such as a port, and finds out what the host refuses.
    /// To be done before the store hears of the node.
    pub async fn reserve(&self, claim: Claim<'_>) -> Result<Reserved, StartError> {
        match self {
            Self::Udp(settings) => Ok(Reserved::Udp(udp::reserve(settings, claim).await?)),
            Self::Vxlan(settings) => {
                vxlan::check_room(settings, claim.external)?;
                Ok(Reserved::Nothing)
            }
            Self::HostGw | Self::Alloc | Self::Extension(_) => Ok(Reserved::Nothing),
        }
    }

    /// What the node says of itself, before it has a subnet. `former` is what its lease in the
    /// store says from an earlier run.
    pub async fn introduce(
        &self,
        external: &ExternalInterface,
        former: Option<&LeaseAttributes>,
    ) -> Result<LeaseAttributes, StartError> {
        let public_ip = external.public_address;
        match self {
            Self::Udp(_) | Self::Alloc => Ok(LeaseAttributes::udp(public_ip)),
            Self::Vxlan(settings) => vxlan::introduce(settings, external, former).await,
            Self::HostGw => host_gw::introduce(external),
            Self::Extension(settings) => Ok(extension::introduce(settings, external).await?),
        }
    }
}

impl Network {
    /// Sets up what carries the packets, peers aside, with what the settings reserved.
    pub async fn start(setup: Setup, reserved: Reserved) -> Result<Self, StartError> {
        setup.warn_of_idle_flags();
        if let (Settings::Udp(settings), Reserved::Udp(reserved)) = (&setup.settings, reserved) {
            let settings = *settings;
            let network = UdpNetwork::start(udp_setup(setup, settings), reserved).await?;
            return Ok(Self::Udp(Box::new(network)));
        }
        match setup.settings.clone() {
            Settings::Udp(_) => unreachable!("the udp backend reserves its port"),
            Settings::Vxlan(settings) => {
                let network = VxlanNetwork::start(setup, settings).await?;
                Ok(Self::Vxlan(Box::new(network)))
            }
            Settings::HostGw => Ok(Self::HostGw(Box::new(HostGwNetwork::start(setup)?))),
            Settings::Alloc => Ok(Self::Alloc(Box::new(AllocNetwork::start(&setup)?))),
            Settings::Extension(settings) => {
                let network = ExtensionNetwork::start(&setup, settings).await?;
                Ok(Self::Extension(Box::new(network)))
            }
        }
    }

    /// What the rest of the daemon sees of it.
    #[must_use]
    pub fn view(&self) -> View {
        match self {
            Self::Udp(network) => network.view(),
            Self::Vxlan(network) => network.teller().view(),
            Self::HostGw(network) => network.teller().view(),
            Self::Alloc(network) => network.teller().view(),
            Self::Extension(network) => network.teller().view(),
        }
    }

    /// Follows the leases, and makes again what breaks. Runs until it is dropped, which ends what
    /// only weftd itself could carry on, and leaves the rest in place for the next run.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        match self {
            Self::Udp(network) => network.run(leases).await,
            Self::Vxlan(network) => network.run(leases).await,
            Self::HostGw(network) => network.run(leases).await,
            Self::Alloc(network) => network.run().await,
            Self::Extension(network) => network.run(leases).await,
        }
    }
}

impl Setup {
    /// Flags that shape workers do nothing where there are none.
    fn warn_of_idle_flags(&self) {
        let kind = self.settings.kind();
        let given = [
            ("--engine", self.engine != EngineChoice::Auto),
            ("--workers", self.workers != WorkersChoice::Auto),
            ("--offload", !self.offload.automatic),
        ];
        for (flag, _) in given.iter().filter(|(_, is_given)| *is_given && kind != BackendKind::Udp)
        {
            warn!("{flag} has no effect: the {} backend has no workers", kind.name());
        }
    }
}

fn udp_setup(setup: Setup, settings: UdpBackendConfig) -> UdpSetup {
    let Setup { external, interface, follow_address, network, subnet, .. } = setup;
    let Setup { offload, engine, .. } = setup;
    UdpSetup { external, interface, follow_address, settings, network, subnet, offload, engine }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::network::NetworkConfig;

    fn parse(backend: &str) -> Result<Settings, SettingsError> {
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{backend}}}"#);
        Settings::parse(&NetworkConfig::parse(text.as_bytes()).unwrap().backend)
    }

    #[test]
    fn each_type_is_read_with_its_own_keys() {
        for kind in BackendKind::ALL {
            let settings = parse(&format!(r#"{{"Type":"{}"}}"#, kind.name())).unwrap();
            assert_eq!(settings.kind(), kind);
        }
        let error = parse(r#"{"Type":"vxlan","VNI":"one"}"#).unwrap_err().to_string();
        assert!(error.contains("Backend.VNI"), "{error}");
        let error = parse(r#"{"Type":"wireguard"}"#).unwrap_err().to_string();
        assert!(error.contains("is not built"), "{error}");
    }
}

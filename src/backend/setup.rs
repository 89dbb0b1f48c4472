//! What a backend is started with: its settings, the interface, the lease; and why it can't start.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::backend::kind::{BackendError, BackendKind};
use crate::config::network::{
    BackendConfig, ExtensionBackendConfig, NetworkConfigError, UdpBackendConfig, VxlanBackendConfig,
};
use crate::config::options::{EngineChoice, InterfaceOptions, OffloadChoice, WorkersChoice};
use crate::control::lease::LeaseAttributes;
use crate::control::status::ControlStatus;
use crate::host::follower::Following;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::OVERLAY_MTU_BYTES_MIN;
use crate::host::netlink::NetlinkError;
use crate::route::Prefix;

/// The longest time between two listings for backends all of whose changes the kernel reports: it
/// heals whatever a lost event hid. A listing costs far below a millisecond.
pub(super) const INTERFACE_PERIOD: Duration = Duration::from_secs(60);

/// A backend with its own part of the network configuration, parsed.
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

/// What is wrong with the network configuration's `Backend`.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Its type.
    #[error(transparent)]
    Kind(#[from] BackendError),
    /// One of its keys.
    #[error(transparent)]
    Value(#[from] NetworkConfigError),
}

/// Why a backend can't start on this host.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
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
    #[error("cannot set up the backend")]
    Netlink(#[from] NetlinkError),
    /// Routes between hosts need their real addresses.
    #[error(
        "the host-gw backend needs the interface's own address as PublicIP, but they are {address} \
         and {public_address}; leave --public-ip out, or choose a backend with a tunnel"
    )]
    NotTheInterfacesAddress {
        /// The interface's.
        address: Ipv4Addr,
        /// The advertised one.
        public_address: Ipv4Addr,
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
    /// What this node publishes with it, as [`Settings::introduce`] made it.
    pub attributes: LeaseAttributes,
    /// Tells whether the peers are from the store, or from the cache of a start without it.
    pub control: Arc<ControlStatus>,
    /// Offloads that workers may use.
    pub offload: OffloadChoice,
    /// The engine that moves the packets of workers.
    pub engine: EngineChoice,
    /// How many workers share the work.
    pub workers: WorkersChoice,
}

/// What a backend reserves on the host with, before the store hears of the node.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The interface that carries the traffic.
    pub external: &'a ExternalInterface,
    /// The whole overlay.
    pub network: Prefix,
    /// This host's lease of the last run, which it probably gets again.
    pub previous_subnet: Option<Prefix>,
    /// Offloads that workers may use.
    pub offload: OffloadChoice,
    /// How many workers share the work.
    pub workers: WorkersChoice,
}

impl Settings {
    /// Parses the backend's part of the network configuration.
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

    /// Whether what the node publishes depends on what it published before.
    #[must_use]
    pub fn goes_by_former(&self) -> bool {
        self.kind() == BackendKind::Vxlan
    }
}

impl Setup {
    /// What the backend follows of the host: routes to `networks`, listed every `period` at least.
    pub(super) fn following(&self, networks: Vec<Prefix>, period: Duration) -> Following {
        Following {
            external: self.external.clone(),
            interface: self.interface.clone(),
            follow_address: self.follow_address,
            networks,
            hears_all_routes: false,
            period,
        }
    }

    /// Warns of flags for workers where there are none.
    pub(super) fn warn_of_idle_flags(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::network::NetworkConfig;

    fn parse(backend: &str) -> Result<Settings, SettingsError> {
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{backend}}}"#);
        Settings::parse(&NetworkConfig::parse(text.as_bytes()).unwrap().backend)
    }

    #[test]
    fn each_type_parses_its_own_keys() {
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

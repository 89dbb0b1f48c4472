//! A running backend, whichever it is: all that the daemon knows of backends. The top of this
//! folder; no other file in it may import this one.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::warn;

use crate::backend::closure;
use crate::backend::cloud::{self, CloudBackend, CloudReserved};
use crate::backend::error::StartResult;
use crate::backend::extension::{self, ExtensionBackend};
use crate::backend::family::{VXLAN_NAMES, WIREGUARD_NAMES};
use crate::backend::handover::{Handover, Offered};
use crate::backend::ipsec::{self, IpsecBackend, IpsecReserved};
use crate::backend::kernel::{KernelBackend, Means};
use crate::backend::setup::{BackendSettings, Claim, Setup, addresses, warn_of_idle_flags};
use crate::backend::status::View;
use crate::backend::tunnel_device::{refuse_anothers, remove_others};
use crate::backend::udp::{self, UdpBackend, UdpReserved};
use crate::backend::wireguard::{self, WireguardBackend, WireguardReserved};
use crate::backend::{host_gw, ipip, vxlan};
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::config::network::ExtensionBackendConfig;
use crate::control::lease::{LeaseAttributes, Peers};
use crate::failure::with_causes;
use crate::host::netlink;
use crate::host::tables::edit::remove_own_routes;
use crate::route::Prefixes;

/// A backend that has got what the host or another program might refuse: with a lease, nothing may
/// be refused.
#[derive(Debug)]
pub struct Prepared {
    /// What the node publishes with its lease.
    pub attributes: LeaseAttributes,
    reserved: Reserved,
}

/// What each backend starts with.
#[derive(Debug)]
enum Reserved {
    Udp(Box<UdpReserved>),
    Kernel(Means),
    Wireguard(Box<WireguardReserved>),
    Ipsec(Box<IpsecReserved>),
    Cloud(Box<CloudReserved>),
    Extension(ExtensionBackendConfig),
}

/// A running backend.
pub enum Backend {
    /// The userspace dataplane.
    Udp(Box<UdpBackend>),
    /// VXLAN, plain routes, or nothing.
    Kernel(Box<KernelBackend>),
    /// WireGuard.
    Wireguard(Box<WireguardBackend>),
    /// IPsec.
    Ipsec(Box<IpsecBackend>),
    /// Routes of a cloud's network.
    Cloud(Box<CloudBackend>),
    /// Commands.
    Extension(Box<ExtensionBackend>),
}

impl BackendSettings {
    /// What tunnel devices of the kernel's it may have.
    fn device_names(&self) -> Vec<String> {
        match self {
            Self::Vxlan(settings) => VXLAN_NAMES.map(|it| format!("{it}{}", settings.vni)).into(),
            Self::Ipip { .. } => vec![ipip::NAME.to_owned()],
            Self::Wireguard(_) => WIREGUARD_NAMES.map(str::to_owned).into(),
            Self::Udp(_)
            | Self::HostGw
            | Self::Ipsec(_)
            | Self::Cloud(..)
            | Self::Alloc
            | Self::Extension(_) => Vec::new(),
        }
    }

    /// Reserves what another program may have, such as a port, and finds out what the host refuses
    /// and what the node publishes, before anything is written to the store. `former` is what its
    /// lease in the store says from an earlier run.
    pub async fn prepare(
        &self,
        claim: Claim<'_>,
        former: Option<&LeaseAttributes>,
    ) -> StartResult<Prepared> {
        if self.kind().carried_by() != CarriedBy::Workers {
            let reason = "the network configuration has another Backend now";
            claim.handover.refuse(reason).await?;
            warn_of_idle_flags(self.kind(), claim.dataplane);
        }
        // Its route to the whole network would be in the way.
        if self.kind() != BackendKind::Wireguard && wireguard::is_held(claim.handover).await? {
            claim.handover.clear().await;
        }
        refuse_anothers(&self.device_names(), &claim).await?;
        let external = claim.external;
        let (attributes, reserved) = match self {
            Self::Udp(settings) => {
                // It has a route to the whole network, as the TUN device will.
                if netlink::links().await?.iter().any(|link| link.is_wireguard) {
                    remove_others(&[], &[claim.networks]).await?;
                }
                let reserved = udp::reserve(settings, claim).await?;
                (reserved.attributes(external), Reserved::Udp(Box::new(reserved)))
            }
            Self::Vxlan(settings) => {
                let (attributes, device) = vxlan::prepare(settings, external, former).await?;
                (attributes, Reserved::Kernel(Means::Vxlan(device)))
            }
            Self::Wireguard(settings) => {
                let (attributes, it) = wireguard::prepare(settings, claim).await?;
                (attributes, Reserved::Wireguard(Box::new(it)))
            }
            Self::Ipsec(settings) => {
                let (attributes, it) = ipsec::prepare(settings, external).await?;
                (attributes, Reserved::Ipsec(Box::new(it)))
            }
            Self::Cloud(kind, settings) => {
                let reserved = cloud::prepare(*kind, settings, claim.previous_subnet)?;
                (addresses(kind.leased_as(), external), Reserved::Cloud(Box::new(reserved)))
            }
            Self::HostGw => (host_gw::introduce(external)?, Reserved::Kernel(Means::HostGw)),
            Self::Ipip { direct_routing } => {
                let attributes = ipip::prepare(*direct_routing, claim).await?;
                let means = Means::Ipip { direct_routing: *direct_routing };
                (attributes, Reserved::Kernel(means))
            }
            Self::Alloc => {
                let kind = BackendKind::Alloc.leased_as();
                (addresses(kind, external), Reserved::Kernel(Means::Alloc))
            }
            Self::Extension(settings) => {
                remove_others(&[], &[claim.networks]).await?;
                let attributes = extension::introduce(settings, external).await?;
                (attributes, Reserved::Extension(settings.clone()))
            }
        };
        Ok(Prepared { attributes, reserved })
    }
}

impl Prepared {
    /// Sets up what carries the packets, peers aside.
    pub async fn start(self, setup: Setup) -> StartResult<Backend> {
        // Their routes would lead packets away.
        let is_udp = matches!(self.reserved, Reserved::Udp(_));
        let networks_v4 = setup.networks_v4().into_iter().map(Prefixes::from);
        let networks = networks_v4.chain(setup.networks_v6().into_iter().map(Prefixes::from));
        for network in networks.filter(|it| !is_udp || *it != setup.networks.first()) {
            udp::remove_leftovers(network).await?;
        }
        let networks: Vec<_> =
            std::iter::once(setup.networks).chain(setup.former_networks).collect();
        let encrypts = matches!(self.reserved, Reserved::Wireguard(_) | Reserved::Ipsec(_));
        for network in networks.iter().filter(|it| !encrypts || **it != setup.networks) {
            closure::open(*network).await?;
        }
        match &self.reserved {
            Reserved::Udp(_) | Reserved::Ipsec(_) | Reserved::Cloud(_) => {
                remove_others(&[], &networks).await?;
            }
            Reserved::Kernel(means) => remove_others(&means.devices(), &networks).await?,
            Reserved::Wireguard(it) => remove_others(&it.devices(), &networks).await?,
            // Its commands may have made one by now.
            Reserved::Extension(_) => {}
        }
        if !matches!(self.reserved, Reserved::Ipsec(_))
            && let Err(error) = ipsec::remove_leftovers(&setup.networks_v4()).await
        {
            warn!("what the ipsec backend has left may take packets: {}", with_causes(&error));
        }
        if !is_udp {
            setup.handover.offer(Offered::Place);
        }
        Ok(match self.reserved {
            Reserved::Udp(reserved) => {
                remove_own_routes(Vec::new(), setup.networks_v6()).await?;
                Backend::Udp(Box::new(UdpBackend::start(setup, *reserved).await?))
            }
            Reserved::Kernel(means) => {
                Backend::Kernel(Box::new(KernelBackend::start(&setup, means).await?))
            }
            Reserved::Wireguard(reserved) => {
                Backend::Wireguard(Box::new(WireguardBackend::start(&setup, *reserved).await?))
            }
            Reserved::Ipsec(reserved) => {
                remove_own_routes(setup.networks_v4(), setup.networks_v6()).await?;
                Backend::Ipsec(Box::new(IpsecBackend::start(&setup, *reserved).await?))
            }
            Reserved::Cloud(reserved) => {
                Backend::Cloud(Box::new(CloudBackend::start(&setup, *reserved).await?))
            }
            Reserved::Extension(settings) => {
                remove_own_routes(setup.networks_v4(), setup.networks_v6()).await?;
                Backend::Extension(Box::new(ExtensionBackend::start(&setup, settings).await?))
            }
        })
    }
}

impl Backend {
    /// A start can't fail any more: the weftd whose place this one takes may end. Workers say so
    /// themselves.
    pub fn carries(&self, handover: &Handover) {
        let says_so = match self {
            Self::Udp(_) => true,
            Self::Wireguard(backend) => backend.waits(),
            Self::Kernel(_) | Self::Ipsec(_) | Self::Cloud(_) | Self::Extension(_) => false,
        };
        if !says_so {
            handover.is_carrying();
        }
    }

    /// What the rest of the daemon sees of it.
    pub fn view(&self) -> View {
        match self {
            Self::Udp(backend) => backend.view(),
            Self::Kernel(backend) => backend.reporter.view(Vec::new(), None),
            Self::Wireguard(backend) => backend.view(),
            Self::Ipsec(backend) => backend.reporter.view(Vec::new(), None),
            Self::Cloud(backend) => backend.kernel.reporter.view(Vec::new(), None),
            Self::Extension(backend) => backend.reporter.view(Vec::new(), None),
        }
    }

    /// Has nothing outlive weftd that would carry packets of a subnet that it has lost.
    pub fn let_go(&mut self) {
        match self {
            Self::Udp(backend) => backend.let_go(),
            Self::Wireguard(backend) => backend.let_go(),
            Self::Kernel(_) | Self::Ipsec(_) | Self::Cloud(_) | Self::Extension(_) => {}
        }
    }

    /// Follows the leases, and repairs what breaks. Runs until it is dropped, which ends what only
    /// weftd itself could carry on, and leaves the rest in place for the next run.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        match self {
            Self::Udp(backend) => backend.run(leases).await,
            Self::Kernel(backend) => backend.run(leases).await,
            Self::Wireguard(backend) => backend.run(leases).await,
            Self::Ipsec(backend) => backend.run(leases).await,
            Self::Cloud(backend) => backend.run(leases).await,
            Self::Extension(backend) => backend.run(leases).await,
        }
    }
}

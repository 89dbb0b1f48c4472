//! A running backend, whichever it is: all that the daemon knows of backends. The top of this
//! folder; no other file in it may import this one.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;

use crate::backend::alloc::AllocBackend;
use crate::backend::extension::{self, ExtensionBackend, ExtensionError};
use crate::backend::kernel::KernelBackend;
use crate::backend::setup::{Claim, Settings, Setup, SetupError};
use crate::backend::status::View;
use crate::backend::udp::{self, UdpBackend, UdpError, UdpReserved};
use crate::backend::{host_gw, vxlan};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::host::interface::ExternalInterface;

/// Why a backend cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A reason that several backends have.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The udp backend's reason.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// The extension's reason.
    #[error(transparent)]
    Extension(#[from] ExtensionError),
}

/// Port and device of the userspace dataplane; the kernel's backends share what they make with
/// later runs.
pub type Reserved = Option<UdpReserved>;

/// A running backend.
pub enum Backend {
    /// The userspace dataplane.
    Udp(Box<UdpBackend>),
    /// VXLAN or plain routes.
    Kernel(Box<KernelBackend>),
    /// A subnet only.
    Alloc(Box<AllocBackend>),
    /// Commands.
    Extension(Box<ExtensionBackend>),
}

impl Settings {
    /// Reserves what another program may have, such as a port, and finds out what the host refuses.
    /// To be done before anything is written to the store: with a lease, nothing may be refused.
    pub async fn reserve(&self, claim: Claim<'_>) -> Result<Reserved, StartError> {
        if !matches!(self, Self::Udp(_)) && !claim.handover.refuse() {
            return Err(SetupError::TakeOver.into());
        }
        match self {
            Self::Udp(settings) => return Ok(Some(udp::reserve(settings, claim).await?)),
            Self::Vxlan(settings) => vxlan::check_room(settings, claim.external)?,
            Self::HostGw | Self::Alloc | Self::Extension(_) => {}
        }
        Ok(None)
    }

    /// What the node publishes with its lease, before it has one. `former` is what its lease in the
    /// store says from an earlier run, `reserved` what the host granted.
    pub async fn introduce(
        &self,
        external: &ExternalInterface,
        former: Option<&LeaseAttributes>,
        reserved: Option<&UdpReserved>,
    ) -> Result<LeaseAttributes, StartError> {
        match self {
            Self::Udp(_) => Ok(LeaseAttributes {
                backend_data: reserved.and_then(UdpReserved::announcement),
                ..LeaseAttributes::udp(external.public_address)
            }),
            Self::Alloc => Ok(LeaseAttributes::udp(external.public_address)),
            Self::Vxlan(settings) => Ok(vxlan::introduce(settings, external, former).await?),
            Self::HostGw => Ok(host_gw::introduce(external)?),
            Self::Extension(settings) => Ok(extension::introduce(settings, external).await?),
        }
    }
}

impl Backend {
    /// Sets up what carries the packets, peers aside, with what the settings reserved.
    pub async fn start(setup: Setup, reserved: Reserved) -> Result<Self, StartError> {
        setup.warn_of_idle_flags();
        // Their routes would lead packets away.
        let is_udp = matches!(setup.settings, Settings::Udp(_));
        let other = setup.former_network.filter(|former| *former != setup.network);
        for network in other.into_iter().chain((!is_udp).then_some(setup.network)) {
            let removed = udp::remove_leftovers(network).await;
            removed.map_err(SetupError::Netlink)?;
        }
        if !is_udp {
            setup.handover.is_carrying();
        }
        Ok(match setup.settings.clone() {
            Settings::Udp(settings) => {
                let reserved = reserved.expect("the udp backend reserves its port");
                Self::Udp(Box::new(UdpBackend::start(setup, settings, reserved).await?))
            }
            Settings::Vxlan(settings) => {
                Self::Kernel(Box::new(KernelBackend::start(&setup, Some(settings)).await?))
            }
            Settings::HostGw => Self::Kernel(Box::new(KernelBackend::start(&setup, None).await?)),
            Settings::Alloc => Self::Alloc(Box::new(AllocBackend::start(&setup)?)),
            Settings::Extension(settings) => {
                Self::Extension(Box::new(ExtensionBackend::start(&setup, settings).await?))
            }
        })
    }

    /// What the rest of the daemon sees of it.
    pub fn view(&self) -> View {
        match self {
            Self::Udp(backend) => backend.view(),
            Self::Kernel(backend) => backend.reporter.view(),
            Self::Alloc(backend) => backend.reporter.view(),
            Self::Extension(backend) => backend.reporter.view(),
        }
    }

    /// Has nothing outlive weftd that would carry packets of a subnet that it has lost.
    pub fn let_go(&mut self) {
        match self {
            Self::Udp(backend) => backend.let_go(),
            Self::Kernel(_) | Self::Alloc(_) | Self::Extension(_) => {}
        }
    }

    /// Follows the leases, and repairs what breaks. Runs until it is dropped, which ends what only
    /// weftd itself could carry on, and leaves the rest in place for the next run.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        match self {
            Self::Udp(backend) => backend.run(leases).await,
            Self::Kernel(backend) => backend.run(leases).await,
            Self::Alloc(backend) => backend.run().await,
            Self::Extension(backend) => backend.run(leases).await,
        }
    }
}

//! The WireGuard devices: which there are, and that each is there with its key and its port. A
//! device that can stay stays, with its sessions.

use std::sync::Arc;

use crate::host::netlink::wireguard::{self, FoundDevice};
use crate::host::netlink::{self, NetlinkError, devices};
use crate::host::state::Link;
use crate::route::Prefixes;
use crate::stats::WorkerStats;
use crate::status::{Handshakes, Worker};
use crate::wireguard::difference::PeerEdit;
use crate::wireguard::keys::PrivateKey;

use super::plan::Plan;
use super::userspace::{Uapis, Userspace, UserspaceError};

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum WireguardError {
    /// The kernel knows none.
    #[error(
        "this kernel has no WireGuard: its module wireguard (Linux 5.6 and later) is not there, or \
         is not loaded from here; run `modprobe wireguard` on the host, or have weftd run \
         WireGuard itself (--wireguard=userspace)"
    )]
    NoModule(#[source] NetlinkError),
    /// Its name is taken.
    #[error("{0} is there and is no WireGuard device: remove or rename it (`ip link del {0}`)")]
    Foreign(&'static str),
    /// Its port is.
    #[error(
        "UDP port {port}, for {name}, is taken by another program (`ss -ulnp sport = :{port}`): \
         stop that, or choose another ListenPort"
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// The device.
        name: &'static str,
        /// What the kernel said.
        source: NetlinkError,
    },
    /// Backend.Mode asks for what this host has not.
    #[error(
        "Backend.Mode has WireGuard send over {family}, and weftd has no address of that family \
         to publish: {interface} has none that counts (a link-local one does not), or the network \
         configuration does not enable it; correct that, or choose another Mode"
    )]
    NoUnderlay {
        /// The family that is missing.
        family: &'static str,
        /// The external interface.
        interface: String,
    },
    /// This process can't run it.
    #[error(transparent)]
    Userspace(#[from] UserspaceError),
    /// The kernel said no.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// Who runs the devices.
#[derive(Debug, Clone)]
pub(super) enum WireguardDevice {
    /// The kernel.
    Kernel,
    /// This process.
    Userspace(Arc<Userspace>),
}

impl WireguardDevice {
    /// What the device with this name has.
    pub(super) async fn read(&self, name: &str) -> Result<FoundDevice, NetlinkError> {
        match self {
            Self::Kernel => wireguard::device(name).await,
            Self::Userspace(userspace) => Ok(userspace.read(name)),
        }
    }

    /// Makes the edits, and gives those that were refused with the reason.
    pub(super) async fn edit_peers<'a>(
        &self,
        name: &str,
        edits: &'a [PeerEdit],
    ) -> Vec<(&'a PeerEdit, NetlinkError)> {
        match self {
            Self::Kernel => wireguard::edit_peers(name, edits).await,
            Self::Userspace(userspace) => {
                userspace.edit_peers(name, edits);
                Vec::new()
            }
        }
    }

    /// Who carries its packets, for the log and the status.
    pub(super) fn carrier(&self) -> &'static str {
        match self {
            Self::Kernel => "the kernel",
            Self::Userspace(_) => "weftd's workers",
        }
    }

    /// What its workers count, if it is in this process.
    pub(super) fn stats(&self) -> Vec<Arc<WorkerStats>> {
        match self {
            Self::Kernel => Vec::new(),
            Self::Userspace(userspace) => userspace.stats(),
        }
    }

    /// What those workers are, in the same order.
    pub(super) fn workers(&self) -> Vec<Worker> {
        match self {
            Self::Kernel => Vec::new(),
            Self::Userspace(userspace) => userspace.workers(),
        }
    }

    /// What became of handshakes, if it is in this process.
    pub(super) fn handshakes(&self) -> Option<Handshakes> {
        match self {
            Self::Kernel => None,
            Self::Userspace(userspace) => Some(userspace.handshakes()),
        }
    }

    /// By which `wg show` reads the devices of these names, which run in this process.
    pub(super) fn open_uapis(&self, names: &[&'static str]) -> Uapis {
        match self {
            Self::Kernel => Uapis::default(),
            Self::Userspace(userspace) => Uapis::open(userspace, names),
        }
    }

    /// From here on devices carry packets: the overlay is `networks`, and this host has `subnets`.
    pub(super) fn begin(&self, networks: Prefixes, subnets: Prefixes) {
        match self {
            // It does so by routes and peers alone.
            Self::Kernel => {}
            Self::Userspace(userspace) => userspace.begin(networks, subnets),
        }
    }

    /// Makes sure that the device is there, has its key and its port, and is up. Gives what it has,
    /// and whether it is new.
    pub(super) async fn ensure(
        &self,
        plan: &Plan,
        key: &PrivateKey,
        mtu_bytes: u32,
    ) -> Result<(Link, FoundDevice, bool), WireguardError> {
        let Plan { name, port, .. } = *plan;
        if let Self::Userspace(userspace) = self {
            return Ok(userspace.ensure(plan, key, mtu_bytes).await?);
        }
        let taken = |source: NetlinkError| match source.is_address_in_use() {
            true => WireguardError::PortTaken { port, name, source },
            false => source.into(),
        };
        let found = netlink::link_named(name).await?;
        let is_new = found.is_none();
        let link = match found {
            Some(link) if !link.is_wireguard => return Err(WireguardError::Foreign(name)),
            Some(link) => link,
            None => {
                let made = devices::add_wireguard(name, mtu_bytes).await;
                match made {
                    Err(error) if error.is_unsupported() => {
                        return Err(WireguardError::NoModule(error));
                    }
                    made => netlink::unless_there(made)?,
                }
                netlink::link_just_made(name).await?
            }
        };
        let mut device = wireguard::device(name).await?;
        if (device.public_key, device.listen_port) != (Some(key.public()), port) {
            wireguard::configure(name, key, port).await.map_err(taken)?;
            device = wireguard::device(name).await?;
        }
        if !link.is_up {
            // It opens its sockets now.
            netlink::set_up(&link.id).await.map_err(taken)?;
        }
        Ok((link, device, is_new))
    }
}

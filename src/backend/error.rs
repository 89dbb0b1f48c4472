//! Why a backend could not start, or the udp backend not rebuild what broke.

use std::io;
use std::net::IpAddr;

use crate::control::lease::ValueError;
use crate::device::{SocketError, TunError};
use crate::engine::{RingError, SpawnError};
use crate::host::mtu::MtuError;
use crate::host::netlink::NetlinkError;
use crate::host::overlay::OverlayError;

use crate::backend::cloud::error::CloudError;
use crate::backend::extension::command::CommandError;
use crate::backend::handover::TakeOverError;
use crate::backend::ipsec::charon::CharonError;
use crate::backend::udp::kernel_plane::attachment::AttachError;
use crate::backend::wireguard::device::WireguardError;
use crate::backend::wireguard::key_file::KeyFileError;

/// What a step of a start gives.
pub type StartResult<T = ()> = Result<T, StartError>;

/// The backend could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The interface leaves no sensible overlay MTU.
    #[error("no usable overlay MTU")]
    Mtu(#[from] MtuError),
    /// Its datagrams go from one address to another of the family that pods have, that of IPv4 if
    /// they have both.
    #[error(
        "the external interface has no address of the tunnel's family, IPv4 where nodes have it"
    )]
    NoUnderlay,
    /// A backend is started with a lease of its network only.
    #[error("the lease has no subnet of the network; this is a defect in weftd")]
    NoSubnet,
    /// The kernel's programs read and write headers of IPv4 around packets.
    #[error("the kernel's fast path takes datagrams over IPv4 only, and this network has no IPv4")]
    NoFastPath,
    /// No WireGuard.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// No charon for the ipsec backend.
    #[error(transparent)]
    Charon(#[from] CharonError),
    /// The cloud, or what to prove oneself to it with, is not there.
    #[error(transparent)]
    Cloud(CloudError),
    /// The wireguard backend has no key.
    #[error("no key for WireGuard")]
    WireguardKey(#[from] KeyFileError),
    /// Routes between hosts need their real addresses.
    #[error(
        "the host-gw backend needs the interface's own address as {}, but they are {address} and \
         {public_address}; leave {} out, or choose a backend with a tunnel",
        if address.is_ipv4() { "PublicIP" } else { "PublicIPv6" },
        if address.is_ipv4() { "--public-ip" } else { "--public-ipv6" }
    )]
    NotTheInterfacesAddress {
        /// The interface's.
        address: IpAddr,
        /// The advertised one.
        public_address: IpAddr,
    },
    /// The kernel makes no device for the tunnel, or another one has its name.
    #[error("{name} cannot be made: {cure}")]
    Device {
        /// Its name.
        name: &'static str,
        /// Why that may be, and what to do about it.
        cure: String,
        /// What the kernel refused.
        source: NetlinkError,
    },
    /// Two networks of one host have the same settings.
    #[error(
        "{name} has the address {address} of another network, whose weftd runs here; {}",
        if name.contains('.') && !name.ends_with("ipip") {
            "set another VNI in the Backend of one of them"
        } else {
            "a host has one such device: choose another Backend.Type for one of them"
        }
    )]
    DeviceOfAnother {
        /// The device.
        name: String,
        /// What it has of the other network.
        address: IpAddr,
    },
    /// A command at the start of the extension backend is needed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Its output is published with the lease.
    #[error("the output of PreStartupCommand does not fit into a lease")]
    Output(#[from] ValueError),
    /// No TUN device.
    #[error("no TUN device")]
    Tun(#[from] TunError),
    /// No socket.
    #[error("no tunnel socket")]
    Socket(#[from] SocketError),
    /// Address or route refused.
    #[error("cannot configure the TUN device")]
    Overlay(#[from] OverlayError),
    /// The host's network state can't be read.
    #[error("cannot talk to the kernel about its network")]
    Netlink(#[from] NetlinkError),
    /// No copies of what a tunnel is.
    #[error("cannot duplicate the tunnel's descriptors")]
    Descriptors(#[source] io::Error),
    /// No thread.
    #[error("cannot start the packet worker")]
    Worker(#[source] SpawnError),
    /// The kernel's programs were requested and are refused.
    #[error(
        "cannot have the kernel carry packets, as --fast-path=on asks; if a right is lacking, \
         grant CAP_BPF (and before kernel 5.11 CAP_SYS_RESOURCE), or choose --fast-path=auto"
    )]
    FastPath(#[from] AttachError),
    /// The tunnel of the weftd that runs is no use.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
    /// io_uring was requested and is not available.
    #[error("cannot use io_uring, as --engine=io_uring asks; {cure}, or choose --engine=auto")]
    Ring {
        /// What to do about it.
        cure: String,
        /// What the kernel lacks or refused.
        source: RingError,
    },
}

impl StartError {
    /// Whether a killed predecessor's device or socket may be in the way.
    pub(super) fn is_perhaps_leftover(&self) -> bool {
        if let Self::Socket(error) = self {
            return error.is_address_in_use();
        }
        // A kept device whose queues have not been torn down.
        let is_taken = matches!(self, Self::Tun(TunError::Taken(_)));
        is_taken || matches!(self, Self::Overlay(OverlayError::ForeignRoute(_)))
    }
}

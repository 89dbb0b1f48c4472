//! What has a program see a device's packets: a TCX link, or a filter where the kernel has no TCX.

use std::net::SocketAddrV4;

use crate::fast_path::{FastPath, FastPathError, Link, Program};
use crate::host::netlink::{Filter, Netlink, NetlinkError, Side};

/// What the tunnel stands on; changes with each rebuild.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ground {
    /// Name and index of the TUN device.
    pub(crate) tun_name: String,
    pub(crate) tun_device: u32,
    /// Name and index of the interface that carries the tunnel.
    pub(crate) interface: String,
    pub(crate) underlay_device: u32,
    /// The socket's.
    pub(crate) underlay: SocketAddrV4,
    /// Of the overlay.
    pub(crate) mtu_bytes: u16,
}

/// Both programs of a tunnel, attached to its devices.
pub(super) struct Attached {
    devices: [u32; 2],
    attachments: [Attachment; 2],
}

/// Of one program. Ends when it is dropped.
#[derive(Debug)]
pub(crate) enum Attachment {
    Link(Link),
    Filter(Filter),
}

/// A program could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The kernel refused a map, a program, or a link.
    #[error(transparent)]
    Link(#[from] FastPathError),
    /// It has no such links, and refused a filter.
    #[error(transparent)]
    Filter(#[from] NetlinkError),
}

impl Attached {
    /// Has the programs see packets of these devices; they take none before they are told to.
    pub(super) async fn new(
        netlink: &Netlink,
        fast_path: &FastPath,
        ground: &Ground,
    ) -> Result<Self, AttachError> {
        let devices @ [tun, underlay] = devices(ground);
        let attach = async |program, device| {
            Attachment::new(netlink, fast_path, program, device, ground.underlay.port()).await
        };
        let attachments = [attach(Program::Out, tun).await?, attach(Program::In, underlay).await?];
        Ok(Self { devices, attachments })
    }

    /// Whether these are the devices.
    pub(super) fn is_of(&self, ground: &Ground) -> bool {
        self.devices == devices(ground)
    }

    /// Whether nobody has removed a program.
    pub(super) async fn is_there(&self, netlink: &Netlink) -> Result<bool, NetlinkError> {
        let [out, inward] = &self.attachments;
        Ok(out.is_there(netlink).await? && inward.is_there(netlink).await?)
    }
}

fn devices(ground: &Ground) -> [u32; 2] {
    [ground.tun_device, ground.underlay_device]
}

impl Attachment {
    /// Attaches a program to the device numbered `device`. `port`, the tunnel's, tells its filters
    /// from those of another weftd.
    pub(crate) async fn new(
        netlink: &Netlink,
        fast_path: &FastPath,
        program: Program,
        device: u32,
        port: u16,
    ) -> Result<Self, AttachError> {
        if let Some(link) = fast_path.link(program, device)? {
            return Ok(Self::Link(link));
        }
        let side = match program {
            Program::Out => Side::Egress,
            Program::In | Program::Gro => Side::Ingress,
        };
        let (name, descriptor) = (program.name(), fast_path.descriptor(program));
        let filter = Filter::attach(netlink, device, side, port.into(), name, descriptor).await?;
        Ok(Self::Filter(filter))
    }

    /// Whether nobody has removed it.
    pub(super) async fn is_there(&self, netlink: &Netlink) -> Result<bool, NetlinkError> {
        match self {
            Self::Link(link) => Ok(link.is_attached()),
            Self::Filter(filter) => filter.is_there(netlink).await,
        }
    }
}

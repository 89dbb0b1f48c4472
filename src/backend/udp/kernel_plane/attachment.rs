//! What has a program see a device's packets: a TCX link, or a filter where the kernel has no TCX
//! or the program is to outlive weftd. A filter is replaced by the next weftd's in one step.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};

use crate::backend::udp::owner::Owner;
use crate::fast_path::{FastPath, Link, Program};
use crate::host::netlink::filters::{Filter, FilterPlace, Side};
use crate::host::netlink::{self, NetlinkError, unless_gone};

/// The handle of a filter that only finds out whether there can be one, on a device of our own.
const PROBE: u32 = 1;

/// An odd number whose multiples differ in their upper bits as well (2^32 by the golden ratio).
const MIX: u32 = 0x9e37_79b1;

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
    pub(crate) underlay: SocketAddr,
    /// Of the overlay.
    pub(crate) mtu_bytes: u16,
}

/// Of one program. Ends when it is dropped.
#[derive(Debug)]
pub(crate) enum Attachment {
    Link(Link),
    Filter(Filter),
}

/// Why a program is not in its place, for people.
pub(crate) type AttachError = Box<dyn Error + Send + Sync>;
pub(crate) type AttachResult<T = ()> = Result<T, AttachError>;

/// How programs are attached.
#[derive(Clone, Copy)]
pub(crate) struct Attacher<'a> {
    pub(crate) fast_path: &'a FastPath,
    /// Tells its filters from those of another weftd.
    pub(crate) owner: Owner,
    /// Whether they outlive weftd, which only filters do.
    pub(crate) is_kept: bool,
}

impl Attacher<'_> {
    /// Attaches a program to the device numbered `device`, in place of the one that an earlier
    /// weftd has left there.
    pub(super) async fn attach(self, program: Program, device: u32) -> AttachResult<Attachment> {
        self.attach_at(program, place(program, device, self.owner)).await
    }

    /// Finds out whether programs can be attached to the device numbered `device`.
    pub(crate) async fn probe(self, device: u32) -> AttachResult {
        let place = FilterPlace { handle: PROBE, ..place(Program::Out, device, self.owner) };
        self.attach_at(Program::Out, place).await.map(drop)
    }

    async fn attach_at(self, program: Program, place: FilterPlace) -> AttachResult<Attachment> {
        if !self.is_kept
            && let Some(link) = self.fast_path.link(program, place.device)?
        {
            place.clear().await?;
            return Ok(Attachment::Link(link));
        }
        let (name, descriptor) = (program.name(), self.fast_path.descriptor(program));
        Ok(Attachment::Filter(Filter::attach(place, name, descriptor).await?))
    }
}

/// By what stays as it is when the host's address changes.
pub(super) fn place(program: Program, device: u32, owner: Owner) -> FilterPlace {
    let side = match program {
        Program::Out => Side::Egress,
        Program::In | Program::Gro => Side::Ingress,
    };
    // Neighbouring networks may have neighbouring ports.
    let network = match owner.network.first_address() {
        IpAddr::V4(network) => network.to_bits(),
        IpAddr::V6(network) => (network.to_bits() >> 64) as u32,
    };
    let handle = network ^ u32::from(owner.port).wrapping_mul(MIX);
    FilterPlace { device, side, handle: handle.max(PROBE + 1) }
}

/// Removes what weftd of this tunnel have left of their programs for what arrives, wherever the
/// tunnel was then, from all devices but those with these names.
pub(crate) async fn clear_inward(owner: Owner, but: &[&str]) -> Result<(), NetlinkError> {
    let links = netlink::links().await?;
    for link in links.iter().filter(|link| !but.contains(&link.id.name.as_str())) {
        unless_gone(place(Program::In, link.id.index, owner).clear().await)?;
    }
    Ok(())
}

impl Attachment {
    /// Whether nobody has removed it.
    pub(super) async fn is_there(&self) -> Result<bool, NetlinkError> {
        match self {
            Self::Link(link) => Ok(link.is_attached()),
            Self::Filter(filter) => filter.is_there().await,
        }
    }

    /// Leaves a filter in place for the next weftd.
    pub(super) fn leave(self) {
        if let Self::Filter(filter) = self {
            filter.leave();
        }
    }
}

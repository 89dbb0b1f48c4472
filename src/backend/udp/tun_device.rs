//! The TUN device. With `--keep-tunnel` it outlives weftd, so that routes and the kernel's programs
//! go on without it; the next weftd of the same port knows it by its alias, and goes on with it.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use rustix::io::Errno;
use tracing::info;

use crate::backend::error::{StartError, StartResult};
use crate::backend::handover::Handover;
use crate::config::options::OffloadChoice;
use crate::device::{self, Steering, Tun, TunError, TunOffload, TunnelSocket};
use crate::failure::with_causes;
use crate::host::netlink;
use crate::host::state::{Link, LinkId};

use super::kernel_plane::attachment::clear_inward;
use super::kernel_plane::merging::clear_pair;
use super::owner::Owner;
use crate::backend::queues::{open_queues, steer};

/// flannel's name for the device; the kernel puts the first free number in.
const DEVICE_TEMPLATE: &str = "flannel%d";

/// Goes on with the descriptors that the last weftd has left open, if they are what this one would
/// open.
pub(super) async fn inherit(
    handover: &Handover,
    owner: Owner,
    address: SocketAddr,
    offload: OffloadChoice,
    worker_count: NonZeroU16,
) -> StartResult<Option<(Vec<TunnelSocket>, Vec<Tun>)>> {
    let inherited = handover.take_inherited().map_err(StartError::Descriptors)?;
    let Some(descriptors) = inherited else {
        // An earlier attempt of this start may have had them.
        handover.refuse("the network configuration has changed meanwhile").await?;
        return Ok(None);
    };
    let devices = device::tun_names(&descriptors);
    let OffloadChoice { tso, uso, gso, gro, .. } = offload;
    let wanted = TunOffload { tso, uso };
    let reason = match device::inherit(descriptors, address, wanted, [gso, gro], worker_count) {
        Ok((sockets, queues)) => {
            let lanes = queues.len() > sockets.len();
            let name = &queues[0].name;
            if netlink::link_named(name).await?.as_ref().and_then(owner_of) == Some(owner) {
                let program = if lanes { Steering::by_sender() } else { Steering::by_flow() };
                steer(&queues, program);
                return Ok(Some((sockets, queues)));
            }
            format!("{name} is not the device of {owner}")
        }
        Err(error) => with_causes(&error),
    };
    handover.refuse(&reason).await?;
    info!("not going on with what the last weftd has left open: {reason}");
    // The service manager may need a moment to close them, and a device that is still there keeps
    // its name and its route.
    for name in devices {
        remove_held(&name).await?;
    }
    Ok(None)
}

/// Removes the device if it is weftd's and somebody else, such as the service manager, still has
/// queues of it: those would be among the next ones.
pub(super) async fn remove_held(name: &str) -> netlink::Result {
    match netlink::link_named(name).await? {
        Some(link) if link.has_carrier && owner_of(&link).is_some() => {
            netlink::remove_link(&link.id).await
        }
        Some(_) | None => Ok(()),
    }
}

/// Opens the device that an earlier weftd has kept, or a new one. A kept one that has queues of
/// another kind is removed.
pub(super) async fn open(
    owner: Owner,
    offload: OffloadChoice,
    worker_count: NonZeroU16,
) -> StartResult<Vec<Tun>> {
    let mut links = netlink::links().await?.into_iter();
    let Some(kept) = links.find(|link| owner_of(link) == Some(owner)) else {
        // Of another network's, as this one's was before, routes may be in the way.
        clear_kept(|it| it.port == owner.port && it.network != owner.network).await?;
        return Ok(open_queues(DEVICE_TEMPLATE, offload, worker_count)?);
    };
    let id = kept.id;
    if kept.has_carrier {
        return Err(TunError::Taken(id.name).into());
    }
    match open_queues(&id.name, offload, worker_count) {
        // Made for one worker, and now there are several, or the other way round.
        Err(TunError::Open { source, .. })
            if Errno::from_io_error(&source) == Some(Errno::INVAL) =>
        {
            info!("removing {id}, which the last weftd has kept for another number of --workers");
            netlink::remove_link(&id).await?;
            Ok(open_queues(DEVICE_TEMPLATE, offload, worker_count)?)
        }
        opened => Ok(opened?),
    }
}

/// Removes the kept devices that no process has, of those owners who are `former`, with their pairs
/// and filters.
pub(super) async fn clear_kept(former: impl Fn(Owner) -> bool) -> netlink::Result {
    let is_meant = |link: &Link, owner| !link.has_carrier && former(owner);
    for (device, owner) in remove_kept(is_meant).await? {
        clear_pair(&device.name).await?;
        clear_inward(owner, &[]).await?;
        info!("removed {device}, which an earlier weftd with the udp backend had kept");
    }
    Ok(())
}

/// Whose a device is, if weftd has kept it.
fn owner_of(link: &Link) -> Option<Owner> {
    link.alias.as_deref().and_then(Owner::of)
}

/// Has the device outlive weftd, or not. Not before the start has succeeded: a device that outlives
/// a failed one is in everybody's way.
pub(super) async fn settle(tun: &Tun, owner: Owner, is_kept: bool) -> StartResult {
    let link = netlink::link_just_made(&tun.name).await?;
    let before = link.alias.unwrap_or_default();
    if Owner::of(&before) == Some(owner) {
        info!("going on with {}, which the last weftd has left", link.id);
    }
    let alias = owner.to_string();
    if before != alias {
        netlink::set_alias(&link.id, &alias).await?;
    }
    Ok(tun.set_kept(is_kept)?)
}

/// Removes the kept devices that are `meant`.
pub(crate) async fn remove_kept(
    meant: impl Fn(&Link, Owner) -> bool,
) -> netlink::Result<Vec<(LinkId, Owner)>> {
    let mut removed = Vec::new();
    for link in netlink::links().await? {
        if let Some(owner) = owner_of(&link).filter(|owner| meant(&link, *owner)) {
            netlink::remove_link(&link.id).await?;
            removed.push((link.id, owner));
        }
    }
    Ok(removed)
}

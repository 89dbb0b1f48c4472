//! Neighbours of a link and entries of its forwarding database. Of a VXLAN device the permanent
//! ones, and what the kernel learnt by itself is neither listed nor changed; of another device
//! those whose hardware address the kernel knows.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::RouteType;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::decode::{self, find};
use super::{Result, edit, list};
use crate::host::state::{EntryTable, LinkEntry, LinkId, MacAddress};
use crate::route::IpAddress;

/// States in which the kernel sends to the hardware address that it has (NUD_VALID).
const VALID: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80;

/// That have none yet, and of which it gave up to get one (NUD_INCOMPLETE and NUD_FAILED).
const ASKED: u16 = 0x01;
const GIVEN_UP: u16 = 0x20;

/// Whose hardware address was confirmed of late (NUD_REACHABLE), and those of which the kernel
/// never asks for it (NUD_NOARP and NUD_PERMANENT).
const REACHABLE: u16 = 0x02;
const NEVER_ASKED: u16 = 0x40 | 0x80;

/// In which the kernel gives ages (`USER_HZ`): on every architecture that matters the same.
const TICKS_PER_SECOND: u32 = 100;

/// How long a hardware address is certain at most, unless the administrator has it longer: half as
/// long again as `base_reachable_time_ms` by default, and two seconds to spare.
const CERTAIN_TICKS_MAX: u32 = 47 * TICKS_PER_SECOND;

/// From a use to the answer that confirms the neighbour: five seconds of waiting for a sign of it,
/// three in which it is asked (`delay_first_probe_time`, `ucast_solicit`), and two to spare.
const ASKED_TICKS_MAX: u32 = 10 * TICKS_PER_SECOND;

/// The permanent entries of both tables of a VXLAN device.
pub async fn entries<A: IpAddress>(link: &LinkId) -> Result<Vec<LinkEntry<A>>> {
    let mut entries = Vec::new();
    for table in [EntryTable::Neighbours, EntryTable::Forwarding] {
        let listed = list_entries::<A>(link.index, table).await?;
        entries.extend(listed.iter().filter_map(|message| entry(message, table)));
    }
    Ok(entries)
}

/// The hardware addresses that the kernel has for the neighbours of the link numbered `index`.
pub async fn hardware_addresses(index: u32) -> Result<BTreeMap<Ipv4Addr, MacAddress>> {
    let listed = list_entries::<Ipv4Addr>(index, EntryTable::Neighbours).await?;
    let valid = listed.iter().filter(|it| u16::from(it.header.state) & VALID != 0);
    Ok(valid.filter_map(addresses).filter(|(_, mac)| mac.is_host()).collect())
}

/// The neighbours of the link numbered `index`, of the family of `of_family`, that the kernel asks
/// for their hardware address, and those that did not answer: of these `true` says that it has
/// given up until the next packet.
pub async fn unresolved(index: u32, of_family: IpAddr) -> Result<BTreeMap<IpAddr, bool>> {
    match of_family {
        IpAddr::V4(_) => unresolved_of::<Ipv4Addr>(index).await,
        IpAddr::V6(_) => unresolved_of::<Ipv6Addr>(index).await,
    }
}

async fn unresolved_of<A: IpAddress>(index: u32) -> Result<BTreeMap<IpAddr, bool>> {
    let unresolved = |message: &NeighbourMessage| {
        let state = u16::from(message.header.state);
        let host = destination::<A>(message)?.into();
        (state & (ASKED | GIVEN_UP) != 0).then_some((host, state & GIVEN_UP != 0))
    };
    let listed = list_entries::<A>(index, EntryTable::Neighbours).await?;
    Ok(listed.iter().filter_map(unresolved).collect())
}

/// When the kernel last sent to each address of a table of the link numbered `index`, as ages;
/// `None` of entries that it only made. `known` are those that were listed before.
pub async fn used<A: IpAddress>(
    index: u32,
    table: EntryTable,
    known: &BTreeSet<IpAddr>,
) -> Result<BTreeMap<IpAddr, Option<Duration>>> {
    let used = |message: &NeighbourMessage| {
        let times = find!(message.attributes, NeighbourAttribute::CacheInfo(times) => times)?;
        let to = destination::<A>(message)?.into();
        let ticks = match table {
            EntryTable::Forwarding => {
                (times.used.abs_diff(times.updated) > 1).then_some(times.used)
            }
            EntryTable::Neighbours => {
                let state = message.header.state.into();
                neighbour_used(state, times.used, times.confirmed, known.contains(&to))
            }
        };
        Some((to, ticks.map(|ticks| Duration::from_secs(ticks.into()) / TICKS_PER_SECOND)))
    };
    Ok(list_entries::<A>(index, table).await?.iter().filter_map(used).collect())
}

/// How long ago a neighbour was used, from its state and two ages of the kernel's. While its
/// hardware address is certain the kernel notes no use, and then asks for it again; that answer it
/// notes as use (Linux 6.18), so of a `known` one it is none. A TCP connection of this host to it
/// keeps it certain, a setting (`base_reachable_time_ms`) for long, and whoever made the entry for
/// ever: then nothing tells whether others use it, and to take it for used is the safe side.
fn neighbour_used(state: u16, used: u32, confirmed: u32, is_known: bool) -> Option<u32> {
    let is_long_certain = state & REACHABLE != 0 && confirmed > CERTAIN_TICKS_MAX;
    if state & NEVER_ASKED != 0 || is_long_certain {
        Some(0)
    } else if used > confirmed.saturating_add(ASKED_TICKS_MAX) {
        Some(confirmed)
    } else {
        (!is_known || used.abs_diff(confirmed) > 1).then_some(used)
    }
}

/// Those of one link: kernels list others, too.
async fn list_entries<A: IpAddress>(
    index: u32,
    table: EntryTable,
) -> Result<Vec<NeighbourMessage>> {
    let mut query = NeighbourMessage::default();
    let (name, family) = about::<A>(table);
    query.header.family = family;
    match table {
        EntryTable::Neighbours => query.attributes.push(NeighbourAttribute::IfIndex(index)),
        EntryTable::Forwarding => query.header.ifindex = index,
    }
    let operation = format!("list {name} of device {index}");
    let listed = list(&operation, RouteNetlinkMessage::GetNeighbour(query)).await?;
    let of_link = listed.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewNeighbour(it) if it.header.ifindex == index => Some(it),
        _ => None,
    });
    Ok(of_link.collect())
}

/// Has the kernel find out whether the neighbour is still where it was, as if a packet had been
/// sent to it.
pub async fn use_neighbour(index: u32, address: IpAddr) -> Result {
    let mut message = NeighbourMessage::default();
    message.header.family =
        if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = index;
    message.header.flags = NeighbourFlags::Use;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    let operation = format!("use the neighbour {address} of device {index}");
    edit(operation, RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE).await
}

/// Sets a permanent entry, in place of another of the same address in the table of neighbours
/// or the same hardware address in the forwarding database.
pub async fn set_entry<A: IpAddress>(link: &LinkId, entry: LinkEntry<A>) -> Result {
    let request = RouteNetlinkMessage::NewNeighbour(message(link, entry));
    edit(operation("set", link, entry), request, NLM_F_CREATE | NLM_F_REPLACE).await
}

/// Removes an entry.
pub async fn remove_entry<A: IpAddress>(link: &LinkId, entry: LinkEntry<A>) -> Result {
    let request = RouteNetlinkMessage::DelNeighbour(message(link, entry));
    edit(operation("remove", link, entry), request, 0).await
}

fn operation<A: IpAddress>(verb: &str, link: &LinkId, entry: LinkEntry<A>) -> String {
    let LinkEntry { table, address, mac } = entry;
    format!("{verb} {address} {mac} in the {} of {}", about::<A>(table).0, link.name)
}

/// What it is called, and whose family its entries are of.
fn about<A: IpAddress>(table: EntryTable) -> (&'static str, AddressFamily) {
    match table {
        EntryTable::Neighbours => ("neighbours", decode::family::<A>()),
        EntryTable::Forwarding => ("forwarding database", AddressFamily::Bridge),
    }
}

fn message<A: IpAddress>(link: &LinkId, entry: LinkEntry<A>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = about::<A>(entry.table).1;
    message.header.ifindex = link.index;
    message.header.state = NeighbourState::Permanent;
    match entry.table {
        EntryTable::Neighbours => message.header.kind = RouteType::Unicast,
        EntryTable::Forwarding => message.header.flags = NeighbourFlags::Own,
    }
    let address: IpAddr = entry.address.into();
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(entry.mac.0.to_vec()));
    message
}

fn entry<A: IpAddress>(message: &NeighbourMessage, table: EntryTable) -> Option<LinkEntry<A>> {
    // A set of bits: iproute2 also sets that no requests are sent.
    let is_permanent = u16::from(message.header.state) & u16::from(NeighbourState::Permanent) != 0;
    // Listed only where they differ from the device's own: packets would go elsewhere.
    let leads_elsewhere = find!(
        message.attributes,
        NeighbourAttribute::Port(_) | NeighbourAttribute::Vni(_) | NeighbourAttribute::IfIndex(_)
            => ()
    );
    let (address, mac) = addresses(message)?;
    let is_ours = is_permanent && leads_elsewhere.is_none();
    is_ours.then_some(LinkEntry { table, address, mac })
}

/// Who it is, and where.
fn addresses<A: IpAddress>(message: &NeighbourMessage) -> Option<(A, MacAddress)> {
    let mac = find!(message.attributes, NeighbourAttribute::LinkLayerAddress(bytes) => bytes)?;
    Some((destination(message)?, MacAddress::from_bytes(mac)?))
}

fn destination<A: IpAddress>(message: &NeighbourMessage) -> Option<A> {
    A::of(match find!(message.attributes, NeighbourAttribute::Destination(it) => it)? {
        NeighbourAddress::Inet(address) => IpAddr::V4(*address),
        NeighbourAddress::Inet6(address) => IpAddr::V6(*address),
        NeighbourAddress::Other(bytes) => decode::address_of(bytes)?,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_of_a_neighbour_is_told_from_its_answers() {
        const STALE: u16 = 0x04;
        const PERMANENT: u16 = 0x80;
        for (state, used, confirmed, is_known, expected) in [
            (STALE, 20, 3000, true, Some(20)),
            (REACHABLE, 2500, 2200, true, Some(2500)),
            // Asked for on behalf of a packet, by the kernel itself, and for the first packet.
            (REACHABLE, 1300, 500, true, Some(1300)),
            (REACHABLE, 500, 500, true, None),
            (REACHABLE, 500, 500, false, Some(500)),
            // A connection of the host goes on, for minutes.
            (REACHABLE, 12_000, 10, true, Some(10)),
            (STALE, 12_000, u32::MAX, true, Some(12_000)),
            // Nobody is asked, for a while or ever.
            (REACHABLE, 6000, 6000, true, Some(0)),
            (STALE, 6000, 6000, true, None),
            (PERMANENT, 360_000, 360_000, true, Some(0)),
        ] {
            let ticks = neighbour_used(state, used, confirmed, is_known);
            assert_eq!(ticks, expected, "{state}, {used}, {confirmed}, {is_known}");
        }
    }

    #[test]
    fn entries_that_lead_elsewhere_do_not_count() {
        let link = LinkId { index: 9, name: "flannel.1".to_owned() };
        let (address, mac) = (Ipv4Addr::new(192, 0, 2, 2), MacAddress([2, 0, 0, 0, 0, 7]));
        let wanted = LinkEntry { table: EntryTable::Forwarding, address, mac };
        let read = |further: Option<NeighbourAttribute>| {
            let mut message = message(&link, wanted);
            message.attributes.extend(further);
            entry(&message, EntryTable::Forwarding)
        };
        assert_eq!(read(None), Some(wanted));
        for attribute in [
            NeighbourAttribute::Port(9999),
            NeighbourAttribute::Vni(77),
            NeighbourAttribute::IfIndex(3),
        ] {
            assert_eq!(read(Some(attribute.clone())), None, "{attribute:?}");
        }
    }
}

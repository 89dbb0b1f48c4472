//! By which device and neighbour the kernel reaches each peer.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use crate::host::netlink::{self, NetlinkError, request_all};
use crate::host::state::PathToHost;
use crate::route::{IpAddress, Peer, Table};

/// By which device and neighbour each address is reached; `None` for not at all, or in a way that
/// only the IP stack knows.
pub(super) type Hops = BTreeMap<Ipv4Addr, Option<(u32, Ipv4Addr)>>;

/// Asks the kernel how it sends datagrams to those peers of whom `hops` does not tell, and forgets
/// those that are no peers.
pub(super) async fn find(hops: &mut Hops, table: &Table, from: SocketAddr) -> netlink::Result {
    let at_v4 = |peer: &Arc<Peer>| Ipv4Addr::of(peer.address.ip()).zip(Some(peer.address));
    let peers = table.peers().iter();
    let mut wanted: BTreeMap<_, _> = peers.filter_map(at_v4).collect();
    hops.retain(|address, _| wanted.contains_key(address));
    wanted.retain(|address, _| !hops.contains_key(address));
    let ask = async |(address, peer)| (address, netlink::path_of_datagram(from, peer).await);
    for (address, path) in request_all(wanted, ask).await {
        let hop = match path {
            Ok(PathToHost { is_plain: true, interface_index, gateway, .. }) => match gateway {
                None => Some((interface_index, address)),
                Some(IpAddr::V4(gateway)) => Some((interface_index, gateway)),
                Some(IpAddr::V6(_)) => None,
            },
            Ok(_) | Err(NetlinkError::Refused(..) | NetlinkError::Incomplete(..)) => None,
            Err(error) => return Err(error),
        };
        hops.insert(address, hop);
    }
    Ok(())
}

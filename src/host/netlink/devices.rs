//! Makes devices: tunnels, and pairs of which what goes into one end comes out of the other.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use rtnetlink::packet_core::NLM_F_REPLACE;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, CacheInfo};
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoVeth, LinkAttribute,
};
use rtnetlink::{LinkIpIp, LinkMessageBuilder, LinkUnspec, LinkVeth, LinkVxlan, LinkWireguard};

use super::exchange::request_now;
use super::{Result, add, address_message, set_link};
use crate::host::state::{KernelFamily, LinkId, MacAddress, Vxlan};

/// Makes a VXLAN device, switched off.
pub async fn add_vxlan(name: &str, vxlan: &Vxlan, mac: MacAddress, mtu_bytes: u32) -> Result {
    let mut builder = LinkVxlan::new(name, vxlan.vni)
        .dev(vxlan.parent_index)
        .learning(vxlan.learning)
        .address(mac.0.to_vec())
        .mtu(mtu_bytes);
    builder = match vxlan.local {
        Some(IpAddr::V4(local)) => builder.local(local),
        Some(IpAddr::V6(local)) => builder.local6(local),
        None => builder,
    };
    if let Some(port) = vxlan.port {
        builder = builder.port(port);
    }
    if vxlan.gbp {
        builder = builder.gbp();
    }
    let request = RouteNetlinkMessage::NewLink(builder.build());
    add(format!("make the vxlan device {name}"), request).await
}

/// Makes an ipip device, switched off, that sends wherever its routes lead. Its packets have the
/// TTL of what they carry, and may be cut on the way if that may.
pub async fn add_ipip(name: &str, local: Ipv4Addr, mtu_bytes: u32) -> Result {
    let message = LinkIpIp::new(name).local(local).pmtudisc(false).mtu(mtu_bytes).build();
    add(format!("make the ipip device {name}"), RouteNetlinkMessage::NewLink(message)).await
}

/// Makes a WireGuard device, switched off, without keys and peers.
pub async fn add_wireguard(name: &str, mtu_bytes: u32) -> Result {
    let request = RouteNetlinkMessage::NewLink(LinkWireguard::new(name).mtu(mtu_bytes).build());
    add(format!("make the wireguard device {name}"), request).await
}

/// Makes a pair, switched off, each end with so many queues each way.
pub async fn add_veth_pair(names: [&str; 2], queues: u32, mtu_bytes: u32) -> Result {
    let second = with(LinkUnspec::new_with_name(names[1]), queues, mtu_bytes).build();
    let first = with(LinkVeth::new(names[0], names[1]), queues, mtu_bytes);
    let message = first.set_info_data(InfoData::Veth(InfoVeth::Peer(second))).build();
    let operation = format!("make the veth pair {} and {}", names[0], names[1]);
    add(operation, RouteNetlinkMessage::NewLink(message)).await
}

/// Has the kernel give a link no IPv6 address of its own, and so send nothing by itself.
pub async fn keep_silent(link: &LinkId) -> Result {
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    let silent = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]);
    let operation = "keep IPv6 off".to_owned();
    set_link(link, operation, |it| it.append_extra_attribute(silent)).await
}

fn with<T>(end: LinkMessageBuilder<T>, queues: u32, mtu_bytes: u32) -> LinkMessageBuilder<T> {
    end.mtu(mtu_bytes)
        .append_extra_attribute(LinkAttribute::NumTxQueues(queues))
        .append_extra_attribute(LinkAttribute::NumRxQueues(queues))
}

/// Removes the link numbered `index`, for the end of a process.
pub fn remove_link_now(index: u32) -> io::Result<()> {
    request_now(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(index).build()), 0)
}

/// Leaves a link its address for `life` only, for the end of a process. The routes through a link
/// end with its last address.
pub fn limit_address_now<A: KernelFamily>(
    link: &LinkId,
    address: A,
    life: Duration,
) -> io::Result<()> {
    let seconds = u32::try_from(life.as_secs()).unwrap_or(u32::MAX);
    let mut limit = CacheInfo::default();
    (limit.ifa_preferred, limit.ifa_valid) = (seconds, seconds);
    let mut message = address_message(link, address, A::BITS);
    message.attributes.push(AddressAttribute::CacheInfo(limit));
    request_now(RouteNetlinkMessage::NewAddress(message), NLM_F_REPLACE)
}

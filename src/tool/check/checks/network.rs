//! Interfaces, their MTUs, and addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::facts::{CheckedFamily, Facts};
use super::super::finding::{
    Checked, Finding, failed, forwarding_cure, skipped, together, warning, well,
};
use crate::backend::tunnel_device::is_tunnel_device;
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::config::options::InterfaceOptions;
use crate::failure::with_causes;
use crate::forward::decide::Leased;
use crate::host::interface::{ExternalInterface, InterfaceError, select};
use crate::host::listing::Listing;
use crate::host::pod_links::wider;
use crate::host::state::{Address, KernelFamily, Link, NextHop, Route};
use crate::route::{Families, IpAddress, Prefix};
use crate::stats::DropReason;
use crate::tool::explain::ToldFamily as _;

/// Devices of other networks, by the beginnings of their names.
const OTHER_NETWORKS: [(&str, &str); 5] = [
    ("cali", "Calico"),
    ("vxlan.calico", "Calico"),
    ("cilium_", "Cilium"),
    ("weave", "Weave"),
    ("antrea-gw", "Antrea"),
];

/// The interface that weftd would choose now, for the families of the last one. If nobody knows
/// those, for IPv6 alone where there is none for IPv4.
fn chosen(facts: &Facts, host: &Listing) -> Result<ExternalInterface, InterfaceError> {
    let of = |families| {
        let interfaces = facts.asked.iface.clone().into_iter().collect();
        let options = InterfaceOptions { interfaces, families, ..InterfaceOptions::default() };
        select(&options, host, None, &mut Vec::new())
    };
    match facts.networks().ok().and_then(|it| Families::new(it.v4(), it.v6())) {
        Some(networks) => of(networks.map(drop, drop)),
        None => of(Families::default())
            .or_else(|error| of(Families::of_v6(None, ())).map_err(|_no_better| error)),
    }
}

/// The name of the external interface: weftd's, or the one it would choose.
pub(super) fn external_name(facts: &Facts) -> Option<String> {
    let of_daemon = facts.interface().map(str::to_owned);
    of_daemon.or_else(|| Some(chosen(facts, facts.host.as_ref()?).ok()?.name))
}

/// The external interface.
fn external_of(facts: &Facts) -> Result<&Link, Finding> {
    let link = external_name(facts).and_then(|name| facts.link(&name));
    link.ok_or_else(|| "no external interface is known".into())
}

pub(super) fn external(facts: &Facts) -> Checked {
    let host = facts.host()?;
    let Some(name) = facts.interface() else {
        if facts.status().is_some() {
            return skipped("weftd has none yet");
        }
        if facts.unanswering().is_some() {
            return skipped("the weftd that runs does not say");
        }
        return match (chosen(facts, host), &facts.asked.iface) {
            (Ok(found), _) => Ok(format!("{} with {}", found.name, found.address())),
            (Err(error), None) => warning(
                with_causes(&error),
                "Start weftd with --iface=NAME, and give --iface here.",
            ),
            (Err(error), Some(iface)) => failed(
                format!("--iface={iface}: {}", with_causes(&error)),
                "Give --iface the name or an address of an interface that has one of the network's \
                 families: of IPv4, unless EnableIPv4 is false.",
            ),
        };
    };
    let Some(link) = facts.link(name) else {
        let cure = "Bring it back, or restart weftd with another --iface.";
        return failed(format!("{name} is gone"), cure);
    };
    if let Some(lease) = facts.lease().filter(|lease| lease.ipv4().is_none()) {
        let (own, public) = (facts.tunnel_address(), lease.node_address());
        let Some(address) = own.or(public) else { return skipped("no address is known") };
        return match host.has(link, address) {
            true => Ok(format!("{name} with {address}")),
            false if own.is_some() => gone(name, address),
            // A translated one is no interface's.
            false => skipped(format!("{name} has no {address}, which may be translated")),
        };
    }
    let mut own = addresses_of(host, link).map(|it| it.address).peekable();
    let Some(first) = own.peek().copied() else {
        return failed(format!("{name} has no IPv4 address"), "Give it one.");
    };
    let wanted = facts.tunnel_address().and_then(Ipv4Addr::of).unwrap_or(first);
    if own.any(|address| address == wanted) {
        return Ok(format!("{name} with {wanted}"));
    }
    gone(name, wanted.into())
}

fn gone(name: &str, address: IpAddr) -> Checked {
    failed(
        format!("{name} no longer has {address}"),
        "Give it back, or restart weftd (--follow-address does it by itself).",
    )
}

fn addresses_of<'a, A: CheckedFamily>(
    host: &'a Listing,
    link: &Link,
) -> impl Iterator<Item = &'a Address<A>> {
    let index = link.id.index;
    A::listed(host).addresses.iter().filter(move |address| address.interface_index == index)
}

pub(super) fn external_link(facts: &Facts) -> Checked {
    let link = external_of(facts)?;
    let name = &link.id.name;
    if !link.is_up {
        return failed(format!("{name} is down"), format!("ip link set {name} up"));
    }
    if !link.has_carrier {
        let cure = "Look at the cable, the switch, or the virtual machine's network.";
        return failed(format!("{name} has no carrier"), cure);
    }
    Ok(format!("{name} is up, MTU {}", link.mtu_bytes))
}

pub(super) fn overlay_mtu(facts: &Facts) -> Checked {
    facts.answered()?;
    facts.host()?;
    let to_v6 = Ipv6Addr::HEADER_BYTES - Ipv4Addr::HEADER_BYTES;
    let overhead = facts.backend().map_or(0, BackendKind::overhead_bytes);
    let is_over_ipv6 = facts.tunnel_address().is_some_and(|address| address.is_ipv6());
    let overhead = overhead + if is_over_ipv6 { to_v6 } else { 0 };
    // With vxlan IPv6 has a device of its own.
    let carries_both =
        facts.lease().is_some_and(|lease| lease.ipv6.is_some()) && facts.may_be_udp();
    let of_v4 = facts.device().map(|name| device_mtu(facts, name, overhead, carries_both));
    let of_v6 = facts.ipv6_device().map(|name| device_mtu(facts, name, overhead + to_v6, true));
    let none = || skipped("the backend has no device of its own, or not yet");
    together(of_v4, of_v6).unwrap_or_else(none)
}

/// The MTU of the device of this name, which carries IPv6 or does not, and in whose packets headers
/// take so many bytes.
fn device_mtu(facts: &Facts, name: &str, overhead: u32, carries_ipv6: bool) -> Checked {
    let own_bytes = facts.link(name).ok_or("the device is not there")?.mtu_bytes;
    let external = external_of(facts)?;
    let most = external.mtu_bytes.saturating_sub(overhead);
    let evidence = format!(
        "{name} has MTU {own_bytes}, {} has {}, and the headers take {overhead}",
        external.id.name, external.mtu_bytes
    );
    let promised = facts.lease().map_or(0, |lease| lease.mtu_bytes);
    if own_bytes < promised.min(most) {
        return warning(
            format!("{evidence}; pods were told {promised}, and their longer packets are refused"),
            format!("Somebody has changed it: ip link set {name} mtu {}", promised.min(most)),
        );
    }
    if own_bytes <= most {
        return Ok(evidence);
    }
    // Below, the kernel would take IPv6 off the device.
    let least = Ipv6Addr::MTU_BYTES_MIN;
    if carries_ipv6 && most < least {
        let cure = format!(
            "ip link set {} mtu {}, or more; if the network takes less, set EnableIPv6 to false.",
            external.id.name,
            least + overhead
        );
        // The hosts cut what is longer than their interfaces take.
        let is_cut = facts.backend() == Some(BackendKind::Udp) && own_bytes == least;
        return match is_cut && external.mtu_bytes >= least {
            true => warning(format!("{evidence}: longer packets go in fragments, slowly"), cure),
            false => failed(format!("{evidence}; IPv6 needs {least} in {name}"), cure),
        };
    }
    failed(evidence, format!("ip link set {name} mtu {most}; then restart the pods."))
}

pub(super) fn bridge_mtu(facts: &Facts) -> Checked {
    let host = facts.host()?;
    let of_lease = facts.lease().map(|lease| lease.mtu_bytes);
    let either = facts.subnets().zip(of_lease.or(facts.subnet_file.says.mtu_bytes));
    let (subnets, overlay) = either.ok_or("neither weftd nor subnet.env says the MTU")?;
    let of_v4 = subnets.v4().map(|subnet| bridges(facts, host, subnet));
    let of_v6 = subnets.v6().map(|subnet| bridges(facts, host, subnet));
    let bridges = of_v4.into_iter().flatten().chain(of_v6.into_iter().flatten());
    let bridges: Vec<_> = bridges.map(|link| &link.id).collect();
    let Some(first) = bridges.first() else {
        return well("no interface has an address of the subnet yet");
    };
    let indices = bridges.iter().map(|id| id.index).collect();
    let Some(wider) = wider(&host.links, &indices, overlay) else {
        return Ok(format!("{} and its ports at most {overlay}", first.name));
    };
    let cure = "Give the container runtime FLANNEL_MTU of subnet.env, and start the pods anew.";
    warning(wider, cure)
}

/// The links of this host's pods.
pub(super) fn bridges<'a, A: CheckedFamily>(
    facts: &'a Facts,
    host: &'a Listing,
    subnet: Prefix<A>,
) -> impl Iterator<Item = &'a Link> {
    let is_bridge = move |link: &&Link| {
        // One of IPv6 alone has an address of its link.
        let addresses = || addresses_of::<A>(host, link).filter(|it| !it.address.is_of_link());
        let is_bare = addresses().next().is_none() && link.id.name == "cni0";
        let is_overlay = facts.device().is_some_and(|own| link.id.name.starts_with(own));
        let is_of_pods =
            |it: &Address<A>| subnet.contains(it.address) && !is_of_a_pod(facts, host, subnet, it);
        !is_overlay
            && !is_flannels(link)
            && !link.is_loopback
            && (is_bare || addresses().any(is_of_pods))
    };
    host.links.iter().filter(is_bridge)
}

/// What is found in `v4` and in `v6`, as far as this host has leased them, by weftd.
pub(super) fn of_families(
    facts: &Facts,
    v4: impl Fn(&Facts, &Listing, Leased<Ipv4Addr>) -> Checked,
    v6: impl Fn(&Facts, &Listing, Leased<Ipv6Addr>) -> Checked,
) -> Checked {
    let (host, lease) = (facts.host()?, facts.leased()?);
    let of_v4 = Ipv4Addr::leased(lease).map(|leased| v4(facts, host, leased));
    let of_v6 = Ipv6Addr::leased(lease).map(|leased| v6(facts, host, leased));
    together(of_v4, of_v6).unwrap_or_else(|| skipped("the lease has no subnet"))
}

pub(super) fn pod_bridge(facts: &Facts) -> Checked {
    of_families(facts, bridge_of, bridge_of)
}

fn bridge_of<A: CheckedFamily>(facts: &Facts, host: &Listing, leased: Leased<A>) -> Checked {
    let subnet = leased.subnet;
    let again = "The container runtime makes it: start a pod here, or restart the runtime.";
    let Some(link) = bridges(facts, host, subnet).next() else {
        let lately = facts.status().and_then(|status| status.drops_lately.as_ref());
        let is_missed = lately.is_some_and(|it| it.contains_key(DropReason::OwnSubnet.id()));
        let evidence = format!("no interface has an address of {subnet}");
        let mut routes = A::listed(host).routes.iter();
        if let Some(route) = routes.find(|route| is_to_a_pod(facts, subnet, route)) {
            return Ok(format!(
                "{evidence}; pods have routes of their own, such as to {}",
                route.destination
            ));
        }
        return match is_missed {
            true => failed(evidence + ", and packets for its pods are dropped", again),
            false => Ok(evidence + " yet"),
        };
    };
    let name = &link.id.name;
    if !link.is_up {
        return failed(format!("{name} is down"), format!("ip link set {name} up"));
    }
    if addresses_of::<A>(host, link).all(|it| it.address.is_of_link()) {
        let address = format!("{}/{}", subnet.first_host(), subnet.length_bits());
        let cure = format!("ip address add {address} dev {name}, or let the runtime make it anew.");
        return failed(format!("{name} has no address of {subnet}"), cure);
    }
    let is_to_pods = |route: &Route<A>| {
        let is_to_bridge = |hop: &NextHop| hop.interface_index == link.id.index;
        subnet.covers(route.destination) && route.next_hops.iter().any(is_to_bridge)
            || is_to_a_pod(facts, subnet, route)
    };
    if !A::listed(host).routes.iter().any(is_to_pods) {
        return failed(format!("no route leads into {subnet}, such as to {name}"), again);
    }
    // Of IPv6 the setting of all devices counts.
    let is_v4 = A::BITS == Ipv4Addr::BITS as u8;
    if is_v4 && facts.sysctl(&format!("net/ipv4/conf/{name}/forwarding")) == Some(0) {
        return failed(format!("net.ipv4.conf.{name}.forwarding is 0"), forwarding_cure(name));
    }
    Ok(format!("{name} is up, with an address of {subnet} and a route"))
}

/// Whether this route leads to the link of one pod, as where pods have no bridge.
fn is_to_a_pod<A: CheckedFamily>(facts: &Facts, subnet: Prefix<A>, route: &Route<A>) -> bool {
    let of_pods = |hop: &NextHop| may_be_of_pods(facts, hop.interface_index);
    subnet.covers(route.destination)
        && route.destination.length_bits() == A::BITS
        && route.next_hops.first().is_some_and(of_pods)
}

/// Whether this link is neither weftd's, nor the external one, nor the loopback.
pub(super) fn may_be_of_pods(facts: &Facts, index: u32) -> bool {
    let name = facts.link_name(index);
    ![facts.device(), facts.ipv6_device(), facts.interface(), Some("lo")].contains(&Some(name))
}

/// Whether a host's address in its `subnet` is one that a pod may get. The overlay's device has the
/// subnet's own, the pods' bridge or each of their links the first; without that one, the bridge
/// has whatever its network begins with.
fn is_of_a_pod<A: CheckedFamily>(
    facts: &Facts,
    host: &Listing,
    subnet: Prefix<A>,
    it: &Address<A>,
) -> bool {
    if !subnet.contains(it.address) || [subnet.network(), subnet.first_host()].contains(&it.address)
    {
        return false;
    }
    let is_no_bridge = !may_be_of_pods(facts, it.interface_index);
    let mut all = A::listed(host).addresses.iter();
    let has_gateway = all.any(|it| it.address == subnet.first_host());
    has_gateway || is_no_bridge || it.is_secondary || it.prefix_length_bits == A::BITS
}

pub(super) fn overlap(facts: &Facts) -> Checked {
    of_families(facts, overlap_of, overlap_of)
}

fn overlap_of<A: CheckedFamily>(
    facts: &Facts,
    host: &Listing,
    Leased { network, subnet }: Leased<A>,
) -> Checked {
    let addresses = A::listed(host).addresses;
    if let Some(it) = addresses.iter().find(|it| is_of_a_pod(facts, host, subnet, it)) {
        let (name, address) = (facts.link_name(it.interface_index), it.address);
        return warning(
            format!(
                "{name} has {address}, of {subnet}, this host's pods: what is for a pod with that \
                 address ends in the host"
            ),
            format!(
                "If a pod has it, or may get it: ip address del {address}/{} dev {name}",
                it.prefix_length_bits
            ),
        );
    }
    let is_stray = |it: &&Address<A>| network.contains(it.address) && !subnet.contains(it.address);
    let Some(stray) = addresses.iter().find(is_stray) else {
        return Ok(format!("none in {network} outside {subnet}"));
    };
    let name = facts.link_name(stray.interface_index);
    let cure = match facts.interface() == Some(name) {
        true => "The hosts' addresses are in the pods' network: choose another Network.",
        false => {
            "If it is left of an earlier subnet (the pods' bridge), remove it and start its pods \
             anew; if it is in a network of this host, choose another Network."
        }
    };
    warning(format!("{name} has {}", stray.address), cure)
}

/// A tunnel device of the kernel's, or `flannel0` of udp.
fn is_flannels(link: &Link) -> bool {
    let number = link.id.name.strip_prefix("flannel");
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|digit| digit.is_ascii_digit());
    is_tunnel_device(link) || number.is_some_and(is_number)
}

pub(super) fn stale_devices(facts: &Facts) -> Checked {
    let host = facts.host()?;
    let kind = facts.backend().ok_or("no weftd says its backend")?;
    let is_known = kind == BackendKind::Ipsec || kind.is_cloud();
    if kind.carried_by() == CarriedBy::Others && !is_known {
        return skipped("its commands may have made any device");
    }
    if !facts.others.is_empty() {
        return skipped("another daemon runs, which may have devices");
    }
    let is_stale = |link: &&Link| {
        let own = [facts.device(), facts.ipv6_device()];
        let is_other = is_flannels(link) && !own.contains(&Some(&link.id.name));
        // A TUN device with a carrier has a process.
        is_other && (is_tunnel_device(link) || !link.has_carrier)
    };
    let stale = host.links.iter().filter(is_stale);
    let names: Vec<_> = stale.map(|link| link.id.name.as_str()).collect();
    let Some(first) = names.first() else { return well("none") };
    warning(
        format!("{} beside backend {kind}", names.join(", ")),
        format!(
            "Its routes may win. If no other daemon uses it (k3s, and other containers, are not \
             seen here), it is left of another backend or VNI: ip link del {first}"
        ),
    )
}

pub(super) fn other_networks(facts: &Facts) -> Checked {
    let found = facts.host()?.links.iter().find_map(|link| {
        let is_named = |(beginning, _): &&(&str, &str)| link.id.name.starts_with(beginning);
        OTHER_NETWORKS.iter().find(is_named).map(|(_, network)| (&link.id.name, network))
    });
    match found {
        None => well("none"),
        Some((device, network)) => warning(
            format!("{device} is a device of {network}"),
            format!("If {network} no longer runs here, remove its devices, routes and rules."),
        ),
    }
}

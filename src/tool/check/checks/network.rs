//! Interfaces, their MTUs, and routes.

use super::super::facts::Facts;
use super::super::finding::{Finding, Verdict};
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::config::options::InterfaceOptions;
use crate::host::interface::{ExternalInterface, InterfaceError, Snapshot as Host, select};
use crate::host::state::{Link, Route, RouteKind};
use crate::route::Prefix;
use crate::stats::DropReason;
use crate::status::Lease;

/// Devices of other networks, by the beginnings of their names.
const OTHER_NETWORKS: [(&str, &str); 5] = [
    ("cali", "Calico"),
    ("vxlan.calico", "Calico"),
    ("cilium_", "Cilium"),
    ("weave", "Weave"),
    ("antrea-gw", "Antrea"),
];

fn unreadable() -> Finding {
    Finding::skipped("the kernel did not list links, addresses and routes")
}

/// The interface that weftd would choose now.
fn chosen(facts: &Facts, host: &Host) -> Result<ExternalInterface, InterfaceError> {
    let interfaces = facts.asked.iface.clone().into_iter().collect();
    let options = InterfaceOptions { interfaces, ..InterfaceOptions::default() };
    select(&options, host, &mut Vec::new())
}

/// The name of the external interface: weftd's, or the one it would choose.
pub(super) fn external_name(facts: &Facts) -> Option<String> {
    let of_daemon = facts.interface().map(str::to_owned);
    of_daemon.or_else(|| Some(chosen(facts, facts.host.as_ref()?).ok()?.name))
}

pub(super) fn external(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let Some(name) = facts.interface() else {
        if facts.status().is_some() {
            return Finding::skipped("weftd has none yet");
        }
        return match chosen(facts, host) {
            Ok(found) => Finding::ok(format!("{} with {}", found.name, found.address)),
            Err(error) if facts.asked.iface.is_none() => Finding::warning(
                crate::failure::with_causes(&error),
                "Start weftd with --iface=NAME, and give --iface here: there is no default route.",
            ),
            Err(error) => Finding::failed(
                format!(
                    "--iface={}: {}",
                    facts.asked.iface.as_deref().unwrap_or_default(),
                    crate::failure::with_causes(&error)
                ),
                "Give --iface the name or an address of an interface that has an IPv4 address.",
            ),
        };
    };
    let Some(link) = facts.link(name) else {
        let cure = "Bring it back, or restart weftd with another --iface.";
        return Finding::failed(format!("{name} is gone"), cure);
    };
    let mut own = host.addresses.iter().filter(|it| it.interface_index == link.id.index);
    let wanted = facts.tunnel_address();
    match (own.clone().next(), wanted) {
        (None, _) => Finding::failed(format!("{name} has no IPv4 address"), "Give it one."),
        (Some(_), Some(wanted)) if !own.any(|it| it.address == wanted) => Finding::failed(
            format!("{name} no longer has {wanted}"),
            "Give it back, or restart weftd (--follow-address does it by itself).",
        ),
        (Some(first), _) => Finding::ok(format!("{name} with {}", wanted.unwrap_or(first.address))),
    }
}

pub(super) fn external_link(facts: &Facts) -> Finding {
    let link = external_name(facts).and_then(|name| facts.link(&name));
    let Some(link) = link else { return Finding::skipped("no external interface is known") };
    let name = &link.id.name;
    if !link.is_up {
        return Finding::failed(format!("{name} is down"), format!("ip link set {name} up"));
    }
    if !link.has_carrier {
        let cure = "Look at the cable, the switch, or the virtual machine's network.";
        return Finding::failed(format!("{name} has no carrier"), cure);
    }
    Finding::ok(format!("{name} is up, MTU {}", link.mtu_bytes))
}

/// The overlay's device, or why there is nothing to look at.
fn own_device(facts: &Facts) -> Result<&Link, Finding> {
    if facts.status().is_none() {
        return Err(Finding::skipped("no weftd answers"));
    }
    if facts.host.is_none() {
        return Err(unreadable());
    }
    let Some(name) = facts.device() else {
        return Err(Finding::skipped("the backend has no device of its own, or not yet"));
    };
    facts.link(name).ok_or_else(|| {
        let cure = "Who removed it? weftd makes it again within seconds; else restart weftd.";
        Finding::failed(format!("{name} is not there"), cure)
    })
}

pub(super) fn device(facts: &Facts) -> Finding {
    let link = match own_device(facts) {
        Ok(link) => link,
        Err(finding) => return finding,
    };
    let name = &link.id.name;
    if !link.is_up {
        return Finding::failed(format!("{name} is down"), format!("ip link set {name} up"));
    }
    if !link.has_carrier {
        let cure = "weftd does not hold it; restart weftd.";
        return Finding::failed(format!("{name} has no carrier"), cure);
    }
    Finding::ok(format!("{name} is up, MTU {}", link.mtu_bytes))
}

pub(super) fn overlay_mtu(facts: &Facts) -> Finding {
    let link = match own_device(facts) {
        Ok(link) => link,
        Err(finding) if finding.verdict == Verdict::Skipped => return finding,
        Err(_) => return Finding::skipped("the device is not there"),
    };
    let Some(external) = external_name(facts).and_then(|name| facts.link(&name)) else {
        return Finding::skipped("no external interface is known");
    };
    let overhead = facts.backend().map_or(0, BackendKind::overhead_bytes);
    let most = external.mtu_bytes.saturating_sub(overhead);
    let evidence = format!(
        "{} has MTU {}, {} has {}, and the headers take {overhead}",
        link.id.name, link.mtu_bytes, external.id.name, external.mtu_bytes
    );
    if link.mtu_bytes > most {
        let cure = format!("ip link set {} mtu {most}; then restart the pods.", link.id.name);
        return Finding::failed(evidence, cure);
    }
    Finding::ok(evidence)
}

pub(super) fn bridge_mtu(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let of_lease = facts.lease().map(|lease| (lease.subnet, lease.mtu_bytes));
    let of_file = facts.subnet_file.says.subnet.zip(facts.subnet_file.says.mtu_bytes);
    let Some((subnet, overlay)) = of_lease.or(of_file) else {
        return Finding::skipped("neither weftd nor subnet.env says the MTU");
    };
    let bridges = bridges(facts, host, subnet);
    match bridges.iter().find(|link| link.mtu_bytes > overlay) {
        Some(link) => Finding::warning(
            format!("{} has MTU {}, the overlay {overlay}", link.id.name, link.mtu_bytes),
            "Give the container runtime FLANNEL_MTU of subnet.env, and start the pods anew.",
        ),
        None if bridges.is_empty() => Finding::ok("no interface has an address of the subnet yet"),
        None => Finding::ok(format!("{} at most {overlay}", bridges[0].id.name)),
    }
}

/// The links of this host's pods.
fn bridges<'a>(facts: &Facts, host: &'a Host, subnet: Prefix) -> Vec<&'a Link> {
    let own = |link: &&Link| {
        let mut all = host.addresses.iter().filter(|it| it.interface_index == link.id.index);
        let first = all.clone().next();
        let is_bare_bridge = first.is_none() && link.id.name == "cni0";
        let is_overlay = facts.device().is_some_and(|own| link.id.name.starts_with(own));
        !is_overlay
            && !link.is_loopback
            && (is_bare_bridge || all.any(|it| subnet.contains(it.address)))
    };
    host.links.iter().filter(own).filter(|it| !is_flannels(it)).collect()
}

pub(super) fn pod_bridge(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let Some(subnet) = facts.lease().map(|lease| lease.subnet) else {
        return Finding::skipped("no weftd says its subnet");
    };
    let again = "The container runtime makes it: start a pod here, or restart the runtime.";
    let lately = facts.status().and_then(|status| status.drops_lately.as_ref());
    let Some(link) = bridges(facts, host, subnet).into_iter().next() else {
        let is_missed = lately.is_some_and(|it| it.contains_key(DropReason::OwnSubnet.id()));
        let evidence = format!("no interface has an address of {subnet}");
        return match is_missed {
            true => Finding::failed(evidence + ", and packets for its pods are dropped", again),
            false => Finding::ok(evidence + " yet"),
        };
    };
    let name = &link.id.name;
    if !link.is_up {
        return Finding::failed(format!("{name} is down"), format!("ip link set {name} up"));
    }
    if host.addresses.iter().all(|it| it.interface_index != link.id.index) {
        let address = format!("{}/{}", subnet.first_host(), subnet.length_bits());
        let cure = format!("ip address add {address} dev {name}, or let the runtime make it anew.");
        return Finding::warning(format!("{name} has no address"), cure);
    }
    if !host.routes.iter().any(|route| subnet.covers(route.destination)) {
        return Finding::warning(format!("no route leads into {subnet}, such as to {name}"), again);
    }
    if facts.sysctl(&format!("net/ipv4/conf/{name}/forwarding")) == Some(0) {
        let cure = "sysctl -w net.ipv4.ip_forward=1 sets it for all devices.";
        return Finding::failed(format!("net.ipv4.conf.{name}.forwarding is 0"), cure);
    }
    Finding::ok(format!("{name} is up, with an address and a route"))
}

pub(super) fn overlay_route(facts: &Facts) -> Finding {
    let link = match own_device(facts) {
        Ok(link) if facts.backend() == Some(BackendKind::Udp) => link,
        Ok(_) => return Finding::skipped("`peers` tells of the routes to single hosts"),
        Err(finding) if finding.verdict == Verdict::Skipped => return finding,
        Err(_) => return Finding::skipped("the device is not there"),
    };
    let (Some(host), Some(&Lease { network, .. })) = (&facts.host, facts.lease()) else {
        return Finding::skipped("weftd has no lease yet");
    };
    let is_ours = |route: &&Route| {
        let mut hops = route.next_hops.iter();
        route.destination == network && hops.any(|hop| hop.interface_index == link.id.index)
    };
    match host.routes.iter().find(is_ours) {
        Some(_) => Finding::ok(format!("{network} dev {}", link.id.name)),
        None => Finding::failed(
            format!("no route {network} dev {}", link.id.name),
            "weftd sets it again within seconds; if not, its log says why.",
        ),
    }
}

/// Routes that take parts of the network elsewhere, as text.
pub(super) fn strangers(facts: &Facts, host: &Host, lease: &Lease) -> Vec<String> {
    let &Lease { network, subnet, .. } = lease;
    let external = external_name(facts);
    let is_gateway_usual = facts.backend().is_some_and(|it| it.carried_by() == CarriedBy::Kernel);
    // The hosts' own network may lie in the overlay's, which `address-overlap` reports.
    let is_of_hosts = |route: &Route| {
        let [hop] = route.next_hops.as_slice() else { return false };
        external.as_deref() == Some(facts.link_name(hop.interface_index))
            && host.addresses.iter().any(|address| {
                let is_its = address.interface_index == hop.interface_index;
                is_its && route.destination.contains(address.address)
            })
    };
    let is_ours = |route: &Route| {
        if subnet.covers(route.destination) || is_of_hosts(route) {
            return true;
        }
        !route.next_hops.is_empty()
            && route.next_hops.iter().all(|hop| {
                let name = facts.link_name(hop.interface_index);
                let is_own = facts.device().is_some_and(|device| name.starts_with(device));
                let is_to_host = hop.gateway.is_some() && external.as_deref() == Some(name);
                is_own || is_gateway_usual && is_to_host
            })
    };
    // A route to the whole network counts only in front of weftd's.
    let first_is_ours = host
        .routes
        .iter()
        .filter(|route| route.destination == network)
        .min_by_key(|route| route.metric)
        .is_none_or(is_ours);
    let is_stranger = |route: &&Route| {
        let is_within = network.covers(route.destination);
        let is_behind = route.destination == network && first_is_ours;
        is_within && !is_behind && !is_ours(route)
    };
    let text = |route: &Route| match (route.kind, route.next_hops.first()) {
        (RouteKind::Unicast, Some(hop)) => {
            format!("{} dev {}", route.destination, facts.link_name(hop.interface_index))
        }
        _ => format!("{} to nowhere (a blackhole or the like)", route.destination),
    };
    host.routes.iter().filter(is_stranger).map(text).collect()
}

pub(super) fn foreign_routes(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let Some(lease) = facts.lease() else {
        return Finding::skipped("no weftd says its network");
    };
    if facts.backend().is_none_or(|kind| kind.carried_by() == CarriedBy::Others) {
        return Finding::skipped("this backend sets no routes");
    }
    let found = strangers(facts, host, lease);
    if found.is_empty() {
        return Finding::ok(format!("none in {}", lease.network));
    }
    Finding::failed(
        found.join("; "),
        "Remove these routes (ip route del), or whatever sets them: pods there are unreachable.",
    )
}

pub(super) fn overlap(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let Some(&Lease { network, subnet, .. }) = facts.lease() else {
        return Finding::skipped("no weftd says its network");
    };
    let is_stray = |address: &&crate::host::state::Address| {
        network.contains(address.address) && !subnet.contains(address.address)
    };
    match host.addresses.iter().find(is_stray) {
        None => Finding::ok(format!("none in {network} outside {subnet}")),
        Some(stray) => {
            let name = facts.link_name(stray.interface_index);
            let cure = match facts.interface() == Some(name) {
                true => "The hosts' addresses are in the pods' network: choose another Network.",
                false => {
                    "It is left of an earlier subnet: remove it, and start the pods behind it anew."
                }
            };
            Finding::warning(format!("{name} has {}", stray.address), cure)
        }
    }
}

/// `flannel.1` with vxlan, `flannel0` without.
fn is_flannels(link: &Link) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let Some(rest) = link.id.name.strip_prefix("flannel") else { return false };
    match rest.strip_prefix('.') {
        Some(number) => digits(number) && link.vxlan.is_some(),
        None => digits(rest),
    }
}

pub(super) fn stale_devices(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let Some(kind) = facts.backend() else {
        return Finding::skipped("no weftd says its backend");
    };
    if kind.carried_by() == CarriedBy::Others {
        return Finding::skipped("its commands may have made any device");
    }
    if !facts.others.is_empty() {
        return Finding::skipped("another daemon runs, which may have devices");
    }
    let own = facts.device();
    let is_stale = |link: &&Link| {
        let is_other = is_flannels(link) && own != Some(&link.id.name);
        // A TUN device with a carrier has a process.
        is_other && (link.vxlan.is_some() || !link.has_carrier)
    };
    let names: Vec<_> =
        host.links.iter().filter(is_stale).map(|link| link.id.name.as_str()).collect();
    if names.is_empty() {
        return Finding::ok("none");
    }
    let first = names[0];
    Finding::warning(
        format!("{} beside backend {kind}", names.join(", ")),
        format!("It is left of another backend, and its routes may win: ip link del {first}"),
    )
}

pub(super) fn other_networks(facts: &Facts) -> Finding {
    let Some(host) = &facts.host else { return unreadable() };
    let found = host.links.iter().find_map(|link| {
        let is_named = |(beginning, _): &&(&str, &str)| link.id.name.starts_with(beginning);
        OTHER_NETWORKS.iter().find(is_named).map(|(_, network)| (&link.id.name, network))
    });
    match found {
        None => Finding::ok("none"),
        Some((device, network)) => Finding::warning(
            format!("{device} is a device of {network}"),
            format!("If {network} no longer runs here, remove its devices, routes and rules."),
        ),
    }
}

//! Settings of the kernel, and its firewall.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::super::facts::{CheckedFamily, Facts};
use super::super::finding::{Checked, failed, forwarding_cure, skipped, together, warning, well};
use super::super::firewall::{
    BRIDGED, Content, FORWARDED, FORWARDED_ON, Hook, Packet, RECEIVED, SENT, dropped_by, may_drop,
};
use super::network::{bridges, external_name};
use super::routes::strangers;
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::host::netlink::policies::{Decision, Policy};
use crate::route::Prefix;
use crate::status::TunnelEnd;
use crate::tool::explain::{FORWARDS_NOTHING, ToldFamily as _};

/// Of a setting below `/proc/sys`.
fn is_on(facts: &Facts, path: &str, cure: &str) -> Checked {
    let name = path.replace('/', ".");
    match facts.sysctl(path) {
        None => skipped(format!("{name} can't be read")),
        Some(0) => failed(format!("{name} is 0"), cure),
        Some(value) => Ok(format!("{name} is {value}")),
    }
}

pub(super) fn ip_forward(facts: &Facts) -> Checked {
    let networks = facts.networks().ok();
    let has_v4 = networks.is_none_or(|it| it.v4().is_some());
    let has_v6 = networks.is_some_and(|it| it.v6().is_some());
    let cure = "sysctl -w net.ipv4.ip_forward=1, and the same in /etc/sysctl.d.";
    let of_v4 = has_v4.then(|| is_on(facts, "net/ipv4/ip_forward", cure));
    let of_v6 = has_v6.then(|| ipv6_forward(facts));
    together(of_v4, of_v6).unwrap_or_else(|| skipped("the network has neither family"))
}

fn ipv6_forward(facts: &Facts) -> Checked {
    let cure = "sysctl -w net.ipv6.conf.all.forwarding=1, and the same in /etc/sysctl.d; where the \
                host's address is by router advertisements, accept_ra=2 on its interface first.";
    match facts.forwards_ipv6 {
        Some(true) => well("net.ipv6.conf.all.forwarding or a device's force_forwarding is on"),
        Some(false) => failed(FORWARDS_NOTHING, cure),
        None => skipped("the kernel does not say whether it forwards IPv6"),
    }
}

pub(super) fn device_forwarding(facts: &Facts) -> Checked {
    if facts.lease().is_some_and(|lease| lease.network.is_none()) {
        return skipped("IPv6 is forwarded by the setting of all devices, see ip-forward");
    }
    let device = facts.comes_by::<Ipv4Addr>().ok_or("no device is known yet")?;
    is_on(facts, &format!("net/ipv4/conf/{device}/forwarding"), &forwarding_cure(device))
}

pub(super) fn rp_filter(facts: &Facts) -> Checked {
    let leased = Ipv4Addr::leased(facts.leased()?).ok_or("the network has no IPv4")?;
    let (Some(device), Some(host)) = (facts.device(), &facts.host) else {
        return skipped("no device is known");
    };
    let of = |name: &str| facts.sysctl(&format!("net/ipv4/conf/{name}/rp_filter"));
    // The larger of both counts.
    let effective = of("all").max(of(device)).ok_or("rp_filter can't be read")?;
    match strangers(facts, host, leased).first().filter(|_| effective == 1) {
        None => Ok(format!("{effective} on {device}, routes are symmetric or it is loose")),
        Some(route) => warning(
            format!("rp_filter is 1 (strict) on {device}, and there is a route {route}"),
            format!("Remove the route, or sysctl -w net/ipv4/conf/{device}/rp_filter=2 (loose)."),
        ),
    }
}

pub(super) fn bridge_netfilter(facts: &Facts) -> Checked {
    if !facts.daemon.given.as_ref().is_some_and(|it| it.is_kubernetes) {
        return skipped("no weftd with --kube-subnet-mgr was found");
    }
    let cure = "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1. Services do \
                not work between pods of one host without it.";
    match facts.sysctl("net/bridge/bridge-nf-call-iptables") {
        Some(0) => warning("net.bridge.bridge-nf-call-iptables is 0", cure),
        Some(_) => well("iptables sees what passes a bridge"),
        None => warning("the module br_netfilter is not loaded", cure),
    }
}

pub(super) fn conntrack(facts: &Facts) -> Checked {
    let number = |name: &str| facts.sysctl(&format!("net/netfilter/nf_conntrack_{name}"));
    let (Some(count), Some(most)) = (number("count"), number("max")) else {
        return well("connections are not tracked here");
    };
    let evidence = format!("{count} of {most} connections");
    let cure = "Raise net.netfilter.nf_conntrack_max, or find who opens so many connections: new \
                ones are refused when it is full.";
    // Of 0 there is no limit.
    match count.saturating_mul(100).checked_div(most) {
        Some(91..) => failed(evidence, cure),
        Some(76..) => warning(evidence, cure),
        Some(_) => Ok(evidence),
        None => Ok(format!("{count} connections, no limit")),
    }
}

pub(super) fn ipsec(facts: &Facts) -> Checked {
    let own = facts.own_address::<Ipv4Addr>();
    let takes = |host: Ipv4Addr| {
        let is_met = |it: &&Policy| {
            it.destination.contains(host)
                && own.is_none_or(|own| it.source.contains(own))
                && it.port.is_none_or(|port| Some(port) == facts.port())
        };
        let first = facts.policies.iter().filter(is_met).min_by_key(|it| it.priority)?;
        (first.decision != Decision::Passes).then_some((host, first.decision == Decision::Blocks))
    };
    if let Some((host, blocks)) = facts.alarming().find_map(takes) {
        return match blocks {
            true => failed(
                format!("an IPsec policy blocks what is sent to {host}"),
                format!("`ip xfrm policy` shows it: let UDP to {host} through."),
            ),
            false => warning(
                format!("a policy wants IPsec for what is sent to {host}, which does not answer"),
                "Does the IKE daemon run on both hosts, and is there a state (`ip xfrm state`)?",
            ),
        };
    }
    match facts.has_ipsec.ok_or("the kernel does not say")? {
        false => well("none"),
        true => well("there are some: the fast path stays off"),
    }
}

/// Whether something surely drops what hosts send each other at these hooks: the tunnel's
/// datagrams, and of IPv6 what neighbours find each other by.
fn hosts_pass(facts: &Facts, hooks: &[Hook]) -> Checked {
    fn of<A: CheckedFamily>(facts: &Facts, hooks: &[Hook]) -> Option<Checked> {
        let has_port = facts.backend().is_none_or(BackendKind::has_port);
        let is_ours = |kind: BackendKind| kind.carried_by() != CarriedBy::Others;
        let finds = A::BITS == 128 && facts.backend().is_some_and(is_ours);
        let datagrams = has_port.then(|| datagrams_pass::<A>(facts, hooks));
        let found = together(datagrams, finds.then(|| neighbours_pass::<A>(facts, hooks)));
        facts.is_underlay::<A>().then_some(found)?
    }
    let found = together(of::<Ipv4Addr>(facts, hooks), of::<Ipv6Addr>(facts, hooks));
    found.unwrap_or_else(|| skipped("no packets between hosts are known that are of weftd"))
}

/// Datagrams of anybody, or those of one of the peers, for a list may have some of them.
fn datagrams_pass<A: CheckedFamily>(facts: &Facts, hooks: &[Hook]) -> Checked {
    let (known, chains) = (A::facts(facts), A::facts(facts).chains()?);
    let of_v6 = facts.status().and_then(|it| it.tunnel).map(TunnelEnd::ipv6_port);
    let port = of_v6.filter(|_| A::BITS == 128).or_else(|| facts.port());
    let port = port.ok_or("the port is not known yet")?;
    // VXLAN's tells flows apart, and none is known.
    let is_from_port = |kind: &BackendKind| *kind != BackendKind::Vxlan;
    let source_port = facts.backend().filter(is_from_port).map(|_| port);
    let (way, of) = if hooks == SENT { ("to", "of") } else { ("from", "to") };
    let mut peers = known.ways.iter().filter_map(|way| Prefix::new(way.host, A::BITS));
    let own = facts.own_address().and_then(|own| Prefix::new(own, A::BITS));
    let external = external_name(facts);
    let base = underlay(hooks, Content::Udp { port, source_port }, external.as_deref());
    let packet = |peer| match hooks == SENT {
        true => Packet { sources: own, destinations: peer, ..base },
        false => Packet { sources: peer, destinations: own, ..base },
    };
    let dropped = std::iter::once(None).chain(peers.clone().map(Some)).find_map(|peer| {
        let packet = packet(peer);
        let whom = peer.map_or(String::new(), |peer| format!(" {of} {}", peer.network()));
        let so = match hooks == SENT {
            true => format!("nothing is sent to UDP port {port}{whom}"),
            false => format!("UDP port {port} is closed{whom}"),
        };
        dropped_by(chains, hooks, &packet, &so)
    });
    if let Some((rule, chain)) = dropped {
        let cure = format!("Accept UDP port {port} {way} all nodes in front of that, in {chain}.");
        return warning(rule, cure);
    }
    match peers.find_map(|peer| may_drop(chains, hooks, &packet(Some(peer)))) {
        None => Ok(known.nothing_drops(&format!("UDP port {port} over {} there", A::NAME))),
        Some((rule, chain)) => some_may_be_dropped(&rule, &chain, "the tunnel sends or gets"),
    }
}

/// A packet between this host and any other.
fn underlay<'a, A: CheckedFamily>(
    hooks: &[Hook],
    content: Content,
    external: Option<&'a str>,
) -> Packet<'a, A> {
    let base = Packet::of(content);
    match hooks == SENT {
        true => Packet { goes_by: external, ..base },
        false => Packet { comes_by: external, is_for_host: true, ..base },
    }
}

/// Solicitations and advertisements of neighbours (RFC 4861), which stand in for ARP and which
/// firewalls see.
fn neighbours_pass<A: CheckedFamily>(facts: &Facts, hooks: &[Hook]) -> Checked {
    let (chains, external) = (A::facts(facts).chains()?, external_name(facts));
    let external = external.as_deref();
    if external.and_then(|name| facts.link(name)?.mac).is_none() {
        return well("the external link needs no neighbour discovery");
    }
    let so = "this host and others of its link can't find each other (neighbour discovery)";
    let dropped = [135, 136].iter().find_map(|kind| {
        dropped_by(chains, hooks, &underlay(hooks, Content::Discovery(*kind), external), so)
    });
    match dropped {
        None => Ok(A::facts(facts).nothing_drops("neighbour discovery")),
        Some((rule, chain)) => {
            warning(rule, format!("Accept ICMPv6 types 135 and 136 in front of that, in {chain}."))
        }
    }
}

pub(super) fn firewall_output(facts: &Facts) -> Checked {
    hosts_pass(facts, SENT)
}

pub(super) fn firewall_input(facts: &Facts) -> Checked {
    hosts_pass(facts, RECEIVED)
}

pub(super) fn firewall_forward(facts: &Facts) -> Checked {
    let networks = facts.networks()?;
    if facts.status().is_none() {
        return skipped("weftd sets its rules when it starts");
    }
    let of_v4 = networks.v4().map(|network| pods_pass(facts, network));
    let found = together(of_v4, networks.v6().map(|network| pods_pass(facts, network)));
    found.unwrap_or_else(|| skipped("the network has neither family"))
}

fn pods_pass<A: CheckedFamily>(facts: &Facts, network: Prefix<A>) -> Checked {
    let subnet = facts.subnets().and_then(A::of_both);
    let of_pods = subnet.zip(facts.host().ok()).and_then(|(subnet, host)| {
        let mut links = bridges(facts, host, subnet);
        links.next().filter(|_| links.next().is_none()).map(|link| link.id.name.as_str())
    });
    let (all, own, device) = (Some(network), subnet.or(Some(network)), facts.comes_by::<A>());
    let base = Packet { sources: all, destinations: all, ..Packet::of(Content::Any) };
    let inward = Packet { destinations: own, comes_by: device, goes_by: of_pods, ..base };
    let outward = Packet { sources: own, comes_by: of_pods, goes_by: device, ..base };
    let (so_in, so_out) =
        ("pods do not get packets of other hosts", "what pods send to other hosts does not leave");
    let [bridged_in, bridged_out] = BRIDGED;
    // Without a bridge such rules see nothing of them.
    let has_bridge = facts.host().is_ok_and(|it| it.links.iter().any(|link| link.is_bridge));
    let mut ways = vec![(FORWARDED, &inward, so_in), (FORWARDED_ON, &outward, so_out)];
    if has_bridge {
        ways.extend([(bridged_in, &inward, so_in), (bridged_out, &outward, so_out)]);
    }
    let chains = A::facts(facts).chains()?;
    let dropped = ways.iter().find_map(|(hooks, packet, so)| dropped_by(chains, hooks, packet, so));
    if let Some((rule, chain)) = dropped {
        return warning(
            rule,
            format!(
                "Accept {network} in front of that, in {chain}: what --iptables-forward-rules of \
                 weftd accepts may come behind it."
            ),
        );
    }
    match ways.iter().find_map(|(hooks, packet, _)| may_drop(chains, hooks, packet)) {
        None => Ok(A::facts(facts).nothing_drops(&format!("what is for {network}"))),
        Some((rule, chain)) => some_may_be_dropped(&rule, &chain, "pods get or send"),
    }
}

/// Of a rule for some packets, of which those who wrote it know what it is for.
fn some_may_be_dropped(rule: &str, chain: &str, what: &str) -> Checked {
    warning(
        format!("{rule}: it may drop some of what {what}, by protocol, port, length or address"),
        format!("If that is not meant, accept these packets in front of it, in {chain}."),
    )
}

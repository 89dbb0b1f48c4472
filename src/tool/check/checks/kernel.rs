//! Settings of the kernel, and its firewall.

use std::net::Ipv4Addr;

use super::super::facts::Facts;
use super::super::finding::{Checked, failed, forwarding_cure, skipped, warning, well};
use super::super::firewall::{
    BRIDGED, FORWARDED, FORWARDED_ON, Hook, Packet, RECEIVED, SENT, dropped_by, may_drop,
};
use super::network::{bridges, external_name, strangers};
use crate::backend_kind::BackendKind;
use crate::host::netlink::policies::{Decision, Policy};
use crate::route::Prefix;

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
    let cure = "sysctl -w net.ipv4.ip_forward=1, and the same in /etc/sysctl.d.";
    let of_v4 = is_on(facts, "net/ipv4/ip_forward", cure)?;
    if facts.status().and_then(|status| status.lease.as_ref()?.ipv6).is_none() {
        return Ok(of_v4);
    }
    let cure = "sysctl -w net.ipv6.conf.all.forwarding=1, and the same in /etc/sysctl.d; where the \
                host's address is by router advertisements, accept_ra=2 on its interface first.";
    let of_v6 = is_on(facts, "net/ipv6/conf/all/forwarding", cure)?;
    Ok(format!("{of_v4}, {of_v6}"))
}

pub(super) fn device_forwarding(facts: &Facts) -> Checked {
    let device = facts.comes_by().ok_or("no device is known yet")?;
    is_on(facts, &format!("net/ipv4/conf/{device}/forwarding"), &forwarding_cure(device))
}

pub(super) fn rp_filter(facts: &Facts) -> Checked {
    let lease = facts.lease_ipv4("network");
    let (Some(device), Ok(lease), Some(host)) = (facts.device(), lease, &facts.host) else {
        return skipped("no device or no network is known");
    };
    let of = |name: &str| facts.sysctl(&format!("net/ipv4/conf/{name}/rp_filter"));
    // The larger of both counts.
    let effective = of("all").max(of(device)).ok_or("rp_filter can't be read")?;
    match strangers(facts, host, &lease).first().filter(|_| effective == 1) {
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
    let own = facts.own_address();
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

/// Whether something surely drops the tunnel's datagrams at these hooks: those of anybody, or those
/// of one of the peers, for a list may have some of them. `so` is what follows, of all or of one.
fn tunnel_passes(facts: &Facts, hooks: &[Hook], so: fn(u16, &str) -> String) -> Checked {
    if facts.backend().is_some_and(|kind| !kind.has_port()) {
        return skipped("this backend has no port");
    }
    if facts.lease().is_some_and(|lease| lease.ipv4().is_none()) {
        return skipped("rules of IPv6 are not looked at, and the tunnel runs over that");
    }
    let (chains, port) = (facts.firewall()?, facts.port().ok_or("the port is not known yet")?);
    let external = external_name(facts);
    let external = external.as_deref();
    // VXLAN's tells flows apart, and none is known.
    let source_port = facts.backend().filter(|kind| *kind == BackendKind::Udp).map(|_| port);
    let (way, of) = if hooks == SENT { ("to", "of") } else { ("from", "to") };
    let mut peers = facts.ways.iter().filter_map(|way| Prefix::new(way.host, 32));
    let own = facts.own_address().and_then(|own| Prefix::new(own, 32));
    let base = Packet { udp_port: Some(port), source_port, ..Packet::default() };
    let packet = |peer| match hooks == SENT {
        true => Packet { sources: own, destinations: peer, goes_by: external, ..base },
        false => Packet {
            sources: peer,
            destinations: own,
            comes_by: external,
            is_for_host: true,
            ..base
        },
    };
    let dropped = std::iter::once(None).chain(peers.clone().map(Some)).find_map(|peer| {
        let packet = packet(peer);
        let whom = peer.map_or(String::new(), |peer| format!(" {of} {}", peer.network()));
        dropped_by(chains, hooks, &packet, &so(port, &whom))
    });
    if let Some((rule, chain)) = dropped {
        let cure = format!("Accept UDP port {port} {way} all nodes in front of that, in {chain}.");
        return warning(rule, cure);
    }
    match peers.find_map(|peer| may_drop(chains, hooks, &packet(Some(peer)))) {
        None => Ok(facts.nothing_drops(&format!("UDP port {port} there"))),
        Some((rule, chain)) => some_may_be_dropped(&rule, &chain, "the tunnel sends or gets"),
    }
}

pub(super) fn firewall_output(facts: &Facts) -> Checked {
    tunnel_passes(facts, SENT, |port, whom| format!("nothing is sent to UDP port {port}{whom}"))
}

pub(super) fn firewall_input(facts: &Facts) -> Checked {
    tunnel_passes(facts, RECEIVED, |port, whom| format!("UDP port {port} is closed{whom}"))
}

pub(super) fn firewall_forward(facts: &Facts) -> Checked {
    let network = facts.network()?;
    if facts.status().is_none() {
        return skipped("weftd sets its rules when it starts");
    }
    let subnet =
        facts.lease().and_then(|lease| lease.subnet).or_else(|| facts.subnet_file.says.subnet());
    let of_pods = subnet.zip(facts.host().ok()).and_then(|(subnet, host)| {
        let mut links = bridges(facts, host, subnet);
        links.next().filter(|_| links.next().is_none()).map(|link| link.id.name.as_str())
    });
    let (all, own, device) = (Some(network), subnet.or(Some(network)), facts.comes_by());
    let base = Packet { sources: all, destinations: all, ..Packet::default() };
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
    let chains = facts.firewall()?;
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
        None => Ok(facts.nothing_drops(&format!("what is for {network}"))),
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

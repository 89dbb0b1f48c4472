//! Settings of the kernel, and its firewall.

use super::super::facts::Facts;
use super::super::finding::Finding;
use super::super::firewall::{FORWARDED, Packet, RECEIVED, dropped_by};
use super::network::{external_name, strangers};
use crate::netfilter::guard::table_name;
use crate::route::Prefix;
use crate::status::Guard;

/// What weftd asks for each socket.
const BUFFER_BYTES: u64 = 4 << 20;

/// Of linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;

fn unreadable(name: &str) -> Finding {
    Finding::skipped(format!("{name} can't be read"))
}

pub(super) fn ip_forward(facts: &Facts) -> Finding {
    match facts.sysctl("net/ipv4/ip_forward") {
        None => unreadable("net.ipv4.ip_forward"),
        Some(0) => Finding::failed(
            "net.ipv4.ip_forward is 0",
            "sysctl -w net.ipv4.ip_forward=1, and the same in /etc/sysctl.d.",
        ),
        Some(_) => Finding::ok("net.ipv4.ip_forward is 1"),
    }
}

pub(super) fn device_forwarding(facts: &Facts) -> Finding {
    let Some(device) = facts.comes_by() else { return Finding::skipped("no device is known yet") };
    match facts.sysctl(&format!("net/ipv4/conf/{device}/forwarding")) {
        None => unreadable("its setting"),
        Some(0) => Finding::failed(
            format!("net.ipv4.conf.{device}.forwarding is 0"),
            "sysctl -w net.ipv4.ip_forward=1 sets it for all devices.",
        ),
        Some(_) => Finding::ok(format!("{device} forwards")),
    }
}

pub(super) fn rp_filter(facts: &Facts) -> Finding {
    let (Some(device), Some(lease), Some(host)) = (facts.device(), facts.lease(), &facts.host)
    else {
        return Finding::skipped("no device or no network is known");
    };
    let of = |name: &str| facts.sysctl(&format!("net/ipv4/conf/{name}/rp_filter"));
    // The larger of both counts.
    let Some(effective) = of("all").max(of(device)) else { return unreadable("rp_filter") };
    let elsewhere = strangers(facts, host, lease);
    match (effective, elsewhere.first()) {
        (1, Some(route)) => Finding::warning(
            format!("rp_filter is 1 (strict) on {device}, and there is a route {route}"),
            format!("Remove the route, or sysctl -w net.ipv4.conf.{device}.rp_filter=2 (loose)."),
        ),
        (value, _) => {
            Finding::ok(format!("{value} on {device}, routes are symmetric or it is loose"))
        }
    }
}

pub(super) fn bridge_netfilter(facts: &Facts) -> Finding {
    if !facts.daemon.settings.as_ref().is_some_and(|it| it.is_kubernetes) {
        return Finding::skipped("no weftd with --kube-subnet-mgr was found");
    }
    let cure = "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1. Services do \
                not work between pods of one host without it, unless rules are in nftables.";
    match facts.sysctl("net/bridge/bridge-nf-call-iptables") {
        Some(0) => Finding::warning("net.bridge.bridge-nf-call-iptables is 0", cure),
        Some(_) => Finding::ok("iptables sees what passes a bridge"),
        None => Finding::warning("the module br_netfilter is not loaded", cure),
    }
}

pub(super) fn conntrack(facts: &Facts) -> Finding {
    let number = |name: &str| facts.sysctl(&format!("net/netfilter/nf_conntrack_{name}"));
    let (Some(count), Some(most)) = (number("count"), number("max")) else {
        return Finding::ok("connections are not tracked here");
    };
    let evidence = format!("{count} of {most} connections");
    let cure = "Raise net.netfilter.nf_conntrack_max, or find who opens so many connections: new \
                ones are refused when it is full.";
    if most == 0 {
        return Finding::ok(format!("{count} connections, no limit"));
    }
    match count.saturating_mul(100) / most {
        91.. => Finding::failed(evidence, cure),
        76.. => Finding::warning(evidence, cure),
        _ => Finding::ok(evidence),
    }
}

pub(super) fn socket_buffers(facts: &Facts) -> Finding {
    if !facts.may_be_udp() {
        return Finding::skipped("only the udp backend has a socket");
    }
    let both = ["rmem_max", "wmem_max"].map(|name| facts.sysctl(&format!("net/core/{name}")));
    let [Some(receive), Some(send)] = both else {
        return Finding::skipped("net.core.rmem_max is not visible in this network namespace");
    };
    let evidence = format!("net.core.rmem_max {receive}, wmem_max {send}");
    if receive.min(send) >= BUFFER_BYTES {
        return Finding::ok(evidence);
    }
    match facts.may(CAP_NET_ADMIN) {
        Some(true) => Finding::ok(format!("{evidence}; CAP_NET_ADMIN may exceed them")),
        Some(false) if facts.process.is_daemon => Finding::warning(
            format!("{evidence}, and weftd has no CAP_NET_ADMIN"),
            format!("Raise both to {BUFFER_BYTES}: bursts of packets get lost."),
        ),
        Some(false) | None => Finding::skipped("weftd's rights are not known"),
    }
}

pub(super) fn ipsec(facts: &Facts) -> Finding {
    match facts.has_ipsec {
        None => Finding::skipped("the kernel does not say"),
        Some(false) => Finding::ok("none"),
        Some(true) => Finding::ok("there are some: the fast path stays off"),
    }
}

pub(super) fn firewall_input(facts: &Facts) -> Finding {
    if facts.backend().is_some_and(|kind| !kind.has_port()) {
        return Finding::skipped("this backend has no port");
    }
    let (Some(chains), Some(port)) = (&facts.firewall, facts.port()) else {
        return no_firewall(facts);
    };
    let external = external_name(facts);
    let comes_by = external.as_deref();
    // From anybody, or from one of the peers: a list may have some of them.
    let peers = facts.ways.iter().flatten().filter_map(|way| Prefix::new(way.host, 32));
    let closed = std::iter::once(None).chain(peers.map(Some)).find_map(|sources| {
        let (destinations, goes_by) = (None, None);
        let packet = Packet { udp_port: Some(port), sources, destinations, comes_by, goes_by };
        let whom = sources.map_or(String::new(), |peer| format!(" to {}", peer.network()));
        dropped_by(chains, RECEIVED, &packet, &format!("UDP port {port} is closed{whom}"))
    });
    match closed {
        None => Finding::ok(format!("nothing surely drops UDP port {port}")),
        Some(rule) => Finding::warning(
            rule,
            format!("Accept UDP port {port} from all nodes in front of that, in INPUT."),
        ),
    }
}

/// That of a weftd which runs, or one that is left and that nobody keeps.
pub(super) fn port_guard(facts: &Facts) -> Finding {
    if let Some(guard) = facts.status().and_then(|status| status.guard.as_ref()) {
        let Guard { port, peers, kept, .. } = guard;
        let peers = format!("UDP port {port}, for {peers} peers");
        return match kept.in_place || kept.failures == 0 {
            true => Finding::ok(peers),
            false => Finding::failed(
                format!("{peers}: can't be kept, {} failures", kept.failures),
                "weftd's log says why; until then new nodes may not be heard: docs/firewall.md.",
            ),
        };
    }
    let Some(network) = facts.network() else {
        return Finding::skipped("neither weftd nor subnet.env says the network");
    };
    let Some(chains) = &facts.firewall else { return no_firewall(facts) };
    let table = table_name(network);
    let is_left = chains.iter().any(|chain| chain.table == format!("ip {table}"));
    if !is_left {
        return Finding::ok("there is none");
    }
    let is_kept = facts.status().is_none() && facts.others.is_empty();
    match is_kept {
        true => Finding::ok("that of the last weftd, which the next one keeps or removes"),
        false => Finding::warning(
            format!("the nftables table {table} of an earlier weftd keeps new nodes out"),
            format!("Remove it: nft delete table ip {table}."),
        ),
    }
}

pub(super) fn firewall_forward(facts: &Facts) -> Finding {
    let Some(network) = facts.network() else {
        return Finding::skipped("neither weftd nor subnet.env says the network");
    };
    if facts.status().is_none() {
        return Finding::skipped("weftd sets its rules when it starts");
    }
    let subnet = facts.lease().map(|lease| lease.subnet).or(facts.subnet_file.subnet);
    let Some(chains) = &facts.firewall else { return no_firewall(facts) };
    let packet = Packet {
        udp_port: None,
        sources: Some(network),
        destinations: subnet.or(Some(network)),
        comes_by: facts.comes_by(),
        goes_by: None,
    };
    match dropped_by(chains, FORWARDED, &packet, "pods do not get packets of other hosts") {
        None => Finding::ok(format!("nothing surely drops what is for {network}")),
        Some(rule) => Finding::warning(
            rule,
            format!("Start weftd with --iptables-forward-rules, or accept {network} in FORWARD."),
        ),
    }
}

pub(super) fn no_firewall(facts: &Facts) -> Finding {
    Finding::skipped(facts.firewall_error.clone().unwrap_or_else(|| "not read".to_owned()))
}

//! Where to look when packets are dropped: a line for each reason, the same as in
//! docs/drop-reasons.md.

use crate::stats::DropReason::{self, *};

const ROUTERS: &str = "\
    the routers and switches between the hosts: tunnel datagrams say that they are not \
    ECN-capable, and a congested router should drop such, not mark them";

const NEIGHBOURS: &str = "\
    `ip neighbour`: hosts of the same link that are down and still sent to (`FAILED`, \
    `INCOMPLETE`); else the external interface, which is slower than the load";

const REFUSED: &str = "\
    `ip route get` the peer's public address, which shows a route of type prohibit; if that is \
    well, this host's OUTPUT rules for the tunnel's UDP port, and `ip xfrm policy`";

/// What to look at first.
pub fn of(reason: DropReason) -> &'static str {
    match reason {
        Runt | BadVersion => "which host that is not a peer sends to the tunnel port",
        Ipv6 => {
            "on egress usually nothing: the kernel sends IPv6 announcements on every new device; \
             on ingress which host sends them"
        }
        BadHeaderLength | BadChecksum => {
            "which host that is not a peer sends to the tunnel port; if a peer does, its memory \
             or network card"
        }
        BadTotalLength => {
            "which host that is not a peer sends to the tunnel port; if a peer does, an MTU that \
             truncates datagrams"
        }
        BadOffloadHeader => "the kernel: try `--offload=none` and report it",
        TtlExpired => "traceroute causes a few; many mean a routing loop in the pods",
        TtlZero => "a peer that forwards expired packets",
        NoRoute => "the destination pod's host: does `weft peers` list its subnet?",
        OwnSubnet => {
            "this host's bridge for pods: is it there and up, with the subnet's first address?"
        }
        SourceMartian => "the pod or peer that sends with such an address",
        SourceIsLocalSubnet => "a second host with this subnet, or a forger",
        SourceNotPeerLease => "the peer: address translation, two addresses, or a forger",
        SourceNotLeased => {
            "a node that is new, if it stops within seconds; else who sends from there?"
        }
        OuterPort => {
            "a peer behind address translation needs `--peer-check=loose`; else a pod's packets \
             that a host masquerades"
        }
        DestinationMartian => "the pod that sends there",
        DestinationMulticast => "the application: multicast is not carried, it must use unicast",
        DestinationNotLocal => "a peer with outdated leases (its clock, its store), or a forger",
        SourceRoute => "the sender: no ordinary program does this",
        CongestionMark => ROUTERS,
        NestedTunnel => "a forger, or a pod network that runs over the tunnel",
        OwnLoop => "this host's routes: the route to a peer must not lead into the overlay",
        Oversize => "the MTU in the pods; it must be at most `FLANNEL_MTU`",
        DontFragmentMtu => {
            "the MTU in the pods; it must be at most `FLANNEL_MTU`. A few are normal: path MTU \
             discovery"
        }
        SendBufferFull => "the external interface: slower than the load, or its queue is too short",
        SendUnanswered => NEIGHBOURS,
        SendForbidden => REFUSED,
        SendUnreachable => "this host's route to the peer: `ip route get` its public address",
        SendFailed => {
            "`ip route get` the peer's public address, which shows a blackhole route; if that is \
             well, `ip -statistics link` of the external interface; if that counts errors, \
             `--offload=none`"
        }
        ReceiveOverload => {
            "who sends so much: `weft drops`; then CPU: the host cannot take packets as fast as \
             they arrive"
        }
        TunFull => "CPU: the host cannot take packets as fast as they arrive",
        TunWriteFailed => {
            "`ip link show flannel0`; the log says whether the device is being recreated"
        }
        InternalError => {
            "the log: the line `Internal error in weftd` names the place in the code; report it"
        }
    }
}

/// Whether a few are normal on a healthy host.
pub fn is_normal(reason: DropReason) -> bool {
    matches!(reason, Ipv6 | DestinationMulticast | TtlExpired | DontFragmentMtu)
}

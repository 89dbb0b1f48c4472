//! A peer's state in the words of whoever has to do something about it.

use std::io;
use std::net::IpAddr;

use rustix::io::Errno;

use super::state::{Obstacle, PeerState, Way};
use crate::packet::echo::{Kinds, Reason};

const DEAF: &str = "no ping to it gets an answer, which is no fault: ICMP errors of its host, or \
                    packets of pods that go on, show that what is sent arrives at that host. \
                    Whether its pods get it is not known here: if they do not answer (`weft ping \
                    POD`), a rule there drops what is forwarded (`weft check` there), what they \
                    send goes another way (`ip rule` there), or its daemon hangs, which with the \
                    fast path shows in nothing else";

const UNASKED: &str = "this host may send no ping to it, so whether packets arrive there is not \
                       known; look at ";

const CHECK_LOOKS: &str = "`weft check` on both hosts looks for all of them";

const OR_BROADCAST: &str = ", or is it a link's broadcast address, so that the lease has a wrong \
                            PublicIP";

/// `weft check` knows rules and routes of IPv4 alone.
const RULES_OF_IPV6: &str = "look at the rules and routes of both hosts (`nft list ruleset`, \
                             `ip6tables-save`, `ip -6 rule`)";

impl PeerState {
    /// What is known of the peer at `host`, why, and what to do; nothing if all is well. `port` is
    /// the tunnel's, if there is one.
    pub fn why(self, host: IpAddr, port: Option<u16>) -> Option<String> {
        let what = port.map_or_else(|| "packets".to_owned(), |port| format!("UDP to port {port}"));
        let daemon = "is weftd or flanneld running there, with the same backend";
        let port_too = if port.is_some() { " and port" } else { "" };
        Some(match self {
            Self::Unsendable(Obstacle::Errno(errno)) => {
                let error = io::Error::from_raw_os_error(errno);
                let place = place(Errno::from_raw_os_error(errno), host, port);
                format!("this host can't send to it: {error}; look at {place}")
            }
            Self::Unsendable(Obstacle::Neighbour) => format!(
                "nobody on the link answers for {host}, or for the router to it: is that host up, \
                 and on this network (`ip neighbour show {host}`)? If its packets arrive here, \
                 what this host sends is lost on the link"
            ),
            Self::InGrace => "it is new here and has not answered yet".to_owned(),
            Self::Refused { by, code } if by == host && Reason::of(by, code) == Reason::NoPort => {
                let found = if host.is_ipv4() { CHECK_LOOKS } else { RULES_OF_IPV6 };
                format!(
                    "the answer to {what} is, with the address {by}, that the port is \
                     unreachable: {daemon}{port_too}? Else a firewall there rejects it, or a rule \
                     of this host's OUTPUT or NAT, or a second machine has that address: {found}"
                )
            }
            Self::Refused { by, code } => {
                let protocol = if by.is_ipv4() { "ICMP" } else { "ICMPv6" };
                let kind = Kinds::of(by).unreachable;
                format!(
                    "{by} refuses it ({protocol} type {kind}, code {code}): a firewall rejects \
                     {what}"
                )
            }
            Self::OneWay(way) => one_way(way, host, &what),
            Self::Silent { host_answers: true } => format!(
                "nothing comes back through the tunnel, and the host itself answers pings: \
                 {daemon}{port_too}, and does every firewall on the way let {what} through, both \
                 ways? Or a rule (SNAT, MASQUERADE) gives what leaves another source: `tcpdump -ni \
                 any host {host}` on both hosts shows whether it arrives, and from where"
            ),
            Self::Silent { host_answers: false } => format!(
                "nothing comes back, and the host itself answers no pings: is it up, do routes \
                 lead there and back, and does every firewall on the way let {what} through? Or \
                 its firewall drops pings and their ICMP errors, and its pods only receive, which \
                 is no fault"
            ),
            Self::Lossy(percent) => format!(
                "{percent} of 100 echoes are lost: look for a broken or full link to {host}, for a \
                 firewall's rule that drops some packets, and at drops on both hosts (`weft \
                 drops`). If pods lose nothing, it is the echoes alone: a firewall of either host \
                 drops pings, or lets in so many a second"
            ),
            Self::Deaf => DEAF.to_owned(),
            Self::Unasked => UNASKED.to_owned() + &output_rules(None),
            Self::Unheard => format!(
                "nothing comes back of what is sent to it, and this host may send no ping to it, \
                 which would tell why: is {host} up, do routes lead there and back, does every \
                 firewall on the way let {what} through? Or its pods only receive, which is no \
                 fault. What forbids the pings is one of {}",
                output_rules(None)
            ),
            Self::Idle | Self::Ok => return None,
        })
    }

    /// The same where a cloud's network carries the packets, and no tunnel.
    pub fn why_in_cloud(self, host: IpAddr) -> Option<String> {
        let found = match self {
            Self::Silent { host_answers: true } => {
                "nothing comes back from its subnet, and the host itself answers pings"
            }
            Self::Silent { host_answers: false } => {
                "nothing comes back from its subnet, and the host itself answers no pings: is it \
                 up?"
            }
            Self::OneWay(Way::There) => {
                "its packets arrive here, and no echo to its subnet is answered"
            }
            Self::Idle
            | Self::Ok
            | Self::Deaf
            | Self::Unasked
            | Self::Unheard
            | Self::Lossy(_)
            | Self::OneWay(Way::Back | Way::Foreign(_))
            | Self::InGrace
            | Self::Refused { .. }
            | Self::Unsendable(_) => return self.why(host, None),
        };
        Some(format!(
            "{found}. Look at the cloud: does the table of its network have the route to that \
             subnet, and does it lead to {host} (`weft status` there says so, if weftd runs)? May \
             that instance forward packets (AWS: source/destination check off; Google: \
             canIpForward)? Do security groups and the cloud's firewall let pings and the pods' \
             network in, at both instances? If pods reach each other, pings alone are dropped, \
             which is no fault"
        ))
    }
}

/// One direction fails, or pings alone.
fn one_way(way: Way, host: IpAddr, what: &str) -> String {
    match way {
        Way::There => format!(
            "its packets arrive here, and no echo to it is answered: what is sent to it is lost, \
             or pings alone are. HEARD of this host in `weft peers` at {host} tells. Seconds ago: \
             packets arrive there, and a firewall of either host, or on the way, drops pings or \
             more; if pods reach each other, pings alone, which is no fault. Longer ago: they are \
             lost here (`weft check`), on the way, or where they come in there. If nothing answers \
             `weft peers` there, its daemon hangs"
        ),
        Way::Back => format!(
            "its packets reach this host, and none was seen to go on to a pod here: {} that drops \
             {what} from {host}, or what comes out of the tunnel, with udp `weft drops` says what \
             weftd drops; else they are damaged on the way (InCsumErrors of `nstat -az` grows), \
             with vxlan of another VNI (`ip -d link show type vxlan` on both hosts), with \
             wireguard of another PSK or key, or handshakes are flooded (HANDSHAKE in `weft \
             peers` is old, `flannel_wireguard_handshakes_total` grows), or what `weft check` \
             can't judge drops them: an IPsec policy (`ip xfrm policy`) or a rule (`nft list \
             ruleset`). If pods reach each other, such a rule drops pings alone, which is no \
             fault",
            match host {
                IpAddr::V4(_) => "`weft check` here looks for a rule, route or rp_filter",
                IpAddr::V6(_) => "look here for a rule or route (`ip6tables-save`, `ip -6 rule`)",
            }
        ),
        Way::Foreign(source) => format!(
            "its packets arrive here from {source} and the like, which is in no lease of {host} \
             here, and are dropped if another node leases it (src-not-peer-lease): compare \
             FLANNEL_SUBNET of subnet.env at {host} with `weft peers` here"
        ),
    }
}

/// Where to look for what refuses a send to this host with this errno.
fn place(errno: Errno, host: IpAddr, port: Option<u16>) -> String {
    let rules = if host.is_ipv4() { "`ip rule`" } else { "`ip -6 rule`" };
    match errno {
        Errno::PERM => output_rules(port),
        Errno::ACCESS => {
            // Also of what a socket may not send to (`udp_sendmsg`, net/ipv4/udp.c).
            let broadcast = if host.is_ipv4() { OR_BROADCAST } else { "" };
            format!(
                "`ip route get {host}`, and the same to its subnet: does a rule ({rules}) or \
                 route prohibit it, perhaps for this host's own packets alone{broadcast}?"
            )
        }
        _ => format!(
            "this host's routes and rules (`ip route get {host}`, the same to its subnet, and \
             {rules})"
        ),
    }
}

/// What refuses a send of this host. Without a tunnel what pods send is forwarded.
fn output_rules(port: Option<u16>) -> String {
    let forwarded = match port {
        Some(_) => "",
        None => ". What pods send passes FORWARD in place of OUTPUT, and may go",
    };
    format!(
        "the OUTPUT rules of this host's firewall, its IPsec policies (`ip xfrm policy`), and its \
         table of connections, which may be full (`weft check`){forwarded}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::net::{Ipv4Addr, Ipv6Addr};

    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
    const HOST_OF_IPV6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));

    /// A healthy host that drops pings, and whose pods speak UDP alone, looks the same.
    #[test]
    fn what_is_heard_and_answers_no_echo_may_be_well() {
        let why = PeerState::OneWay(Way::There).why(HOST, Some(8285)).unwrap();
        let (first, rest) = why.split_once('.').unwrap();
        assert!(first.contains("echo") && !first.contains("nothing"), "{first}");
        assert!(rest.contains("HEARD") && rest.contains("192.0.2.2"), "{rest}");
    }

    #[test]
    fn a_links_broadcast_address_is_a_wrong_public_ip() {
        let refused = PeerState::Unsendable(Obstacle::Errno(Errno::ACCESS.raw_os_error()));
        let why = refused.why(HOST, Some(8285)).unwrap();
        assert!(why.contains("ip route get 192.0.2.2") && why.contains("broadcast"), "{why}");
    }

    #[test]
    fn in_a_cloud_its_route_is_named() {
        for state in [
            PeerState::Silent { host_answers: true },
            PeerState::Silent { host_answers: false },
            PeerState::OneWay(Way::There),
        ] {
            let why = state.why_in_cloud(HOST).unwrap();
            for part in ["the table", "source/destination", "security groups"] {
                assert!(why.contains(part), "{part} is not named: {why}");
            }
            assert!(!why.contains("tunnel"), "there is none: {why}");
        }
        assert_eq!(PeerState::Ok.why_in_cloud(HOST), None);
    }

    /// What IPv6 does not have, and what is not looked at of it, is not spoken of.
    #[test]
    fn words_are_true_of_ipv6() {
        let refused = |by, code| PeerState::Refused { by, code };
        let forbidden = PeerState::Unsendable(Obstacle::Errno(Errno::ACCESS.raw_os_error()));
        for (host, words, others) in [
            (HOST, ["ICMP type 3", "rp_filter", "(`ip rule`)"], ["ICMPv6", "ip6", "ip -6"]),
            (HOST_OF_IPV6, ["ICMPv6 type 1", "ip6tables", "ip -6 rule"], ["ICMP ", "rp_", "broad"]),
        ] {
            let states = [refused(host, 0), PeerState::OneWay(Way::Back), forbidden];
            for ((state, said), unsaid) in states.into_iter().zip(words).zip(others) {
                let why = state.why(host, Some(8472)).unwrap();
                assert!(why.contains(said) && !why.contains(unsaid), "{why}");
            }
        }
        let closed = refused(HOST_OF_IPV6, 4).why(HOST_OF_IPV6, Some(8472)).unwrap();
        assert!(!closed.contains("code 4"), "the port may be closed: {closed}");
    }

    #[test]
    fn output_is_of_pods_packets_where_they_are_in_datagrams() {
        let refused = PeerState::Unsendable(Obstacle::Errno(Errno::PERM.raw_os_error()));
        for (port, forwards) in [(Some(8285), false), (Some(8472), false), (None, true)] {
            let why = refused.why(HOST, port).unwrap();
            assert!(why.contains("OUTPUT"), "{why}");
            assert_eq!(why.contains("FORWARD"), forwards, "{why}");
        }
    }
}

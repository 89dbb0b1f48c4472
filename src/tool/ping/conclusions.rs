//! What follows from the answers, in words, and where two causes fit how to tell them apart.

use serde::Serialize;

use crate::backend_kind::BackendKind;
use crate::tool::echo::{Echoes, Leg};

/// What the answers show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Shows {
    /// Whatever was asked.
    Answers,
    /// The host answers no pings, the rest does.
    HostIsDeaf,
    /// Nothing there answers pings, and weftd knows that packets pass all the same.
    Deaf,
    /// The pod answers, so packets pass, and its host's end of the overlay does not.
    PodAnswers,
    /// This host sends it no packets of pods.
    NotSentTo,
    /// Its lease has no address of the family of its subnet, so nobody asked it.
    NotTried,
    /// The cause is this host.
    Unsendable,
    /// What is sent there goes in circles until it expires.
    Loops,
    Nothing,
    /// The host alone answers.
    HostOnly,
    /// Full packets are lost or refused, all of them, and no small ones.
    FullAreLost,
    PodIsSilent,
    Lossy,
}

impl Shows {
    /// What follows, and where two causes fit how to tell them apart.
    pub(super) fn conclusion(self, legs: &[Echoes], kind: Option<BackendKind>) -> String {
        let text = match self {
            Self::Answers | Self::HostIsDeaf => return answers(self, legs),
            Self::NotSentTo => "this host sends it no packets: see `weft peers`",
            Self::NotTried => {
                "its lease has no address of the family of its subnet to ping: see `weft peers`"
            }
            Self::Deaf => {
                "it answers no pings, and its host's ICMP errors or connections that go on have \
                 told weftd that packets arrive there; whether pods answer, `--pod` with a pod \
                 there tells"
            }
            Self::PodAnswers => return pod_answers(legs),
            Self::Unsendable => return unsendable(legs, kind),
            Self::Loops => return looping(legs),
            Self::Nothing => {
                "nothing answers, and the kernel took all echoes: the host is down, or what \
                 is sent or the answers are lost on the way or in a firewall, or go to a wrong \
                 machine, or it answers no pings at all. `weft check` here looks at this host, its \
                 neighbours too; `weft status` there says whether anything arrives"
            }
            Self::HostOnly => match has_device(kind) {
                true => return host_only(legs),
                false => {
                    "the host answers, the bridge of its pods does not answer this host's pods: it \
                     may have none yet, or packets of the pods' network are lost there or on the \
                     way, or the way back to this host's subnet is another one (`weft check` and \
                     `ip route get` there)"
                }
            },
            Self::FullAreLost => return full_are_lost(legs, kind),
            Self::PodIsSilent => {
                "the overlay carries packets and the pod does not answer: look at that host's \
                 bridge, its route to the pod (`ip route get` there), its FORWARD rules, network \
                 policies, and whether the pod runs"
            }
            Self::Lossy => return lossy(legs),
        };
        text.to_owned()
    }
}

fn host_only(legs: &[Echoes]) -> String {
    // A pod that does not answer either has told.
    let pings = match legs.iter().any(|it| it.leg == Leg::Pod) {
        true => "",
        false => {
            ", or a firewall there drops pings to that address, which is no fault: `--pod` with a \
             pod there tells"
        }
    };
    format!(
        "the host answers, its end of the overlay does not: the tunnel's packets are lost there or \
         back (a firewall on the way, in a cloud as well, or another backend or port), or weftd or \
         flanneld does not run there with this subnet, or a rule of either host rewrites the \
         source of what leaves (SNAT, MASQUERADE; `tcpdump -ni any udp` at the other end shows \
         from which address and port it comes){pings}. `weft check` on both hosts; `weft status` \
         there says whether they arrive"
    )
}

/// The echoes are this host's own: what that leaves out is said.
fn answers(shows: Shows, legs: &[Echoes]) -> String {
    let is_pod = legs.iter().any(|it| it.leg == Leg::Pod);
    let whom = if is_pod {
        "the pod answers this host, and the overlay there"
    } else {
        "its overlay answers this host, with"
    };
    let host = legs.iter().find(|it| it.leg == Leg::Host && it.answered == 0);
    let deaf = match host.filter(|_| shows == Shows::HostIsDeaf) {
        None => String::new(),
        Some(Echoes { refused: Some(why), .. }) => {
            format!("; this host's own packets to the host itself can't be sent: {why}")
        }
        Some(_) => "; the host itself answers no pings".to_owned(),
    };
    let there =
        if is_pod { "" } else { "the pods' bridge and firewall there (--pod ADDRESS), and " };
    format!("{whom} full packets too{deaf}; {}", not_tried(there))
}

/// What this host's own echoes do not pass, beside what is `there`.
fn not_tried(there: &str) -> String {
    format!(
        "not tried: {there}this host's pods, whose packets also pass its bridge, rules and \
         firewall (`weft explain`)"
    )
}

fn pod_answers(legs: &[Echoes]) -> String {
    let is_deaf = !legs.iter().any(|it| it.leg == Leg::Host && it.answered > 0);
    let whom =
        if is_deaf { "its host answers no pings" } else { "its host's overlay answers none" };
    format!(
        "the pod answers this host, so packets pass both ways; {whom}, as where a firewall there \
         drops what is for the host itself, so nothing is known of full packets; {}",
        not_tried("")
    )
}

pub(super) fn loops(echoes: &Echoes) -> bool {
    echoes.answered == 0 && echoes.expired_at.is_some()
}

fn looping(legs: &[Echoes]) -> String {
    let found =
        legs.iter().filter(|it| loops(it)).find_map(|it| Some((it.address, it.expired_at?)));
    found.map_or_else(String::new, |(to, by)| {
        format!(
            "what is sent to {to} goes in circles, its TTL expired at {by}: a route there, or on \
             the way, leads back. `ip route get {to}` here and at {by}, and `traceroute -n {to}`, \
             show who sends it back. Or a rule on the way sets the TTL"
        )
    })
}

fn unsendable(legs: &[Echoes], kind: Option<BackendKind>) -> String {
    // What goes behind the host says more of what pods send.
    let (of_host, behind): (Vec<_>, Vec<_>) = legs.iter().partition(|it| it.leg == Leg::Host);
    let unanswered = behind.into_iter().chain(of_host).filter(|it| it.answered == 0);
    let refused = unanswered.filter_map(|it| Some((it, it.refused.as_ref()?))).next();
    let Some((Echoes { leg, address, is_by_output, .. }, why)) = refused else {
        return String::new();
    };
    // Datagrams of a tunnel are this host's own as well.
    let is_tunnel = *leg == Leg::Host && has_device(kind);
    let text = match *is_by_output && !is_tunnel {
        true => format!(
            "this host's own packets to {address} can't be sent: {why}; what its pods send passes \
             FORWARD in place of OUTPUT, and may go unless an IPsec policy is for that too (`ip \
             xfrm policy`, `nft list ruleset`, `iptables-save`)"
        ),
        false => format!("this host can't send to {address}: {why}"),
    };
    text + ". `ip route get` and `weft check` here may show more"
}

pub(super) fn loses_most(echoes: &Echoes) -> bool {
    echoes.answered * 2 < echoes.sent
}

/// Loss may grow with the packets' length, as where a queue is full: a narrow link loses all long
/// ones.
fn lossy(legs: &[Echoes]) -> String {
    let is =
        |which, holds: fn(&Echoes) -> bool| legs.iter().any(|leg| leg.leg == which && holds(leg));
    let passes_full = is(Leg::TunnelFull, |leg| leg.answered == leg.sent);
    let is_pods = is(Leg::Pod, |leg| leg.answered > 0)
        && is(Leg::Tunnel, |leg| leg.answered == 0)
        && !is(Leg::TunnelFull, |leg| leg.answered > 0);
    let counted = |is_meant: fn(Leg) -> bool| {
        // What answers nothing loses nothing, if something behind it answers.
        let is_deaf = |leg: &Echoes| leg.answered == 0 && (is_pods || leg.leg == Leg::Host);
        let counted = legs.iter().filter(|leg| is_meant(leg.leg) && !is_deaf(leg));
        let (sent, lost) = counted
            .fold((0, 0), |(sent, lost), leg| (sent + leg.sent, lost + leg.sent - leg.answered));
        format!("{lost} of {sent}")
    };
    let small = counted(|leg| leg != Leg::TunnelFull);
    let full = counted(|leg| leg == Leg::TunnelFull);
    let is_tunnels = is(Leg::Host, |leg| leg.answered == leg.sent) && is(Leg::Tunnel, loses_most);
    let where_to_look = match is_tunnels {
        true if passes_full => {
            "none of the host's own, and no full ones: look for a rule of either host, or on the \
             way, that goes by their length (`weft check` on both hosts, `nft list ruleset`, \
             `iptables-save`)"
        }
        true => {
            "none of the host's own: look for a rate limit in the firewalls of both hosts, and at \
             what weftd itself drops or can't send (`weft drops` on both hosts)"
        }
        false => {
            "a full or slow link, a shaper or a broken cable does that (`tc -s qdisc` and `ip -s \
             link` of both hosts count drops), and so do a firewall's rule for some packets, at \
             random or beyond a rate (`nft list ruleset`, `iptables-save`), or two machines with \
             one hardware or IP address (compare `ip link` of the hosts; `weft check` asks who has \
             the addresses); if pods lose nothing, a firewall lets in so many pings a second"
        }
    };
    let full = if is_pods { String::new() } else { format!(" and {full} full") };
    format!("{small} small{full} packets are lost: {where_to_look}")
}

fn full_are_lost(legs: &[Echoes], kind: Option<BackendKind>) -> String {
    let full = legs.iter().find(|leg| leg.leg == Leg::TunnelFull);
    // It says that the path is known to be narrow, or what else keeps this host from it.
    if let Some(why) = full.and_then(|leg| leg.refused.as_ref()) {
        return format!("small packets pass, and this host can't send full ones: {why}");
    }
    let cure = if kind == Some(BackendKind::Udp) {
        "while TCP is in use weftd measures such a path, if the peer answers, and tells the \
             pods: `weft peers` says narrow"
    } else if kind.is_some_and(BackendKind::has_mtu_key) {
        "correct the link, or set a smaller MTU in the Backend of the network \
             configuration"
    } else {
        "correct the link, or lower the MTU of the hosts' interfaces"
    };
    format!(
        "all small packets pass, and of {} full ones, sent in turn, none does: a link of the path \
         is narrower than the overlay's MTU, or a rule, filter or XDP program of either host drops \
         long packets (`nft list ruleset`, `iptables-save`, `tc filter show`, `ip -d link`). If it \
         is a link: {cure}",
        full.map_or(0, |leg| leg.sent)
    )
}

pub(super) fn has_device(kind: Option<BackendKind>) -> bool {
    kind.is_some_and(BackendKind::has_device)
}

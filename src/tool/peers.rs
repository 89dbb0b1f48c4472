//! `weft peers`: a row for each lease of another node, those that need a person first.

use std::cmp::Reverse;
use std::fmt::Write as _;

use crate::control::clock;
use crate::status::{Peer, PeerState, Traffic, Via};
use crate::tool::style::Style;
use crate::tool::table;

const HEADINGS: [&str; 11] = [
    "SUBNET", "NODE", "ADDRESS", "STATE", "RTT", "MTU", "HEARD", "SENT", "RECEIVED", "FAILED",
    "KERNEL",
];

/// Behind them, where WireGuard or IPsec carries the packets.
const HANDSHAKE: &str = "HANDSHAKE";

/// Where in a row its state is.
const STATE_AT: usize = 3;

/// States of peers that are known to be well.
const WELL: [PeerState; 4] = [PeerState::Ok, PeerState::Narrow, PeerState::Deaf, PeerState::SetUp];

/// Peers below the table of which it is told what is wrong; the others mostly have the same.
pub(super) const EXPLAINED_MAX: usize = 5;

/// The table of `weft peers`.
pub(super) fn render(mut peers: Vec<Peer>, style: Style) -> String {
    // Stable: the others stay in the order of their subnets.
    peers.sort_by_key(|peer| Reverse(peer.state.is_alarming()));
    let now_unix = clock::unix_seconds();
    let has_keys = peers.iter().any(|peer| peer.wireguard.is_some() || peer.ipsec.is_some());
    let rows = peers.iter().map(|peer| {
        let last = has_keys.then(|| handshake(peer, now_unix));
        row(peer).into_iter().chain(last).collect()
    });
    let rows: Vec<_> = rows.collect();
    let mut headings = HEADINGS.to_vec();
    headings.extend(has_keys.then_some(HANDSHAKE));
    let mut screen = table::render(&headings, &rows, |row, column, shown| {
        let state = peers[row].state;
        match column {
            STATE_AT if state.is_alarming() => style.bad(shown),
            STATE_AT if WELL.contains(&state) => style.good(shown),
            _ => shown.to_owned(),
        }
    });
    let explained =
        peers.iter().filter_map(|peer| Some((peer.shown_subnet(), peer.why.as_deref()?)));
    for (subnet, why) in explained.take(EXPLAINED_MAX) {
        writeln!(screen, "{subnet}: {why}").ok();
    }
    screen
}

/// How a state is shown: loud if it needs a person.
pub(super) fn shown(state: PeerState) -> String {
    let name = state.name();
    let is_loud = state.is_alarming() && state != PeerState::NotSetUp;
    if is_loud { name.to_uppercase() } else { name.to_owned() }
}

fn row(peer: &Peer) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let traffic = |packets_and_bytes: fn(&Traffic) -> (u64, u64)| {
        let (packets, bytes) = packets_and_bytes(peer.traffic.as_ref()?);
        Some(format!("{packets} ({})", scaled(bytes)))
    };
    vec![
        peer.subnets().map(|subnets| subnets.to_string()).unwrap_or_default(),
        or_dash(peer.node.clone()),
        addresses(peer),
        shown(peer.state),
        or_dash(peer.round_trip_microseconds.map(milliseconds)),
        or_dash(peer.path_mtu_bytes.map(|bytes| bytes.to_string())),
        or_dash(peer.heard_seconds_ago.map(ago)),
        or_dash(
            traffic(|traffic| (traffic.packets_sent, traffic.bytes_sent))
                .or_else(|| Some(scaled(peer.wireguard.as_ref()?.sent_bytes)))
                .or_else(|| Some(scaled(peer.ipsec?.sent_bytes))),
        ),
        or_dash(
            traffic(|traffic| (traffic.packets_received, traffic.bytes_received))
                .or_else(|| Some(scaled(peer.wireguard.as_ref()?.received_bytes)))
                .or_else(|| Some(scaled(peer.ipsec?.received_bytes))),
        ),
        or_dash(peer.failed_sends.map(|packets| packets.to_string())),
        or_dash(share(peer)),
    ]
}

/// How long ago keys were agreed on.
fn handshake(peer: &Peer, now_unix: u64) -> String {
    let of_wireguard = peer.wireguard.as_ref().map(|it| it.last_handshake_unix);
    let last = of_wireguard.or_else(|| peer.ipsec.map(|it| it.installed_unix));
    let Some(at) = last else { return "-".to_owned() };
    at.map_or_else(|| "never".to_owned(), |at| ago(now_unix.saturating_sub(at)))
}

/// Where its packets go, of both families if those of IPv6 go elsewhere.
fn addresses(peer: &Peer) -> String {
    let v6 = peer.ipv6_via.filter(|via| *via != peer.via);
    let endpoint = peer.wireguard.as_ref().and_then(|it| it.endpoint).map(Via::Tunnel);
    let via = endpoint.unwrap_or(peer.via);
    v6.map_or_else(|| via.to_string(), |v6| format!("{via},{v6}"))
}

/// How much of all packets the kernel's programs carried.
fn share(peer: &Peer) -> Option<String> {
    let packets = |traffic: Traffic| traffic.packets_sent + traffic.packets_received;
    let (kernel, all) = (packets(peer.fast_path?), packets(peer.traffic?));
    (all > 0).then(|| format!("{}%", kernel * 100 / all))
}

pub(super) fn milliseconds(microseconds: u64) -> String {
    format!("{}.{:02}ms", microseconds / 1000, microseconds % 1000 / 10)
}

/// `5s`, `4m`, `3h`.
pub(super) fn ago(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

/// `1.4 GB`; powers of 1000, as interfaces' rates are.
fn scaled(bytes: u64) -> String {
    let mut unit = 0;
    let mut tenths = u128::from(bytes) * 10;
    while tenths >= 10_000 && unit < 5 {
        tenths /= 1000;
        unit += 1;
    }
    let name = ["B", "kB", "MB", "GB", "TB", "PB"][unit];
    if unit == 0 { format!("{bytes} B") } else { format!("{}.{} {name}", tenths / 10, tenths % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Prefixes;
    use crate::status::{IpsecPeer, WireguardPeer};

    #[test]
    fn a_row_says_it_all_and_silent_peers_come_first() {
        let peer = |number: u8, state| {
            let via = Via::Tunnel(format!("192.0.2.{number}:8285").parse().unwrap());
            Peer::new(format!("10.5.{number}.0/24").parse().unwrap(), None, via, state)
        };
        let silent = Peer {
            node: Some("b".to_owned()),
            heard_seconds_ago: Some(250),
            round_trip_microseconds: Some(1234),
            path_mtu_bytes: Some(1372),
            traffic: Some(Traffic {
                packets_sent: 2000,
                bytes_sent: 1_940_000,
                ..Traffic::default()
            }),
            failed_sends: Some(3),
            fast_path: Some(Traffic { packets_sent: 500, ..Traffic::default() }),
            ..peer(2, PeerState::Silent)
        };
        let screen = render(vec![peer(1, PeerState::Idle), silent], Style::PLAIN);
        let lines: Vec<Vec<&str>> =
            screen.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..4], ["SUBNET", "NODE", "ADDRESS", "STATE"]);
        assert_eq!(
            lines[1].join(" "),
            "10.5.2.0/24 b 192.0.2.2:8285 SILENT 1.23ms 1372 4m 2000 (1.9 MB) 0 (0 B) 3 25%"
        );
        assert_eq!(lines[2][..5], ["10.5.1.0/24", "-", "192.0.2.1:8285", "idle", "-"]);
    }

    #[test]
    fn both_families_of_a_peer_are_shown() {
        let subnets: Prefixes = "10.5.1.0/24,fd00:5:0:1::/64".parse().unwrap();
        let shown = |via, ipv6_via| {
            let peer = Peer { ipv6_via, ..Peer::new(subnets, None, via, PeerState::Ok) };
            row(&peer)[..3].join(" ")
        };
        let [v4, v6] = ["192.0.2.1", "fd99::1"].map(|host| Via::Host(host.parse().unwrap()));
        let tunnel = Via::Tunnel("192.0.2.1:8285".parse().unwrap());
        let both = "10.5.1.0/24,fd00:5:0:1::/64 -";
        assert_eq!(shown(v4, Some(v6)), format!("{both} 192.0.2.1,fd99::1"));
        assert_eq!(shown(v4, None), format!("{both} 192.0.2.1"), "no IPv6 goes there");
        assert_eq!(shown(tunnel, Some(tunnel)), format!("{both} 192.0.2.1:8285"), "one for both");
    }

    #[test]
    fn wireguard_has_bytes_and_handshakes() {
        let subnet = "10.5.1.0/24".parse().unwrap();
        let via = Via::Host("192.0.2.1".parse().unwrap());
        let peer = |last_handshake_unix| {
            let wireguard = WireguardPeer::sample(last_handshake_unix);
            Peer { wireguard: Some(wireguard), ..Peer::new(subnet, None, via, PeerState::Ok) }
        };
        let screen = render(vec![peer(Some(0)), peer(None)], Style::PLAIN);
        let lines: Vec<Vec<&str>> =
            screen.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0].last(), Some(&"HANDSHAKE"));
        let shown = lines[2].join(" ");
        let expected = "10.5.1.0/24 - 198.51.100.7:4242 ok - - - 3.0 kB 2.0 kB - - never";
        assert_eq!(shown, expected, "where it has moved to");
        assert!(lines[1].last().unwrap().ends_with('h'));
    }

    #[test]
    fn ipsec_has_them_too() {
        let ipsec = |installed_unix| {
            let via = Via::Host("192.0.2.1".parse().unwrap());
            let (received_bytes, sent_bytes) = (2000, 3000);
            let known =
                IpsecPeer { installed_unix, received_bytes, sent_bytes, ..Default::default() };
            let subnet = "10.5.1.0/24".parse().unwrap();
            Peer { ipsec: Some(known), ..Peer::new(subnet, None, via, PeerState::SetUp) }
        };
        let screen = render(vec![ipsec(Some(0)), ipsec(None)], Style::PLAIN);
        let lines: Vec<Vec<&str>> =
            screen.lines().map(|line| line.split_whitespace().collect()).collect();
        let expected = "10.5.1.0/24 - 192.0.2.1 set-up - - - 3.0 kB 2.0 kB - - never";
        assert_eq!(lines[2].join(" "), expected);
        assert!(lines[1].last().unwrap().ends_with('h'));
    }

    #[test]
    fn bytes_are_scaled() {
        for (bytes, text) in [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_950_000, "1.9 MB")] {
            assert_eq!(scaled(bytes), text);
        }
    }
}

//! The connections that charon has to have, one for each peer, in VICI's words; and what it says
//! of them. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::config::network::IpsecBackendConfig;
use crate::host::netlink::tunnel_policies::{REQUEST_ID, TunnelPolicy, of_tunnel};
use crate::route::Prefix;
use crate::status::IpsecPeer;

use super::vici::{Message, Request};

/// flannel's algorithms for the exchange of keys, which peers must have in common.
const IKE_PROPOSAL: &str = "aes256-sha256-modp4096";

/// How often a peer that sends nothing is asked whether it is there, in seconds.
const PEER_CHECK: &str = "10s";

/// Who encrypts the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
pub(super) enum EspPlane {
    /// The kernel, by policies that weftd sets.
    #[display("the kernel")]
    Kernel,
    /// charon, with its plugin kernel-libipsec. It sets its own policies and routes.
    #[display("charon")]
    Charon,
}

impl EspPlane {
    /// By what charon says of itself: the first of its plugins that can is the one that does.
    pub(super) fn of(stats: &Message) -> Self {
        let plugins = stats.list("plugins").iter().map(String::as_str);
        let mut able = plugins.filter(|it| ["kernel-libipsec", "kernel-netlink"].contains(it));
        if able.next() == Some("kernel-libipsec") { Self::Charon } else { Self::Kernel }
    }
}

/// One end of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    /// By which others know it.
    pub(super) public_address: Ipv4Addr,
    /// What it sends from, or is sent to.
    pub(super) address: Ipv4Addr,
    /// Its pods.
    pub(super) subnet: Prefix,
}

/// What leads to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connection {
    pub(super) own: End,
    pub(super) peer: End,
}

impl Connection {
    /// As flannel names it.
    pub(super) fn name(&self) -> String {
        let Self { own, peer } = self;
        format!("{}-{}-{}-{}", own.public_address, own.subnet, peer.subnet, peer.public_address)
    }

    /// What flannel calls what is agreed on for the pods' packets.
    fn child(&self) -> String {
        format!("{}-{}", self.own.subnet, self.peer.subnet)
    }

    /// Tells charon what this host and the peer prove themselves to each other with. Again under
    /// the same name, it takes the place of the one before.
    pub(super) fn share(&self, settings: &IpsecBackendConfig) -> Request {
        Request::command("load-shared")
            .text("id", &self.name())
            .text("type", "IKE")
            .text("data", &settings.psk.0)
            .list_of("owners", &self.peer.public_address.to_string())
    }

    /// Tells charon of it. What is as before stays as it is, with its keys.
    pub(super) fn load(&self, settings: &IpsecBackendConfig, plane: EspPlane) -> Request {
        let Self { own, peer } = self;
        let proves = |end: &End| {
            let id = end.public_address.to_string();
            move |it: Request| it.text("auth", "psk").text("id", &id)
        };
        let child = |it: Request| {
            let child = it
                .list_of("local_ts", &own.subnet.to_string())
                .list_of("remote_ts", &peer.subnet.to_string())
                .list_of("esp_proposals", &settings.esp_proposal)
                .text("mode", "tunnel")
                .text("rekey_time", "1h")
                .text("start_action", "start")
                .text("dpd_action", "restart");
            match plane {
                // They are there before any keys, so that nothing leaves without.
                EspPlane::Kernel => {
                    child.text("policies", "no").text("reqid", &REQUEST_ID.to_string())
                }
                // It knows the keys for a packet by this number, so each peer needs its own.
                EspPlane::Charon => child,
            }
        };
        Request::command("load-conn").section(&self.name(), |it| {
            it.text("version", "2")
                .list_of("local_addrs", &own.address.to_string())
                .list_of("remote_addrs", &peer.address.to_string())
                .list_of("proposals", IKE_PROPOSAL)
                .text("keyingtries", "0")
                .text("dpd_delay", PEER_CHECK)
                .text("encap", if settings.is_in_udp { "yes" } else { "no" })
                .section("local", proves(own))
                .section("remote", proves(peer))
                .section("children", |it| it.section(&self.child(), child))
        })
    }

    /// Has charon try again, without waiting for the outcome.
    pub(super) fn initiate(&self) -> Request {
        Request::command("initiate")
            .text("ike", &self.name())
            .text("child", &self.child())
            .text("timeout", "-1")
    }

    /// What the kernel has to have for it.
    pub(super) fn policies(&self) -> [TunnelPolicy; 3] {
        let Self { own, peer } = self;
        of_tunnel((own.subnet, own.address), (peer.subnet, peer.address))
    }
}

/// What makes charon forget a connection and its keys, whoever has loaded it.
pub(super) fn forget(name: &str) -> [Request; 3] {
    [
        Request::command("unload-conn").text("name", name),
        Request::command("unload-shared").text("id", name),
        // Without a wait for a peer that may be gone.
        Request::command("terminate").text("ike", name).text("force", "yes").text("timeout", "-1"),
    ]
}

/// Whether a connection of this name is of a node of such a network, of weftd's or flannel's.
pub(super) fn is_of(name: &str, networks: &[Prefix]) -> bool {
    let mut parts = name.split('-');
    let (Some(public), Some(own), Some(peer), Some(host), None) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let is_inside = |text: &str| {
        let subnet = text.parse::<Prefix>();
        subnet.is_ok_and(|subnet| networks.iter().any(|network| network.covers(subnet)))
    };
    let is_address = |text: &str| text.parse::<Ipv4Addr>().is_ok();
    is_address(public) && is_address(host) && is_inside(own) && is_inside(peer)
}

/// What is agreed on with each peer, by the names of connections, from the listing at `now_unix`.
/// If both ends have begun, there may be two of a name.
pub(super) fn associations(listing: &[Message], now_unix: u64) -> BTreeMap<String, IpsecPeer> {
    let mut all = BTreeMap::<String, IpsecPeer>::new();
    let since = |seconds_ago: Option<u64>| seconds_ago.map(|ago| now_unix.saturating_sub(ago));
    for (name, ike) in listing.iter().flat_map(Message::sections) {
        let peer = all.entry(name.to_owned()).or_default();
        if ike.text("state") == Some("ESTABLISHED") {
            peer.established_unix = peer.established_unix.max(since(ike.number("established")));
        }
        let children = ike.section("child-sas").into_iter().flat_map(Message::sections);
        for (_, child) in children.filter(|(_, it)| it.text("state") == Some("INSTALLED")) {
            peer.installed_unix = peer.installed_unix.max(since(child.number("install-time")));
            peer.received_bytes += child.number("bytes-in").unwrap_or(0);
            peer.sent_bytes += child.number("bytes-out").unwrap_or(0);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::backend::ipsec::vici::Packet;

    fn connection() -> Connection {
        let end = |last, subnet: &str| {
            let address = Ipv4Addr::new(192, 0, 2, last);
            End { public_address: address, address, subnet: subnet.parse().unwrap() }
        };
        Connection { own: end(1, "10.5.1.0/24"), peer: end(2, "10.5.2.0/24") }
    }

    fn settings() -> IpsecBackendConfig {
        let psk = "0123456789abcdef".repeat(6);
        IpsecBackendConfig::parse(&json!({ "PSK": psk, "UDPEncap": true })).unwrap()
    }

    /// What a request says, read as charon reads it: only the first byte of an answer differs.
    fn said(request: &Request) -> Message {
        let body = &request.bytes()[2 + request.command.len()..];
        match Packet::parse(&[&[1], body].concat()) {
            Ok(Packet::Response(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn connections_are_flannels() {
        let name = "192.0.2.1-10.5.1.0/24-10.5.2.0/24-192.0.2.2";
        assert_eq!(connection().name(), name);
        let loaded = said(&connection().load(&settings(), EspPlane::Kernel));
        let connection_said = loaded.section(name).unwrap();
        for (key, value) in [("version", "2"), ("keyingtries", "0"), ("encap", "yes")] {
            assert_eq!(connection_said.text(key), Some(value));
        }
        for (key, value) in [
            ("local_addrs", "192.0.2.1"),
            ("remote_addrs", "192.0.2.2"),
            ("proposals", "aes256-sha256-modp4096"),
        ] {
            assert_eq!(connection_said.list(key), [value]);
        }
        assert_eq!(connection_said.section("local").unwrap().text("auth"), Some("psk"));
        let child = |message: &Message| {
            let children = message.section(name).unwrap().section("children").unwrap();
            children.section("10.5.1.0/24-10.5.2.0/24").unwrap().clone()
        };
        let of_kernel = child(&loaded);
        assert_eq!(of_kernel.list("local_ts"), ["10.5.1.0/24"]);
        assert_eq!(of_kernel.list("remote_ts"), ["10.5.2.0/24"]);
        assert_eq!(of_kernel.list("esp_proposals"), ["aes128gcm16-sha256-prfsha256-ecp256"]);
        for (key, value) in [("mode", "tunnel"), ("policies", "no"), ("reqid", "11")] {
            assert_eq!(of_kernel.text(key), Some(value));
        }
        let of_charon = child(&said(&connection().load(&settings(), EspPlane::Charon)));
        assert_eq!((of_charon.text("policies"), of_charon.text("reqid")), (None, None));
        let shared = said(&connection().share(&settings()));
        assert_eq!(shared.text("data"), Some(settings().psk.0.as_str()));
        assert_eq!(shared.list("owners"), ["192.0.2.2"]);
    }

    #[test]
    fn only_connections_of_the_network_are_ours() {
        let networks = ["10.5.0.0/16".parse().unwrap()];
        for (name, is_ours) in [
            (connection().name().as_str(), true),
            ("192.0.2.1-10.5.1.0/24-10.6.2.0/24-192.0.2.2", false),
            ("192.0.2.1-10.5.1.0/24-10.5.2.0/24-gateway", false),
            ("192.0.2.1-10.5.1.0/24-10.5.2.0/24-192.0.2.2-x", false),
            ("site-to-site", false),
            ("", false),
        ] {
            assert_eq!(is_of(name, &networks), is_ours, "{name}");
        }
    }

    #[test]
    fn who_encrypts_is_the_first_plugin_that_can() {
        let plane = |plugins: &[&str]| {
            let items = plugins
                .iter()
                .flat_map(|name| [&[5, 0, name.len() as u8], name.as_bytes()].concat());
            let bytes = [&b"\x01\x04\x07plugins"[..], &items.collect::<Vec<_>>(), b"\x06"];
            let Ok(Packet::Response(message)) = Packet::parse(&bytes.concat()) else { panic!() };
            EspPlane::of(&message)
        };
        let (libipsec, netlink) = ("kernel-libipsec", "kernel-netlink");
        assert_eq!(plane(&["aes", netlink, "vici"]), EspPlane::Kernel);
        assert_eq!(plane(&["aes", libipsec, netlink]), EspPlane::Charon);
        assert_eq!(plane(&["aes", netlink, libipsec]), EspPlane::Kernel);
    }

    #[test]
    fn what_is_agreed_on_is_summed_up_by_peer() {
        let name = connection().name();
        let child = |it: Request, state: &str, age: &str| {
            it.text("state", state)
                .text("install-time", age)
                .text("bytes-in", "100")
                .text("bytes-out", "70")
        };
        let listed = |state: &str, children: &[(&str, &str)]| {
            said(&Request::command("").section(&name, |it| {
                it.text("state", state).text("established", "40").section("child-sas", |it| {
                    children.iter().enumerate().fold(it, |it, (number, (state, age))| {
                        it.section(&number.to_string(), |it| child(it, state, age))
                    })
                })
            }))
        };
        let all = [
            listed("ESTABLISHED", &[("INSTALLED", "30"), ("INSTALLED", "9"), ("DELETED", "1")]),
            listed("CONNECTING", &[]),
        ];
        let expected = IpsecPeer {
            established_unix: Some(960),
            installed_unix: Some(991),
            received_bytes: 200,
            sent_bytes: 140,
        };
        assert_eq!(associations(&all, 1000), BTreeMap::from([(name.clone(), expected)]));
        let trying = associations(&all[1..], 1000);
        assert_eq!(trying, BTreeMap::from([(name, IpsecPeer::default())]));
    }
}

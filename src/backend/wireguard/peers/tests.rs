//! Peers of leases as flannel's and weft's nodes write them.

use super::super::data::data;
use super::super::plan::plans;
use super::*;
use crate::backend_kind::BackendKind;
use crate::control::lease::Lifetime;
use crate::host::interface::ExternalAddress;
use crate::route::Families;

const OWN: PublicKey = PublicKey([0xee; 32]);

fn settings(json: &str) -> WireguardBackendConfig {
    WireguardBackendConfig::parse(&serde_json::from_str(json).unwrap()).unwrap()
}

fn external(v4: &str, v6: &str) -> ExternalInterface {
    let v4 = v4.parse().ok().map(|v4| ExternalAddress::of(v4, None));
    let v6 = v6.parse().ok().map(|v6| ExternalAddress::of(v6, None));
    let addresses = Families::new(v4, v6).unwrap();
    ExternalInterface { name: "eth0".to_owned(), index: 2, addresses, mtu_bytes: 1500 }
}

/// A lease of both families, written at `revision`.
fn lease(number: u8, key: u8, revision: i64) -> Lease {
    let subnets: Prefixes = format!("10.5.{number}.0/24,fd00:5:0:{number}::/64").parse().unwrap();
    let key = PublicKey([key; 32]);
    let attributes = LeaseAttributes {
        backend_data: Some(data(key, 51820)),
        backend_v6_data: Some(data(key, 51821)),
        ..LeaseAttributes::at(
            BackendKind::Wireguard,
            Some(Ipv4Addr::new(192, 0, 2, number)),
            format!("2001:db8::{number}").parse().ok(),
        )
    };
    let lifetime = Lifetime::Leased { id: 7, expires_unix: None };
    Lease { lifetime, revision, ..Lease::reservation(subnets, attributes) }
}

/// The endpoint and what is allowed, of each peer of each device; then what is unusable.
fn resolved(json: &str, leases: &[Lease], own: (&str, &str)) -> (Vec<String>, Vec<String>) {
    let settings = settings(json);
    let external = external(own.0, own.1);
    let both = Families::of_v4((), Some(()));
    let (mut usable, mut unusable) = (Vec::new(), Vec::new());
    for plan in plans(&settings, both) {
        let (peers, why) = resolve(leases.iter(), &plan, &settings, OWN, &external);
        usable.extend(
            peers
                .into_iter()
                .map(|peer| format!("{} {}", peer.config.endpoint.unwrap(), peer.config.allowed)),
        );
        unusable.extend(why.into_values());
    }
    (usable, unusable)
}

const PUBLIC: (&str, &str) = ("192.0.2.9", "2001:db8::9");

#[test]
fn each_mode_sends_where_flannel_sends() {
    let leases = [lease(1, 1, 1)];
    let separate = ["192.0.2.1:51820 10.5.1.0/24", "[2001:db8::1]:51821 fd00:5:0:1::/64"];
    assert_eq!(resolved("{}", &leases, PUBLIC), (separate.map(str::to_owned).into(), vec![]));
    let both = "10.5.1.0/24,fd00:5:0:1::/64";
    for (mode, endpoint) in
        [("auto", "192.0.2.1:51820"), ("ipv4", "192.0.2.1:51820"), ("ipv6", "[2001:db8::1]:51820")]
    {
        let json = format!(r#"{{"Mode":"{mode}"}}"#);
        assert_eq!(resolved(&json, &leases, PUBLIC).0, [format!("{endpoint} {both}")], "{mode}");
    }
}

#[test]
fn auto_takes_the_address_that_likelier_leads_there() {
    let with = |v4: &str, v6: &str, own| {
        let mut lease = lease(1, 1, 1);
        (lease.attributes.public_ip, lease.attributes.public_ipv6) =
            (v4.parse().ok(), v6.parse().ok());
        let (usable, unusable) = resolved(r#"{"Mode":"auto"}"#, &[lease], own);
        let endpoint = usable.first().map(|peer| peer.split(' ').next().unwrap().to_owned());
        endpoint.unwrap_or_else(|| unusable.concat())
    };
    assert_eq!(with("10.0.0.1", "2001:db8::1", PUBLIC), "[2001:db8::1]:51820");
    assert_eq!(with("10.0.0.1", "fd99::1", PUBLIC), "10.0.0.1:51820");
    assert_eq!(with("192.0.2.1", "2001:db8::1", PUBLIC), "192.0.2.1:51820");
    let of_site = ("10.0.0.9", "fd99::9");
    assert_eq!(with("10.0.0.1", "2001:db8::1", of_site), "10.0.0.1:51820", "no way from here");
    assert_eq!(with("", "2001:db8::1", of_site), "[2001:db8::1]:51820", "it has no other");
    assert!(with("", "", PUBLIC).contains("PublicIPv6"), "there is nowhere to send to");
}

#[test]
fn an_older_flannels_peer_has_our_port() {
    let mut old = lease(1, 1, 1);
    let text = format!(r#"{{"PublicKey":"{}"}}"#, PublicKey([1; 32]));
    let old_data = crate::control::lease::RawJson::from_text(text).ok();
    (old.attributes.backend_data, old.attributes.backend_v6_data) = (old_data.clone(), old_data);
    let (usable, _) = resolved(r#"{"ListenPort":7,"ListenPortV6":8}"#, &[old], PUBLIC);
    let expected = ["192.0.2.1:7 10.5.1.0/24", "[2001:db8::1]:8 fd00:5:0:1::/64"];
    assert_eq!(usable, expected);
}

#[test]
fn a_bad_lease_is_named_and_costs_the_others_nothing() {
    let mut bad = lease(1, 1, 1);
    bad.attributes.backend_data = None;
    let mut away = lease(2, 2, 1);
    away.attributes.public_ip = None;
    let own = lease(3, 0xee, 1);
    let (usable, unusable) =
        resolved(r#"{"Mode":"ipv4"}"#, &[bad.clone(), away, own, lease(4, 4, 1)], PUBLIC);
    assert!(usable.len() == 2, "{usable:?}");
    assert!(usable.iter().any(|peer| peer.contains("10.5.1.0/24")), "BackendV6Data has it too");
    assert!(unusable[0].contains("10.5.2.0/24") && unusable[0].contains("PublicIP"));
    assert!(unusable[1].contains("10.5.3.0/24") && unusable[1].contains("PublicKey"));
    let (usable, unusable) = resolved("{}", &[bad], PUBLIC);
    assert_eq!(usable, ["[2001:db8::1]:51821 fd00:5:0:1::/64"], "IPv6 has its own");
    assert!(unusable[0].contains("PublicKey"), "{unusable:?}");
}

#[test]
fn of_two_leases_with_one_key_the_newer_one_is_used() {
    let both = [lease(1, 7, 10), lease(2, 7, 20)];
    for leases in [both.clone(), [both[1].clone(), both[0].clone()]] {
        let (usable, unusable) = resolved(r#"{"Mode":"ipv4"}"#, &leases, PUBLIC);
        assert_eq!(usable, ["192.0.2.2:51820 10.5.2.0/24,fd00:5:0:2::/64"]);
        let [why] = unusable.as_slice() else { panic!("{unusable:?}") };
        let words = ["10.5.1.0/24,fd00:5:0:1::/64", "10.5.2.0/24,fd00:5:0:2::/64"];
        assert!(words.iter().all(|words| why.contains(words)), "{why}");
    }
}

#[test]
fn shared_key_and_pace_are_the_networks() {
    let key = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
    let settings =
        settings(&format!(r#"{{"PSK":"{key}","PersistentKeepaliveInterval":25,"Mode":"auto"}}"#));
    let plan = plans(&settings, Families::of_v4((), None))[0];
    let external = external(PUBLIC.0, "");
    let (peers, _) = resolve([&lease(1, 1, 1)].into_iter(), &plan, &settings, OWN, &external);
    let PeerConfig { preshared_key, keepalive_seconds, allowed, .. } = &peers[0].config;
    assert_eq!((preshared_key.clone(), *keepalive_seconds), (key.parse().ok(), 25));
    assert_eq!(*allowed, "10.5.1.0/24".parse().unwrap(), "nodes have no IPv6 here");
}

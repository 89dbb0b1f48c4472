//! flannel's test vectors, its checks and phrases, and properties of the range of subnets.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::route::Prefix;
use std::net::Ipv4Addr;

fn parse(text: &str) -> NetworkConfig {
    NetworkConfig::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[track_caller]
fn assert_refused(text: &str, phrase: &str) {
    let error = NetworkConfig::parse(text.as_bytes()).expect_err(text).to_string();
    assert!(error.contains(phrase), "{text}: {error:?} lacks {phrase:?}");
}

fn summary(text: &str) -> String {
    let config = parse(text);
    format!(
        "{} /{} {} {}",
        config.v4().unwrap().network,
        config.v4().unwrap().subnet_length_bits,
        config.v4().unwrap().subnet_min,
        config.v4().unwrap().subnet_max
    )
}

#[test]
fn defaults() {
    let config = parse(r#"{"network":"10.3.0.0/16"}"#);
    assert_eq!(config.v4().unwrap().network, "10.3.0.0/16".parse().unwrap());
    assert_eq!(
        config.backend,
        BackendConfig { kind: BackendKind::Udp.into(), settings: json!({}) }
    );
    assert!(!config.enable_nftables);
    for (text, expected) in [
        (r#"{"Network":"10.3.0.0/16"}"#, "10.3.0.0/16 /24 10.3.1.0 10.3.255.0"),
        (r#"{"Network":"10.3.7.9/16"}"#, "10.3.0.0/16 /24 10.3.1.0 10.3.255.0"),
        (r#"{"Network":"10.0.0.0/8"}"#, "10.0.0.0/8 /24 10.0.1.0 10.255.255.0"),
        (r#"{"Network":"10.3.0.0/22"}"#, "10.3.0.0/22 /24 10.3.1.0 10.3.3.0"),
        (r#"{"Network":"10.3.0.0/23"}"#, "10.3.0.0/23 /25 10.3.0.128 10.3.1.128"),
        (r#"{"Network":"10.3.0.0/28"}"#, "10.3.0.0/28 /30 10.3.0.4 10.3.0.12"),
        (r#"{"Network":"10.3.0.0/16","SubnetLen":28}"#, "10.3.0.0/16 /28 10.3.0.16 10.3.255.240"),
        (r#"{"Network":"10.3.0.0/16","SubnetLen":0}"#, "10.3.0.0/16 /24 10.3.1.0 10.3.255.0"),
        (r#"{"Network":"255.255.0.0/16"}"#, "255.255.0.0/16 /24 255.255.1.0 255.255.255.0"),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.5.0","SubnetMax":"10.3.8.0"}"#,
            "10.3.0.0/16 /24 10.3.5.0 10.3.8.0",
        ),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.0.0","SubnetMax":"0.0.0.0"}"#,
            "10.3.0.0/16 /24 10.3.0.0 10.3.255.0",
        ),
    ] {
        assert_eq!(summary(text), expected, "{text}");
    }
}

#[test]
fn keys_ignore_case_and_null_is_none() {
    let expected = "10.4.0.0/16 /25 10.4.0.128 10.4.255.128";
    for text in [
        r#"{"NETWORK":"10.4.0.0/16","subnetlen":25}"#,
        r#"{"Network":"10.3.0.0/16","SubnetLen":24,"Network":"10.4.0.0/16","SubnetLen":25}"#,
        r#"{"Network":"10.4.0.0/16","SubnetLen":25,"EnableIPv4":null,"EnableIPv6":null}"#,
        r#" {"Network":"10.4.0.0/16","SubnetLen":25,"Other":{"a":[1]},"IPv6Network":"fc00::/48"} "#,
    ] {
        assert_eq!(summary(text), expected, "{text}");
    }
}

#[test]
fn checks_speak_flannels_phrases() {
    for (text, phrase) in [
        (r#"{"Network":"10.3.0.0/16","SubnetLen":31}"#, "SubnetLen must be less than /31"),
        (r#"{"Network":"10.3.0.0/16","SubnetLen":300}"#, "SubnetLen must be less than /31"),
        (
            r#"{"Network":"10.3.0.0/16","SubnetLen":17}"#,
            "network must be able to accommodate at least four subnets",
        ),
        (r#"{"Network":"10.3.0.0/29","SubnetLen":30}"#, "accommodate at least four subnets"),
        (r#"{"Network":"10.3.0.0/32","SubnetLen":30}"#, "accommodate at least four subnets"),
        (
            r#"{"Network":"10.3.0.0/29"}"#,
            "network is too small. Minimum useful network prefix is /28",
        ),
        ("{}", "please define a correct Network parameter in the flannel config"),
        ("null", "please define a correct Network parameter"),
        (r#"{"Network":"0.0.0.0/0"}"#, "please define a correct Network parameter"),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.4.0.0"}"#,
            "SubnetMin is not in the range of the Network",
        ),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMax":"10.2.0.0"}"#,
            "SubnetMax is not in the range of the Network",
        ),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.5.1"}"#,
            "SubnetMin is not on a SubnetLen boundary: 10.3.5.1",
        ),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMax":"10.3.5.128"}"#,
            "SubnetMax is not on a SubnetLen boundary: 10.3.5.128",
        ),
        (
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.6.0","SubnetMax":"10.3.5.0"}"#,
            "SubnetMin 10.3.6.0 is above SubnetMax 10.3.5.0",
        ),
    ] {
        assert_refused(text, phrase);
    }
    for (members, phrase) in [
        (r#""Other":1"#, "please define a correct IPv6Network parameter"),
        (r#""IPv6Network":"::/0""#, "please define a correct IPv6Network parameter"),
        (r#""IPv6Network":"10.5.0.0/16""#, "IPv6Network in"),
        (
            r#""IPv6Network":"fc00::/48","IPv6SubnetLen":127"#,
            "IPv6SubnetLen must be less than /127",
        ),
        (r#""IPv6Network":"fc00::/48","IPv6SubnetLen":49"#, "accommodate at least four subnets"),
        (r#""IPv6Network":"fc00::/125""#, "Minimum useful network prefix is /124"),
        (
            r#""IPv6Network":"fc00::/48","IPv6SubnetMin":"fc01::""#,
            "IPv6SubnetMin is not in the range of the IPv6Network",
        ),
        (
            r#""IPv6Network":"fc00::/48","IPv6SubnetMax":"fc00::1""#,
            "IPv6SubnetMax is not on a IPv6SubnetLen boundary",
        ),
        (r#""IPv6Network":"fe80::/64""#, "fe80::/10"),
        (r#""IPv6Network":"ff00::/16""#, "ff00::/8"),
        (r#""IPv6Network":"::ffff:10.5.0.0/112""#, "::/8"),
    ] {
        let text = format!(r#"{{"Network":"10.3.0.0/16","EnableIPv6":true,{members}}}"#);
        assert_refused(&text, phrase);
    }
}

#[test]
fn wrong_types_and_values_name_the_key() {
    for (members, phrase) in [
        (r#""Network":5"#, "Network in"),
        (r#""Network":"10.3.0.0""#, "Network in"),
        (r#""Network":"fc00::/48""#, "Network in"),
        (r#""SubnetLen":-1"#, "SubnetLen in"),
        (r#""SubnetLen":24.0"#, "SubnetLen in"),
        (r#""SubnetLen":"24""#, "SubnetLen in"),
        (r#""SubnetLen":99999999999999999999"#, "SubnetLen in"),
        (r#""SubnetMin":"x""#, "SubnetMin in"),
        (r#""Network":null"#, "Network in"),
        (r#""subnetmin":null"#, "SubnetMin in"),
        (r#""network":"10.4.0.0/16""#, "network is given twice"),
        (r#""SubnetMax":4"#, "SubnetMax in"),
        (r#""EnableIPv4":"yes""#, "EnableIPv4 in"),
        (r#""EnableIPv6":1"#, "EnableIPv6 in"),
        (r#""EnableNFTables":[]"#, "EnableNFTables in"),
        (r#""Backend":"udp""#, "Backend in"),
        (r#""Backend":{"Type":7}"#, "Backend.Type in"),
    ] {
        assert_refused(&format!(r#"{{"Network":"10.3.0.0/16",{members}}}"#), phrase);
    }
    let long = format!(r#"{{"Network":"{}"}}"#, "9".repeat(1000));
    let error = NetworkConfig::parse(long.as_bytes()).unwrap_err().to_string();
    assert!(error.chars().count() < 200 && error.ends_with('…'), "{error}");
}

#[test]
fn both_families_have_flannels_defaults() {
    let with =
        |members: &str| format!(r#"{{"Network":"10.3.0.0/16","EnableIPv6":true,{members}}}"#);
    for (members, expected) in [
        (r#""IPv6Network":"fc00::/48""#, "fc00::/48 /64 fc00:0:0:1:: fc00:0:0:ffff::"),
        (r#""ipv6network":"fc00::7/62""#, "fc00::/62 /64 fc00:0:0:1:: fc00:0:0:3::"),
        (r#""IPv6Network":"fc00::/63""#, "fc00::/63 /65 fc00::8000:0:0:0 fc00:0:0:1:8000::"),
        (r#""IPv6Network":"fc00::/124""#, "fc00::/124 /126 fc00::4 fc00::c"),
        (
            r#""IPv6Network":"fc00::/48","IPv6SubnetLen":56,"IPv6SubnetMin":"fc00::""#,
            "fc00::/48 /56 fc00:: fc00:0:0:ff00::",
        ),
        (
            r#""IPv6Network":"fc00::/48","IPv6SubnetMin":"fc00:0:0:5::","IPv6SubnetMax":"::""#,
            "fc00::/48 /64 fc00:0:0:5:: fc00:0:0:ffff::",
        ),
    ] {
        let v6 = parse(&with(members)).v6().expect("it is enabled");
        let SubnetRange { network, subnet_length_bits, subnet_min, subnet_max } = v6;
        let found = format!("{network} /{subnet_length_bits} {subnet_min} {subnet_max}");
        assert_eq!(found, expected, "{members}");
    }
    let dual = parse(&with(r#""IPv6Network":"fc00::/48""#));
    assert_eq!(dual.networks().to_string(), "10.3.0.0/16,fc00::/48");
    for (subnets, is_leasable) in [
        ("10.3.1.0/24,fc00:0:0:1::/64", true),
        ("10.3.1.0/24,fc00::/64", false),
        ("10.3.1.0/24", false),
        ("fc00:0:0:1::/64", false),
        ("10.4.1.0/24,fc00:0:0:1::/64", false),
    ] {
        assert_eq!(dual.is_leasable(subnets.parse().unwrap()), is_leasable, "{subnets}");
    }
    let kept = dual.leasable("10.4.1.0/24,fc00:0:0:1::/64".parse().unwrap());
    assert_eq!(kept.map(|kept| kept.to_string()).as_deref(), Some("fc00:0:0:1::/64"));
    assert_eq!(parse(&dual.to_json().to_string()), dual, "what is remembered is another one");
}

#[test]
fn either_family_may_be_missing_but_not_both() {
    let with = |members: &str| format!(r#"{{"Network":"10.3.0.0/16",{members}}}"#);
    for neither in [r#""EnableIPv4":false"#, r#""EnableIPv4":false,"EnableIPv6":false"#] {
        let refused = NetworkConfig::parse(with(neither).as_bytes()).unwrap_err();
        assert!(matches!(refused, NetworkConfigError::NoFamily), "{refused}");
    }
    // As in flannel, keys of the other family are not even looked at.
    for network in ["", r#""Network":"10.3.0.0/16","#, r#""Network":"junk","SubnetLen":99,"#] {
        let text = format!(
            r#"{{{network}"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fc00::/48"}}"#
        );
        let config = parse(&text);
        assert_eq!(config.v4(), None, "{text}");
        assert_eq!(config.networks().to_string(), "fc00::/48");
        let bounds = config.bounds().map(|it| it.to_string());
        assert_eq!(bounds, ["fc00:0:0:1::/64", "fc00:0:0:ffff::/64"]);
        assert_eq!(parse(&config.to_json().to_string()), config, "{text}");
        let leasable = |subnets: &str| config.is_leasable(subnets.parse().unwrap());
        assert!(leasable("fc00:0:0:7::/64"));
        assert!(!leasable("10.3.7.0/24,fc00:0:0:7::/64") && !leasable("10.3.7.0/24"));
    }
    let missing = r#"{"EnableIPv4":false,"EnableIPv6":true}"#;
    assert_refused(missing, "IPv6Network");
    parse(&with(r#""EnableIPv6":false,"IPv6Network":"fc00::/48","EnableIPv4":true"#));
    assert!(parse(&with(r#""EnableNFTables":true"#)).enable_nftables);
}

#[test]
fn spelled_out_configuration_reads_back() {
    for text in [
        r#"{"Network":"10.3.0.0/16"}"#,
        r#"{"Network":"10.3.0.0/16","EnableNFTables":true,"Backend":{"type":"UDP","PORT":7}}"#,
        r#"{"Network":"10.3.0.0/28","SubnetMin":"10.3.0.0","Backend":{"Type":"vxlan"}}"#,
    ] {
        let config = parse(text);
        assert_eq!(parse(&config.to_json().to_string()), config, "{text}");
    }
}

#[test]
fn backend_types() {
    let with = |backend: &str| format!(r#"{{"Network":"10.3.0.0/16","Backend":{backend}}}"#);
    for backend in ["{}", "null", r#"{"Type":""}"#, r#"{"Type":null}"#, r#"{"Port":8285}"#] {
        let error = NetworkConfig::parse(with(backend).as_bytes()).unwrap_err();
        assert!(matches!(error, NetworkConfigError::NoBackendType), "{backend}: {error:?}");
    }
    let config = parse(&with(r#"{"type":"VXLAN","VNI":7}"#));
    assert!(config.backend.kind.is(BackendKind::Vxlan));
    assert_eq!(config.backend.settings, json!({"type": "VXLAN", "VNI": 7}));
    let config = parse(&with(r#"{"Type":"udp","port":1,"port":4}"#));
    assert_eq!(config.backend.settings, json!({"Type": "udp", "port": 4}));
    assert_refused(&with(r#"{"Type":"udp","port":1,"Port":3}"#), "port is given twice");
}

#[test]
fn udp_settings() {
    let udp = |settings: Value| UdpBackendConfig::parse(&settings);
    let defaults = UdpBackendConfig { port: 8285, mtu_bytes: None };
    for settings in [json!({}), Value::Null, json!({"Port": null, "MTU": null, "Other": 1})] {
        assert_eq!(udp(settings).unwrap(), defaults);
    }
    let own = UdpBackendConfig { port: 65_535, mtu_bytes: Some(68) };
    assert_eq!(udp(json!({"port": 65535, "mtu": 68})).unwrap(), own);
    assert_eq!(udp(json!({"PORT": 1, "Mtu": 65535})).unwrap().mtu_bytes, Some(65_535));
    for port in [json!(0), json!(65_536), json!(-1), json!("8285"), json!(1.5), json!(true)] {
        let error = udp(json!({ "Port": port })).unwrap_err().to_string();
        assert!(error.starts_with("Backend.Port in"), "{error}");
    }
    for mtu in [json!(0), json!(67), json!(65_536), json!(-5), json!("1400"), json!(5e9)] {
        let error = udp(json!({ "MTU": mtu })).unwrap_err().to_string();
        assert!(error.starts_with("Backend.MTU in"), "{error}");
    }
}

#[test]
fn malformed_and_oversized_input() {
    for text in ["", "{", "[]", "5", "\"x\"", "{} {}", "{\"Network\":}", "\u{feff}{}"] {
        let error = NetworkConfig::parse(text.as_bytes()).unwrap_err();
        assert!(matches!(error, NetworkConfigError::Syntax(_)), "{text}: {error:?}");
    }
    let mut padded = br#"{"Network":"10.3.0.0/16"}"#.to_vec();
    padded.resize(CONFIG_BYTES_MAX, b' ');
    NetworkConfig::parse(&padded).unwrap();
    padded.push(b' ');
    let error = NetworkConfig::parse(&padded).unwrap_err().to_string();
    assert!(error.contains("65537") && error.contains("65536"), "{error}");
}

#[test]
fn deep_nesting_neither_overflows_nor_passes() {
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    assert_refused(&format!(r#"{{"Network":{deep}}}"#), "JSON");
    assert_refused(&format!(r#"{{"Network":"10.3.0.0/16","Backend":{{"Type":{deep}}}}}"#), "JSON");
}

#[test]
fn only_subnets_between_the_bounds_are_leasable() {
    let config = parse(r#"{"Network":"255.255.0.0/16","SubnetMin":"255.255.253.0"}"#);
    for (subnet, leasable) in [
        ("255.255.253.0/24", true),
        ("255.255.255.0/24", true),
        ("255.255.252.0/24", false),
        ("255.255.253.0/25", false),
        ("255.255.252.0/23", false),
        ("10.0.0.0/24", false),
    ] {
        assert_eq!(config.is_leasable(subnet.parse().unwrap()), leasable, "{subnet}");
    }
}

#[test]
fn a_network_that_no_host_forwards_is_refused() {
    for (network, phrase) in [
        ("127.0.0.0/8", "127.0.0.0/8,"),
        ("127.5.0.0/16", "127.0.0.0/8,"),
        ("224.0.0.0/4", "224.0.0.0/4,"),
        ("239.255.0.0/16", "224.0.0.0/4,"),
        ("0.0.0.0/8", "0.0.0.0/8,"),
        ("0.0.0.0/1", "0.0.0.0/8,"),
        ("128.0.0.0/1", "224.0.0.0/4,"),
    ] {
        assert_refused(&json!({ "Network": network }).to_string(), phrase);
    }
    for network in ["1.0.0.0/8", "126.0.0.0/16", "128.0.0.0/16", "223.0.0.0/8", "240.0.0.0/8"] {
        assert_eq!(
            parse(&json!({ "Network": network }).to_string()).v4().unwrap().network.to_string(),
            network
        );
    }
}

proptest! {
    #[test]
    fn any_bytes_give_a_configuration_or_an_error(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        members in
            "(\"(Network|SubnetLen|Backend)\":(\"10.3.0.0/16\"|[0-9]{1,3}|null|\\{\\}),?){0,4}",
    ) {
        for input in [bytes, format!("{{{members}}}").into_bytes()] {
            if let Err(error) = NetworkConfig::parse(&input) {
                prop_assert!(!error.to_string().is_empty());
            }
        }
    }

    #[test]
    fn any_values_give_consistent_configuration_or_error(
        address: u32,
        network_length in 0_u8..=33,
        subnet_length in proptest::option::of(0_u64..40),
        min in proptest::option::of(any::<u32>()),
        max in proptest::option::of(any::<u32>()),
    ) {
        let dotted = |bits: u32| Ipv4Addr::from_bits(bits).to_string();
        let mut value = json!({ "Network": format!("{}/{network_length}", dotted(address)) });
        if let Some(length) = subnet_length {
            value["SubnetLen"] = length.into();
        }
        // Bounds near the network, so that a good part of them is accepted.
        let mask = u32::MAX.checked_shl(32 - u32::from(network_length.min(32))).unwrap_or(0);
        let near = |bits: u32| dotted((address & mask) | (bits & !mask & 0xffff_ff00));
        if let Some(min) = min {
            value["SubnetMin"] = near(min).into();
        }
        if let Some(max) = max {
            value["SubnetMax"] = near(max).into();
        }
        if let Ok(config) = NetworkConfig::parse(value.to_string().as_bytes()) {
            let v4 = config.v4().unwrap();
            prop_assert!(v4.subnet_length_bits >= v4.network.length_bits() + 2);
            prop_assert!(v4.subnet_length_bits <= 30);
            prop_assert!(v4.subnet_min <= v4.subnet_max);
            for bound in [v4.subnet_min, v4.subnet_max] {
                let subnet = Prefix::new(bound, v4.subnet_length_bits).unwrap();
                prop_assert!(subnet.network() == bound && v4.leasable(subnet));
                prop_assert!(v4.network.covers(subnet));
            }
            let again = NetworkConfig::parse(config.to_json().to_string().as_bytes());
            prop_assert_eq!(again.unwrap(), config, "what is remembered is another configuration");
        }
    }

    #[test]
    fn all_subnets_but_the_first_are_leasable(
        network_length in 16_u8..=24,
        extra in 2_u8..=6,
        // From 1.0.0.0 up to 127.0.0.0.
        address in 1_u32 << 24..127 << 24,
    ) {
        let network = Prefix::new(Ipv4Addr::from_bits(address), network_length).unwrap();
        let length = (network_length + extra).min(30);
        let config = parse(&format!(r#"{{"Network":"{network}","SubnetLen":{length}}}"#));
        let range = config.v4().unwrap();
        let mut each = Prefix::new(network.network(), length);
        while let Some(subnet) = each.filter(|subnet| network.covers(*subnet)) {
            prop_assert_eq!(range.leasable(subnet), subnet.network() != network.network());
            each = subnet.next();
        }
    }
}

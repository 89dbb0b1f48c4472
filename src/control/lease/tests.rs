//! Keys and values against what flannel reads and writes, byte for byte.

use super::*;

fn value(text: &str) -> LeaseAttributes {
    LeaseAttributes::from_json(text.as_bytes()).unwrap()
}

#[test]
fn udp_lease_is_written_as_by_flannel() {
    let udp = LeaseAttributes::udp(Ipv4Addr::new(1, 2, 3, 4));
    assert_eq!(udp.to_json().unwrap(), br#"{"PublicIP":"1.2.3.4","PublicIPv6":null}"#);
}

#[test]
fn flannel_values_round_trip_bytewise() {
    for text in [
        r#"{"PublicIP":"1.2.3.4","PublicIPv6":null}"#,
        concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":"fd00::1","BackendType":"vxlan""#,
            r#","BackendData":{"VNI":1,"VtepMAC":"82:4b:b6:2f:54:4e"}"#,
            r#","BackendV6Data":{"VNI":1,"VtepMAC":"aa:4b:b6:2f:54:4e"}}"#,
        ),
        r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"host-gw"}"#,
        concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"extension""#,
            r#","BackendData":"text, with \"quotes\""}"#,
        ),
        concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"wireguard""#,
            r#","BackendData":{"PublicKey":"abc=","Port":51820}}"#,
        ),
    ] {
        assert_eq!(String::from_utf8(value(text).to_json().unwrap()).unwrap(), text);
    }
}

#[test]
fn values_are_read_as_go_reads_them() {
    assert_eq!(value("{}").public_ip, None);
    assert_eq!(value(r#"{"PublicIP":"1.2.3.4"}"#).public_ip, Some(Ipv4Addr::new(1, 2, 3, 4)));
    assert_eq!(value(r#"{"publicip":"1.2.3.4"}"#).public_ip, Some(Ipv4Addr::new(1, 2, 3, 4)));
    let twice = value(r#"{"PublicIP":"1.2.3.4","PUBLICIP":"5.6.7.8"}"#);
    assert_eq!(twice.public_ip, Some(Ipv4Addr::new(5, 6, 7, 8)));
    let odd = value(r#" {"New":{"a":[1]},"PublicIP":"1.2.3.4","BackendData":null} "#);
    assert_eq!(odd, LeaseAttributes::udp(Ipv4Addr::new(1, 2, 3, 4)));
}

#[test]
fn a_node_without_ipv4_is_known_by_its_other_address() {
    let alone = r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::1","BackendType":"host-gw"}"#;
    let own = value(alone);
    assert_eq!((own.public_ip, own.node_address()), (None, "fd99::1".parse().unwrap()));
    assert_eq!(String::from_utf8(own.to_json().unwrap()).unwrap(), alone, "as flannel's");
    let both = value(r#"{"PublicIP":"192.0.2.1","PublicIPv6":"fd99::1"}"#);
    assert_eq!(both.node_address(), "192.0.2.1".parse::<IpAddr>().unwrap());
    for (other, is_same) in [
        (r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::1"}"#, [true, true]),
        // The same node, before its network lost IPv4, or once that has it.
        (r#"{"PublicIP":"192.0.2.1","PublicIPv6":"fd99::1"}"#, [true, true]),
        (r#"{"PublicIP":"192.0.2.1","PublicIPv6":"fd99::2"}"#, [false, true]),
        (r#"{"PublicIP":"192.0.2.2","PublicIPv6":"fd99::1"}"#, [true, false]),
        (r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#, [false, true]),
        (r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::2"}"#, [false, false]),
        (r#"{"PublicIP":"0.0.0.0","PublicIPv6":null}"#, [false, false]),
        ("{}", [false, false]),
    ] {
        let other = value(other);
        assert_eq!([&own, &both].map(|it| it.is_of_node_of(&other)), is_same, "{other:?}");
        assert_eq!([&own, &both].map(|it| other.is_of_node_of(it)), is_same, "{other:?}");
    }
    let nobody = value("{}");
    assert!(!nobody.is_of_node_of(&nobody), "whoever says nothing is nobody");
}

#[test]
fn invalid_values_are_rejected() {
    for text in [
        "",
        "null",
        "[]",
        "1",
        "\"1.2.3.4\"",
        "{",
        "hello",
        r#"{"PublicIP":""}"#,
        r#"{"PublicIP":"1.2.3"}"#,
        r#"{"PublicIP":"1.2.3.4.5"}"#,
        r#"{"PublicIP":7}"#,
        r#"{"PublicIP":null}"#,
        r#"{"PublicIP":"fd00::1"}"#,
        r#"{"PublicIP":"1.2.3.4"} x"#,
        r#"{"BackendType":5}"#,
        "{\"PublicIP\":\"1.2.3.4\"\0}",
    ] {
        assert!(LeaseAttributes::from_json(text.as_bytes()).is_err(), "{text:?} was accepted");
    }
    let nested = format!("{{\"BackendData\":{}{}}}", "[".repeat(2000), "]".repeat(2000));
    LeaseAttributes::from_json(nested.as_bytes()).expect("data is not looked into");
    let nested = nested.replace("BackendData", "PublicIP");
    assert!(LeaseAttributes::from_json(nested.as_bytes()).is_err());
}

#[test]
fn an_unreadable_public_ipv6_costs_nothing_else() {
    for text in [r#""fd99::zz""#, r#""1.2.3.4""#, r#""""#, "7", r#"["fd99::1"]"#] {
        let lease = value(&format!(r#"{{"PublicIP":"192.0.2.1","PublicIPv6":{text}}}"#));
        assert_eq!(lease.public_ip, Some(Ipv4Addr::new(192, 0, 2, 1)), "{text} costs IPv4");
        assert_eq!((lease.public_ipv6, lease.unreadable_ipv6.as_deref()), (None, Some(text)));
    }
    let long = value(&format!(r#"{{"PublicIPv6":"{}"}}"#, "x".repeat(4000)));
    assert!(long.unreadable_ipv6.unwrap().len() < 100, "a log line of any length");
}

#[test]
fn size_bound_holds_reading_and_writing() {
    let mut long = value(r#"{"PublicIP":"1.2.3.4"}"#);
    let padded = |n: usize| format!("{{\"PublicIP\":\"1.2.3.4\"{}}}", " ".repeat(n));
    let base = padded(0).len();
    assert!(LeaseAttributes::from_json(padded(VALUE_BYTES_MAX - base).as_bytes()).is_ok());
    let error = LeaseAttributes::from_json(padded(VALUE_BYTES_MAX - base + 1).as_bytes());
    assert!(matches!(error, Err(ValueError::TooLarge(4097))));
    long.backend_type = BackendName::Other("x".repeat(VALUE_BYTES_MAX));
    assert!(matches!(long.to_json(), Err(ValueError::TooLarge(_))));
}

#[test]
fn local_value_has_expiry_and_stays_readable() {
    let attributes = LeaseAttributes::udp(Ipv4Addr::new(1, 2, 3, 4));
    let read = |text: &str| LeaseAttributes::with_end_from_json(text.as_bytes());
    let (ends, stored) = (Some(951_868_799), (attributes.clone(), Some(951_868_799)));
    let text = r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"Expires":"2000-02-29T23:59:59Z"}"#;
    assert_eq!(attributes.to_json_until(ends).unwrap(), text.as_bytes());
    assert_eq!(read(text).unwrap(), stored);
    assert_eq!(value(text), attributes, "flannel's reader must not mind the extra key");
    let seconds = read(r#"{"PublicIP":"1.2.3.4","expires":951868799}"#);
    assert_eq!(seconds.unwrap(), stored);
    let none = read(r#"{"PublicIP":"1.2.3.4","Expires":null}"#);
    assert_eq!(none.unwrap(), (attributes, None));
    for bad in [r#""soon""#, "-1", "1.5", "true", "[]"] {
        let text = format!("{{\"PublicIP\":\"1.2.3.4\",\"Expires\":{bad}}}");
        assert!(read(&text).is_err(), "{text} was accepted");
    }
}

#[test]
fn invalid_entries_carry_reason() {
    let decode = |key: &[u8], value: &[u8]| Lease::decode(key, value, 7).map_err(|r| r.reason);
    let good = br#"{"PublicIP":"1.2.3.4"}"#;
    let lease = decode(b"10.5.1.0-24", good).unwrap();
    assert_eq!((lease.revision, lease.created_revision), (7, 0));
    assert_eq!(lease.lifetime, Lifetime::Reservation);
    assert_eq!(decode(b"\xff\xfe", good), Err(RejectReason::BadKey));
    assert_eq!(decode(&[b'a'; 5000], good), Err(RejectReason::BadKey));
    assert_eq!(decode(b"10.5.1.0-24", b"{"), Err(RejectReason::BadValue));
    assert_eq!(decode(b"10.5.1.0-24", &[b' '; 5000]), Err(RejectReason::TooLarge));
}

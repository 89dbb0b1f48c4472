//! What a vxlan node publishes with its lease, byte for byte as flannel does. Pure.

use serde_json::{Value, json};

use crate::backend::family::CarriedFamily;
use crate::config::network::member;
use crate::control::lease::{LeaseAttributes, RawJson};
use crate::host::state::MacAddress;

/// `{"VNI":1,"VtepMAC":"82:4b:b6:2f:54:4e"}`. flannel keeps 16 bits of the VNI, and its readers
/// refuse more.
pub(super) fn data(vni: u32, mac: MacAddress) -> RawJson {
    let [_, _, high, low] = vni.to_be_bytes();
    let vni = u16::from_be_bytes([high, low]);
    let data = json!({ "VNI": vni, "VtepMAC": mac.to_string() });
    RawJson::of(&data).expect("a number and a string are JSON")
}

/// The hardware address that a vxlan node publishes; `None` if there is none to send to.
pub(super) fn vtep_mac<A: CarriedFamily>(attributes: &LeaseAttributes) -> Option<MacAddress> {
    let text = A::data(attributes)?.0.get();
    let data: Value = serde_json::from_str(text).ok()?;
    MacAddress::parse(member(&data, "VtepMAC")?.as_str()?).filter(|mac| mac.is_host())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::backend_kind::BackendKind;

    fn attributes(json: &str) -> LeaseAttributes {
        LeaseAttributes::from_json(json.as_bytes()).unwrap()
    }

    #[test]
    fn lease_equals_flannels_byte_for_byte() {
        let mac = MacAddress::parse("82:4b:b6:2f:54:4e").unwrap();
        let ours =
            LeaseAttributes::of(BackendKind::Vxlan, "1.2.3.4".parse().unwrap(), Some(data(1, mac)));
        let flannels = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","#,
            r#""BackendData":{"VNI":1,"VtepMAC":"82:4b:b6:2f:54:4e"}}"#
        );
        assert_eq!(String::from_utf8(ours.to_json().unwrap()).unwrap(), flannels);
        assert_eq!(vtep_mac::<Ipv4Addr>(&attributes(flannels)), Some(mac));
        assert_eq!(vtep_mac::<Ipv6Addr>(&attributes(flannels)), None);
        let dual = LeaseAttributes {
            public_ipv6: Some("fd99::1".parse().unwrap()),
            backend_v6_data: Some(data(1, mac)),
            ..ours
        };
        let flannels = flannels.replace("null", r#""fd99::1""#);
        let flannels = flannels
            .replace("\"}}", r#""},"BackendV6Data":{"VNI":1,"VtepMAC":"82:4b:b6:2f:54:4e"}}"#);
        assert_eq!(String::from_utf8(dual.to_json().unwrap()).unwrap(), flannels);
        assert_eq!(vtep_mac::<Ipv6Addr>(&attributes(&flannels)), Some(mac));
        let beyond = data(65_537, mac);
        assert!(beyond.0.get().starts_with(r#"{"VNI":1,"#), "flannel's readers take 16 bits");
    }

    #[test]
    fn malformed_backend_data_has_no_address() {
        let read = |data: &str| {
            let value =
                format!(r#"{{"PublicIP":"1.2.3.4","BackendType":"vxlan","BackendData":{data}}}"#);
            vtep_mac::<Ipv4Addr>(&attributes(&value)).map(|mac| mac.to_string())
        };
        let old = r#"{"VtepMAC":"82:4b:b6:2f:54:4e"}"#;
        assert_eq!(read(old).as_deref(), Some("82:4b:b6:2f:54:4e"));
        for nonsense in [
            "null",
            "{}",
            r#""82:4b:b6:2f:54:4e""#,
            r#"{"VtepMAC":7}"#,
            r#"{"VtepMAC":""}"#,
            r#"{"VtepMAC":"ff:ff:ff:ff:ff:ff"}"#,
            r#"{"VtepMAC":"00:00:00:00:00:00"}"#,
            r#"{"VtepMAC":"82:4b:b6:2f:54:4e; reboot"}"#,
        ] {
            assert_eq!(read(nonsense), None, "{nonsense} is taken for a hardware address");
        }
    }
}

//! What a wireguard node publishes with its lease, byte for byte as flannel does. Pure.

use serde::Serialize;
use serde_json::Value;

use crate::config::network::member;
use crate::control::lease::{Lease, LeaseAttributes, RawJson};
use crate::wireguard::keys::PublicKey;

/// In flannel's order.
#[derive(Serialize)]
struct Published {
    #[serde(rename = "PublicKey")]
    public_key: String,
    #[serde(rename = "Port")]
    port: u16,
}

/// What a peer has published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PeerData {
    pub(super) public_key: PublicKey,
    /// Older flannels name none, and have all the same.
    pub(super) port: Option<u16>,
}

/// `{"PublicKey":"…","Port":51820}`.
pub(super) fn data(public_key: PublicKey, port: u16) -> RawJson {
    let published = Published { public_key: public_key.to_string(), port };
    RawJson::of(&published).expect("a text and a number are JSON")
}

/// Reads it as Go does: keys in any case, others ignored. An error says what is wrong.
pub(super) fn read(data: Option<&RawJson>) -> Result<PeerData, &'static str> {
    let data: Value = data.and_then(|it| serde_json::from_str(it.0.get()).ok()).unwrap_or_default();
    let member = |name| member(&data, name).filter(|value| !value.is_null());
    let key = member("PublicKey").ok_or("names no PublicKey")?;
    let key = key.as_str().and_then(|key| key.parse().ok());
    let port = match member("Port") {
        None => None,
        Some(port) => {
            let number = port.as_u64().and_then(|port| u16::try_from(port).ok());
            Some(number.ok_or("has a Port that is none")?).filter(|port| *port > 0)
        }
    };
    let public_key: PublicKey = key.ok_or("has a PublicKey that is none")?;
    if public_key.is_of_low_order() {
        return Err("has a PublicKey of low order, with which no secret is one");
    }
    Ok(PeerData { public_key, port })
}

/// Why nobody can use the lease of a node that has an address, if that is for its data.
pub(in crate::backend) fn without_key(lease: &Lease) -> Option<String> {
    let LeaseAttributes { backend_data, backend_v6_data, .. } = &lease.attributes;
    let v4 = lease.subnets.v4().map(|_| backend_data);
    let v6 = lease.subnets.v6().map(|_| backend_v6_data);
    let all = || v4.into_iter().chain(v6);
    let flaw = all().find_map(|data| read(data.as_ref()).err());
    let is_of_both = all().any(|data| read(data.as_ref()).is_ok());
    flaw.filter(|_| !is_of_both).map(|flaw| format!("{} {flaw}", lease.subnets))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend_kind::BackendKind;

    const KEY: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";

    #[test]
    fn lease_equals_flannels_byte_for_byte() {
        let key = KEY.parse().unwrap();
        let dual = LeaseAttributes {
            backend_data: Some(data(key, 51820)),
            backend_v6_data: Some(data(key, 51821)),
            ..LeaseAttributes::at(
                BackendKind::Wireguard,
                "1.2.3.4".parse().ok(),
                "fd99::1".parse().ok(),
            )
        };
        let flannels = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":"fd99::1","BackendType":"wireguard","#,
            r#""BackendData":{"PublicKey":"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=","#,
            r#""Port":51820},"BackendV6Data":"#,
            r#"{"PublicKey":"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=","Port":51821}}"#
        );
        assert_eq!(String::from_utf8(dual.to_json().unwrap()).unwrap(), flannels);
        let again = LeaseAttributes::from_json(flannels.as_bytes()).unwrap();
        let port = |data: &Option<RawJson>| read(data.as_ref()).unwrap().port;
        assert_eq!(port(&again.backend_data), Some(51820));
        assert_eq!(port(&again.backend_v6_data), Some(51821));
    }

    #[test]
    fn what_is_no_key_or_no_port_is_told() {
        let of = |text: &str| read(Some(&RawJson::from_text(text.replace("KEY", KEY)).unwrap()));
        let public_key = KEY.parse().unwrap();
        for old in [r#"{"PublicKey":"KEY"}"#, r#"{"publickey":"KEY","Port":0,"x":1}"#] {
            assert_eq!(of(old), Ok(PeerData { public_key, port: None }), "{old}");
        }
        for (text, words) in [
            ("{}", "PublicKey"),
            ("null", "PublicKey"),
            (r#""KEY""#, "PublicKey"),
            (r#"{"PublicKey":""}"#, "PublicKey"),
            (r#"{"PublicKey":7}"#, "PublicKey"),
            (r#"{"PublicKey":"KEY; reboot"}"#, "PublicKey"),
            (r#"{"PublicKey":"KEY","Port":65536}"#, "Port"),
            (r#"{"PublicKey":"KEY","Port":"51820"}"#, "Port"),
        ] {
            assert!(of(text).is_err_and(|why| why.contains(words)), "{text}: {:?}", of(text));
        }
        assert!(read(None).is_err());
    }
}

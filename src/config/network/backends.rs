//! The `Backend` object's keys of each backend, with flannel's names and defaults.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::Value;

use crate::backend_kind::{BackendKind, UDP_PORT};
use crate::config::checked::Secret;
use crate::wireguard::keys::PresharedKey;
use crate::words::words;

use super::json::{NetworkConfigError, boolean, member, text, wrong};

/// flannel's VNI.
const VNI_DEFAULT: u32 = 1;

/// A device's name has 15 characters, of which `flannel.` takes eight.
const VNI_MAX: u32 = 9_999_999;

/// RFC 791: every host can forward an IPv4 packet of 68 bytes.
const MTU_BYTES_MIN: u32 = 68;
/// The total length of an IPv4 packet has 16 bits.
const MTU_BYTES_MAX: u32 = 65_535;

/// The udp backend's own keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpBackendConfig {
    /// UDP port on every host.
    pub port: u16,
    /// Upper bound of the overlay's MTU; the external interface's MTU bounds it in any case.
    pub mtu_bytes: Option<u32>,
}

impl UdpBackendConfig {
    /// Reads the udp backend's keys from `BackendConfig::settings`.
    pub fn parse(settings: &Value) -> Result<Self, NetworkConfigError> {
        let port = number(settings, "Port", 1..=u16::MAX)?;
        let mtu_bytes = number(settings, "MTU", MTU_BYTES_MIN..=MTU_BYTES_MAX)?;
        Ok(Self { port: port.unwrap_or(UDP_PORT), mtu_bytes })
    }
}

/// The vxlan backend's own keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VxlanBackendConfig {
    /// VXLAN network identifier, and the number in the device's name.
    pub vni: u32,
    /// UDP port; `None` leaves it to the kernel, which has 8472.
    pub port: Option<u16>,
    /// Whether packets carry the group policy extension.
    pub gbp: bool,
    /// Whether the device learns from what it receives.
    pub learning: bool,
    /// Whether hosts of one link send to each other without a tunnel.
    pub direct_routing: bool,
    /// What the tunnel's packets may have on the wire; the external interface's MTU by default.
    pub mtu_bytes: Option<u32>,
}

impl VxlanBackendConfig {
    /// Reads the vxlan backend's keys from `BackendConfig::settings`.
    pub fn parse(settings: &Value) -> Result<Self, NetworkConfigError> {
        let port = number(settings, "Port", 0..=u16::MAX)?;
        let mtu_min = MTU_BYTES_MIN + BackendKind::Vxlan.overhead_bytes();
        let mtu_bytes = number(settings, "MTU", mtu_min..=MTU_BYTES_MAX)?;
        Ok(Self {
            vni: number(settings, "VNI", 0..=VNI_MAX)?.unwrap_or(VNI_DEFAULT),
            port: port.filter(|port| *port != 0),
            gbp: flag(settings, "GBP")?,
            learning: flag(settings, "Learning")?,
            direct_routing: flag(settings, "DirectRouting")?,
            mtu_bytes,
        })
    }
}

words! {
    /// By which addresses hosts send to each other, and with how many devices.
    WireguardMode {
        /// Each family's packets by a device of its own, over addresses of that family.
        Separate = "separate",
        /// One device; each peer by the family that is more likely to lead to it.
        Auto = "auto",
        /// One device, over IPv4.
        V4 = "ipv4",
        /// One device, over IPv6.
        V6 = "ipv6",
    }
}

/// The wireguard backend's own keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireguardBackendConfig {
    /// UDP port of the device, of that of IPv4 if each family has one.
    pub port: u16,
    /// UDP port of the device of IPv6, if each family has one.
    pub port_v6: u16,
    /// What all hosts share besides their own keys.
    pub preshared_key: Option<PresharedKey>,
    /// What the tunnel's packets may have on the wire; the external interface's MTU by default.
    pub mtu_bytes: Option<u32>,
    /// Over what.
    pub mode: WireguardMode,
    /// How often something is sent to each peer; 0 for never.
    pub keepalive_seconds: u16,
}

impl WireguardBackendConfig {
    /// flannel's ports.
    const PORTS: (u16, u16) = (51820, 51821);
    /// What flannel takes off the MTU, whatever the underlay: the headers over IPv6.
    pub const OVERHEAD_BYTES: u32 = BackendKind::Wireguard.overhead_bytes() + 20;

    /// Reads the wireguard backend's keys from `BackendConfig::settings`.
    pub fn parse(settings: &Value) -> Result<Self, NetworkConfigError> {
        let port = |name| number(settings, name, 1..=u16::MAX);
        let mtu_min = MTU_BYTES_MIN + Self::OVERHEAD_BYTES;
        let named = member(settings, "Mode").filter(|value| !value.is_null());
        let word = |value: &Value| {
            let words = WireguardMode::ALL.iter();
            let known = words.copied().find(|mode| Some(mode.name()) == value.as_str());
            let all = "separate, auto, ipv4 or ipv6";
            known.ok_or_else(|| wrong("Backend.Mode", all, value))
        };
        let keepalive = number(settings, "PersistentKeepaliveInterval", 0..=u16::MAX)?;
        Ok(Self {
            port: port("ListenPort")?.unwrap_or(Self::PORTS.0),
            port_v6: port("ListenPortV6")?.unwrap_or(Self::PORTS.1),
            preshared_key: preshared_key(settings)?,
            mtu_bytes: number(settings, "MTU", mtu_min..=MTU_BYTES_MAX)?,
            mode: named.map(word).transpose()?.unwrap_or(WireguardMode::Separate),
            keepalive_seconds: keepalive.unwrap_or(0),
        })
    }
}

/// The shared key. What is there is not repeated: it may be most of one.
fn preshared_key(settings: &Value) -> Result<Option<PresharedKey>, NetworkConfigError> {
    match member(settings, "PSK") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(other) => other.as_str().unwrap_or_default().parse().map(Some).map_err(|error| {
            NetworkConfigError::Invalid(format!(
                "Backend.PSK in the network configuration can't be used: {error}"
            ))
        }),
    }
}

/// The ipsec backend's own keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpsecBackendConfig {
    /// What all hosts prove themselves to each other with.
    pub psk: Secret,
    /// Whether ESP goes in UDP datagrams even without a NAT in between.
    pub is_in_udp: bool,
    /// The algorithms, in strongSwan's words.
    pub esp_proposal: String,
}

impl IpsecBackendConfig {
    /// flannel's algorithms.
    const ESP_PROPOSAL: &'static str = "aes128gcm16-sha256-prfsha256-ecp256";
    /// flannel's shortest PSK.
    const PSK_BYTES_MIN: usize = 96;
    /// The header of UDP.
    const UDP_BYTES: u32 = 8;

    /// Reads the ipsec backend's keys from `BackendConfig::settings`.
    pub fn parse(settings: &Value) -> Result<Self, NetworkConfigError> {
        // What is there is not repeated: it may be most of one.
        let psk = member(settings, "PSK").and_then(Value::as_str).unwrap_or_default();
        if psk.len() < Self::PSK_BYTES_MIN {
            return Err(NetworkConfigError::Invalid(format!(
                "Backend.PSK in the network configuration must be a string of at least {} \
                 characters with ipsec, the same for all nodes (`openssl rand -base64 72`)",
                Self::PSK_BYTES_MIN
            )));
        }
        let is_in_udp = flag(settings, "UDPEncap")?;
        let esp_proposal = text(settings, "ESPProposal", "a string", false)?;
        Ok(Self {
            psk: Secret(psk.to_owned()),
            is_in_udp,
            esp_proposal: esp_proposal.unwrap_or(Self::ESP_PROPOSAL).to_owned(),
        })
    }

    /// What flannel takes off the MTU, whatever the algorithms.
    pub fn overhead_bytes(&self) -> u32 {
        let of_udp = if self.is_in_udp { Self::UDP_BYTES } else { 0 };
        BackendKind::Ipsec.overhead_bytes() + of_udp
    }
}

/// The extension backend's own keys: commands, not given where empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtensionBackendConfig {
    /// Run before the lease is taken; what it prints is published with the lease.
    pub pre_startup: Option<CommandLine>,
    /// Run once this host has its subnet.
    pub post_startup: Option<CommandLine>,
    /// Run for each other host.
    pub subnet_add: Option<CommandLine>,
    /// Run for each other host that is gone.
    pub subnet_remove: Option<CommandLine>,
}

/// A command with its arguments. It shows as its program alone, for the others may hold a token.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("{self}")]
pub struct CommandLine(pub String);

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.0.split_whitespace();
        let program = words.next().unwrap_or_default();
        write!(f, "{program}{}", if words.next().is_some() { " ***" } else { "" })
    }
}

/// A backend's settings, to be shown.
pub fn shown(settings: &Value) -> Value {
    let mut shown = settings.clone();
    for (name, value) in shown.as_object_mut().into_iter().flatten() {
        if ["PSK", "AccessKeySecret"].iter().any(|secret| name.eq_ignore_ascii_case(secret)) {
            *value = "***".into();
        } else if let Some(text) =
            value.as_str().filter(|_| name.to_lowercase().ends_with("command"))
        {
            *value = CommandLine(text.to_owned()).to_string().into();
        }
    }
    shown
}

impl ExtensionBackendConfig {
    /// Reads the extension backend's keys from `BackendConfig::settings`.
    pub fn parse(settings: &Value) -> Result<Self, NetworkConfigError> {
        Ok(Self {
            pre_startup: command(settings, "PreStartupCommand")?,
            post_startup: command(settings, "PostStartupCommand")?,
            subnet_add: command(settings, "SubnetAddCommand")?,
            subnet_remove: command(settings, "SubnetRemoveCommand")?,
        })
    }
}

fn number<T: TryFrom<u64> + PartialOrd + fmt::Display>(
    settings: &Value,
    name: &str,
    range: RangeInclusive<T>,
) -> Result<Option<T>, NetworkConfigError> {
    let Some(value) = member(settings, name).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let number = value.as_u64().and_then(|number| number.try_into().ok());
    if let Some(number) = number.filter(|number| range.contains(number)) {
        return Ok(Some(number));
    }
    let expected = format!("a number from {} to {}", range.start(), range.end());
    Err(wrong(&format!("Backend.{name}"), &expected, value))
}

/// A key of any backend that is true or false; false if it is not given.
pub fn flag(settings: &Value, name: &str) -> Result<bool, NetworkConfigError> {
    boolean(&format!("Backend.{name}"), member(settings, name), false)
}

fn command(settings: &Value, name: &str) -> Result<Option<CommandLine>, NetworkConfigError> {
    let given = text(settings, name, "a command in a string", true)?;
    Ok(given.filter(|text| !text.trim().is_empty()).map(|text| CommandLine(text.to_owned())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_empty_vxlan_object_has_flannels_defaults() {
        let config = VxlanBackendConfig::parse(&json!({"Type": "vxlan"})).unwrap();
        let expected = VxlanBackendConfig {
            vni: 1,
            port: None,
            gbp: false,
            learning: false,
            direct_routing: false,
            mtu_bytes: None,
        };
        assert_eq!(config, expected);
        assert_eq!(VxlanBackendConfig::parse(&json!({"Port": 0})).unwrap(), expected);
    }

    #[test]
    fn vxlan_keys_ignore_case_and_are_bounded() {
        let config = VxlanBackendConfig::parse(&json!({
            "vni": 18888, "port": 4789, "gbp": true, "learning": true, "directrouting": true,
            "mtu": 9000,
        }))
        .unwrap();
        assert_eq!((config.vni, config.port, config.mtu_bytes), (18888, Some(4789), Some(9000)));
        assert!(config.gbp && config.learning && config.direct_routing);
        for bad in [
            json!({"VNI": 10_000_000}),
            json!({"VNI": -1}),
            json!({"VNI": "1"}),
            json!({"Port": 65_536}),
            json!({"MTU": 117}),
            json!({"GBP": 1}),
        ] {
            let error = VxlanBackendConfig::parse(&bad).unwrap_err().to_string();
            assert!(error.contains("Backend."), "{bad} is refused without its key: {error}");
        }
    }

    #[test]
    fn a_wireguard_object_has_flannels_keys_and_defaults() {
        let of = WireguardBackendConfig::parse;
        let plain = of(&json!({"Type": "wireguard", "PSK": "", "Mode": null})).unwrap();
        let expected = WireguardBackendConfig {
            port: 51820,
            port_v6: 51821,
            preshared_key: None,
            mtu_bytes: None,
            mode: WireguardMode::Separate,
            keepalive_seconds: 0,
        };
        assert_eq!(plain, expected);
        let psk = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
        let given = json!({
            "listenport": 1, "ListenPortV6": 2, "psk": psk, "MTU": 1400, "Mode": "auto",
            "persistentKeepaliveInterval": 25,
        });
        let expected = WireguardBackendConfig {
            port: 1,
            port_v6: 2,
            preshared_key: psk.parse().ok(),
            mtu_bytes: Some(1400),
            mode: WireguardMode::Auto,
            keepalive_seconds: 25,
        };
        assert_eq!(of(&given).unwrap(), expected);
        assert!(!shown(&given).to_string().contains("dwdt"));
        assert!(!format!("{expected:?}").contains("dwdt"));
        for (bad, words) in [
            (json!({"PSK": &psk[1..]}), "Backend.PSK"),
            (json!({"PSK": 7}), "Backend.PSK"),
            (json!({"Mode": "Auto"}), "Backend.Mode"),
            (json!({"ListenPort": 0}), "Backend.ListenPort"),
            (json!({"MTU": 147}), "Backend.MTU"),
            (json!({"PersistentKeepaliveInterval": "25s"}), "Backend.PersistentKeepaliveInterval"),
        ] {
            let error = of(&bad).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("wdtC"), "{error}");
        }
    }

    #[test]
    fn ipsec_has_a_long_psk_which_is_not_shown() {
        let psk = "s3cret!".repeat(14);
        let of = |settings: &Value| IpsecBackendConfig::parse(settings);
        let usual = of(&json!({ "PSK": psk })).unwrap();
        assert_eq!((usual.psk.0.as_str(), usual.is_in_udp), (psk.as_str(), false));
        assert_eq!(usual.esp_proposal, "aes128gcm16-sha256-prfsha256-ecp256");
        let given = json!({"psk": psk, "UDPEncap": true, "espproposal": "aes256-sha256"});
        let all = of(&given).unwrap();
        assert_eq!((all.is_in_udp, all.esp_proposal.as_str()), (true, "aes256-sha256"));
        assert_eq!([usual.overhead_bytes(), all.overhead_bytes()], [77, 85], "flannel's");
        assert!(!shown(&given).to_string().contains("s3cret"));
        assert!(!format!("{all:?}").contains("s3cret"));
        for (bad, words) in [
            (json!({}), "Backend.PSK"),
            (json!({"PSK": 7}), "Backend.PSK"),
            (json!({"PSK": &psk[..95]}), "Backend.PSK"),
            (json!({"PSK": psk, "UDPEncap": "yes"}), "Backend.UDPEncap"),
            (json!({"PSK": psk, "ESPProposal": 7}), "Backend.ESPProposal"),
        ] {
            let error = of(&bad).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn an_extension_has_the_commands_that_are_given() {
        let config = ExtensionBackendConfig::parse(&json!({
            "PreStartupCommand": "hello you", "subnetaddcommand": "add", "SubnetRemoveCommand": " ",
        }))
        .unwrap();
        assert_eq!(config.pre_startup, Some(CommandLine("hello you".to_owned())));
        assert_eq!(config.subnet_add, Some(CommandLine("add".to_owned())));
        assert_eq!((config.post_startup, config.subnet_remove), (None, None));
        let error = ExtensionBackendConfig::parse(&json!({"PreStartupCommand": ["s3cret"]}));
        assert!(!error.unwrap_err().to_string().contains("s3cret"));
    }
}

//! Which devices a node has by the network configuration, and their MTU. Pure.

use crate::backend::family::WIREGUARD_NAMES;
use crate::backend::setup::tunnel_mtu_bytes;
use crate::config::network::{WireguardBackendConfig, WireguardMode};
use crate::host::interface::ExternalInterface;
use crate::route::Families;

/// Over which addresses a device sends to peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Underlay {
    V4,
    V6,
    /// To each peer by those that are more likely to lead to it.
    Either,
}

/// A device that has to be there.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Plan {
    pub(super) name: &'static str,
    /// Where its datagrams arrive.
    pub(super) port: u16,
    /// Whose packets it carries.
    pub(super) families: Families<(), ()>,
    pub(super) underlay: Underlay,
}

/// The devices of nodes that have these families.
pub(super) fn plans(settings: &WireguardBackendConfig, families: Families<(), ()>) -> Vec<Plan> {
    let [name, name_v6] = WIREGUARD_NAMES;
    let one = |underlay| vec![Plan { name, port: settings.port, families, underlay }];
    match settings.mode {
        WireguardMode::Separate => {
            let v4 = families.v4().map(|()| Plan {
                name,
                port: settings.port,
                families: Families::of_v4((), None),
                underlay: Underlay::V4,
            });
            let v6 = families.v6().map(|()| Plan {
                name: name_v6,
                port: settings.port_v6,
                families: Families::of_v6(None, ()),
                underlay: Underlay::V6,
            });
            v4.into_iter().chain(v6).collect()
        }
        WireguardMode::Auto => one(Underlay::Either),
        WireguardMode::V4 => one(Underlay::V4),
        WireguardMode::V6 => one(Underlay::V6),
    }
}

/// MTU of the devices, in bytes: what the tunnel's packets may have, less its headers over IPv6, as
/// flannel has it whatever the underlay.
pub(super) fn mtu_bytes(settings: &WireguardBackendConfig, external: &ExternalInterface) -> u32 {
    let overhead_bytes = WireguardBackendConfig::OVERHEAD_BYTES;
    tunnel_mtu_bytes(settings.mtu_bytes, external, overhead_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(json: serde_json::Value, families: Families<(), ()>) -> Vec<(&'static str, u16)> {
        let settings = WireguardBackendConfig::parse(&json).unwrap();
        plans(&settings, families).iter().map(|plan| (plan.name, plan.port)).collect()
    }

    #[test]
    fn each_mode_has_flannels_devices_and_ports() {
        let (v4, v6) = (Families::of_v4((), None), Families::of_v6(None, ()));
        let both = Families::of_v4((), Some(()));
        let separate = serde_json::json!({});
        assert_eq!(planned(separate.clone(), v4), [("flannel-wg", 51820)]);
        assert_eq!(planned(separate.clone(), v6), [("flannel-wg-v6", 51821)]);
        let two = [("flannel-wg", 51820), ("flannel-wg-v6", 51821)];
        assert_eq!(planned(separate, both), two);
        for mode in ["auto", "ipv4", "ipv6"] {
            let one = serde_json::json!({"Mode": mode, "ListenPort": 7});
            assert_eq!(planned(one, both), [("flannel-wg", 7)], "{mode}");
        }
    }

    #[test]
    fn mtu_is_80_below_the_wire_and_never_above_the_interface() {
        let of = |json: serde_json::Value| {
            let settings = WireguardBackendConfig::parse(&json).unwrap();
            let v4 = std::net::Ipv4Addr::new(192, 0, 2, 1);
            let v4 = crate::host::interface::ExternalAddress::of(v4, None);
            let (name, addresses) = ("eth0".to_owned(), Families::of_v4(v4, None));
            mtu_bytes(&settings, &ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 })
        };
        assert_eq!(of(serde_json::json!({})), 1420);
        assert_eq!(of(serde_json::json!({"MTU": 1400})), 1320);
        assert_eq!(of(serde_json::json!({"MTU": 9000})), 1420, "it would go in fragments");
    }
}

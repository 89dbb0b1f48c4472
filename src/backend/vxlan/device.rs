//! The VXLAN device: whether the one that is there can stay, and how one is made. `mismatch`
//! decides without I/O.

use std::net::Ipv4Addr;

use tracing::debug;

use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::host::interface::ExternalInterface;
use crate::host::netlink::{self, NetlinkError, devices};
use crate::host::state::{Link, MacAddress, Vxlan};

/// flannel's name for the device of a VNI.
pub(super) fn name(settings: &VxlanBackendConfig) -> String {
    format!("flannel.{}", settings.vni)
}

/// What the device of `settings` over `external` is made with.
pub(super) fn vxlan(settings: &VxlanBackendConfig, external: &ExternalInterface) -> Vxlan {
    Vxlan {
        vni: settings.vni,
        parent_index: external.index,
        local: Some(external.address),
        port: settings.port,
        gbp: settings.gbp,
        learning: settings.learning,
        ..Vxlan::default()
    }
}

/// MTU of the overlay, in bytes: what the tunnel's packets may have, less the tunnel's headers. The
/// kernel refuses more than the external interface carries (`vxlan_change_mtu`).
pub(super) fn mtu_bytes(settings: &VxlanBackendConfig, external: &ExternalInterface) -> u32 {
    let below = settings.mtu_bytes.unwrap_or(u32::MAX).min(external.mtu_bytes);
    below.saturating_sub(BackendKind::Vxlan.overhead_bytes())
}

/// The port of devices that are made without one, where the kernel says it: a parameter of its
/// module, which is there when a device is.
pub(super) fn kernels_port() -> Option<u16> {
    std::fs::read_to_string("/sys/module/vxlan/parameters/udp_port").ok()?.trim().parse().ok()
}

/// Why a device cannot stay, in a word and both values; `None` if it can. `kernels_port` is the
/// port of a device that was made without one.
pub(super) fn mismatch(wanted: &Vxlan, found: &Link, kernels_port: Option<u16>) -> Option<String> {
    let Some(vxlan) = &found.vxlan else { return Some("it is no vxlan device".to_owned()) };
    // One that nobody knows is no difference.
    let port = wanted.port.or(kernels_port).or(vxlan.port);
    let address = |local: Option<Ipv4Addr>| local.unwrap_or(Ipv4Addr::UNSPECIFIED).to_string();
    let number = |port: Option<u16>| port.unwrap_or_default().to_string();
    let parts = [
        ("VNI", wanted.vni.to_string(), vxlan.vni.to_string()),
        ("interface index", wanted.parent_index.to_string(), vxlan.parent_index.to_string()),
        ("local address", address(wanted.local), address(vxlan.local)),
        ("port", number(port), number(vxlan.port.or(port))),
        ("GBP", wanted.gbp.to_string(), vxlan.gbp.to_string()),
        ("learning", wanted.learning.to_string(), vxlan.learning.to_string()),
        ("group", wanted.has_default_remote.to_string(), vxlan.has_default_remote.to_string()),
        ("l2miss", wanted.l2miss.to_string(), vxlan.l2miss.to_string()),
    ];
    let other = parts.into_iter().find(|(_, wanted, found)| wanted != found);
    other.map(|(what, wanted, found)| format!("its {what} is {found} and not {wanted}"))
}

/// Makes the device, switched off.
pub(super) async fn make(
    name: &str,
    vxlan: &Vxlan,
    mac: MacAddress,
    mtu_bytes: u32,
) -> Result<Link, NetlinkError> {
    let made = devices::add_vxlan(name, vxlan, mac, mtu_bytes).await;
    if let Err(error) = made {
        // Perhaps somebody made one of this name a moment ago; the next comparison validates it.
        let found = netlink::link_named(name).await?.filter(|_| error.is_already_there());
        return found.ok_or(error);
    }
    refuse_router_advertisements(name);
    netlink::link_just_made(name).await
}

/// The overlay has no routers that could advertise themselves. Without IPv6 there is no such file.
fn refuse_router_advertisements(name: &str) {
    let path = format!("/proc/sys/net/ipv6/conf/{name}/accept_ra");
    if let Err(error) = std::fs::write(&path, "0") {
        debug!("cannot set {path} to 0: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::state::tests::link;

    fn settings() -> VxlanBackendConfig {
        VxlanBackendConfig::parse(&serde_json::json!({"VNI": 18888})).unwrap()
    }

    fn external() -> ExternalInterface {
        let address = Ipv4Addr::new(192, 0, 2, 1);
        ExternalInterface {
            name: "eth0".to_owned(),
            index: 2,
            address,
            public_address: address,
            v6: None,
            mtu_bytes: 1500,
        }
    }

    fn found(vxlan: Option<Vxlan>) -> Link {
        Link { vxlan, ..link(9, "flannel.18888") }
    }

    #[test]
    fn mtu_is_never_above_the_interface() {
        let of = |json| {
            let settings = VxlanBackendConfig::parse(&json).unwrap();
            mtu_bytes(&settings, &external())
        };
        assert_eq!(of(serde_json::json!({})), 1450);
        assert_eq!(of(serde_json::json!({"MTU": 1400})), 1350);
        assert_eq!(of(serde_json::json!({"MTU": 9000})), 1450, "the kernel refuses more");
    }

    #[test]
    fn only_unchangeable_differences_replace_the_device() {
        assert_eq!(name(&settings()), "flannel.18888");
        let wanted = vxlan(&settings(), &external());
        let kernels = Vxlan { port: Some(8472), ..wanted.clone() };
        let here = found(Some(kernels.clone()));
        assert_eq!(mismatch(&wanted, &here, Some(8472)), None, "the kernel's port");
        assert_eq!(mismatch(&wanted, &here, None), None, "a port that nobody knows");
        let why = mismatch(&wanted, &here, Some(4789)).unwrap_or_default();
        assert!(why.contains("port is 8472 and not 4789"), "no Port any more: {why:?}");
        type Change = fn(&mut Vxlan);
        let changed: [(&str, Change); 8] = [
            ("VNI", |vxlan| vxlan.vni = 1),
            ("index", |vxlan| vxlan.parent_index = 3),
            ("local", |vxlan| vxlan.local = None),
            ("GBP", |vxlan| vxlan.gbp = true),
            ("learning", |vxlan| vxlan.learning = true),
            ("group", |vxlan| vxlan.has_default_remote = true),
            ("l2miss", |vxlan| vxlan.l2miss = true),
            ("port", |vxlan| vxlan.port = Some(4789)),
        ];
        let wanted = Vxlan { port: Some(8472), ..wanted };
        for (what, change) in changed {
            let mut other = kernels.clone();
            change(&mut other);
            let why = mismatch(&wanted, &found(Some(other)), None).unwrap_or_default();
            assert!(why.contains(what), "{what} differs, and the reason is {why:?}");
        }
        assert!(mismatch(&wanted, &found(None), None).is_some_and(|why| why.contains("no vxlan")));
    }

    #[test]
    fn mtu_is_50_bytes_below_the_underlay() {
        assert_eq!(mtu_bytes(&settings(), &external()), 1450);
        let settings = VxlanBackendConfig { mtu_bytes: Some(1400), ..settings() };
        assert_eq!(
            mtu_bytes(&settings, &external()),
            1350,
            "Backend.MTU is the wire's, as flannel's"
        );
    }
}

//! What the VXLAN device is made with, and whether the one that is there can stay, which `mismatch`
//! decides without I/O.

use std::net::{IpAddr, Ipv4Addr};

use tracing::warn;

use crate::backend::family::CarriedFamily;
use crate::backend::setup::tunnel_mtu_bytes;
use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::device::{features, kernel};
use crate::failure::with_causes;
use crate::host::interface::ExternalInterface;
use crate::host::state::{KernelFamily, Link, Vxlan};

/// flannel's name for the device of a VNI.
pub(in crate::backend) fn name<A: CarriedFamily>(settings: &VxlanBackendConfig) -> String {
    format!("{}{}", A::VXLAN_NAME, settings.vni)
}

/// What the device of `settings` over `external` is made with.
pub(in crate::backend) fn vxlan<A: CarriedFamily>(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
) -> Vxlan {
    Vxlan {
        vni: settings.vni,
        parent_index: external.index,
        local: A::own(external).map(Into::into),
        port: settings.port,
        gbp: settings.gbp,
        learning: settings.learning,
        ..Vxlan::default()
    }
}

/// What the tunnel's headers take from the MTU, in bytes.
pub(in crate::backend) fn overhead_bytes<A: CarriedFamily>() -> u32 {
    BackendKind::Vxlan.overhead_bytes() - Ipv4Addr::HEADER_BYTES + A::HEADER_BYTES
}

/// MTU of the device, in bytes: what the tunnel's packets may have, less the tunnel's headers. The
/// kernel refuses more than the external interface carries (`vxlan_change_mtu`).
pub(in crate::backend) fn mtu_bytes<A: CarriedFamily>(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
) -> u32 {
    tunnel_mtu_bytes(settings.mtu_bytes, external, overhead_bytes::<A>())
}

/// The port of devices that are made without one, where the kernel says it: a parameter of its
/// module, which is there when a device is.
pub(in crate::backend) fn kernels_port() -> Option<u16> {
    std::fs::read_to_string("/sys/module/vxlan/parameters/udp_port").ok()?.trim().parse().ok()
}

/// Why a device cannot stay, in a word and both values; `None` if it can. `kernels_port` is the
/// port of a device that was made without one.
pub(in crate::backend) fn mismatch(
    wanted: &Vxlan,
    found: &Link,
    kernels_port: Option<u16>,
) -> Option<String> {
    let Some(vxlan) = &found.vxlan else { return Some("it is no vxlan device".to_owned()) };
    // One that nobody knows is no difference.
    let port = wanted.port.or(kernels_port).or(vxlan.port);
    let address = |local: Option<IpAddr>| local.map(|it| it.to_string()).unwrap_or_default();
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

/// What helps where another device has the place of the one of `settings`.
pub(in crate::backend) fn advice(settings: &VxlanBackendConfig) -> String {
    format!(
        "another device has VNI {vni} and the same port, see `ip -d link show type vxlan`; remove \
         it, or give one of them another VNI",
        vni = settings.vni
    )
}

/// Some kernels corrupt checksums that a vxlan device leaves to be filled in later, where they
/// masquerade the packet: a new device gets no such packets. One that was there is left as it is;
/// somebody may have switched the offload on again because this kernel has the correction.
pub(in crate::backend) fn avoid_spoiled_checksums(name: &str, is_new: bool) {
    let release = kernel::upstream_release();
    if !kernel::spoils_vxlan_checksums(&release) {
        return;
    }
    let switched_off = is_new.then(|| features::switch(name, features::Switch::TransmitChecksum));
    let done = match switched_off {
        Some(Ok(())) => {
            format!("checksum offload of {name} is switched off, which costs throughput")
        }
        Some(Err(error)) => with_causes(&error),
        None => format!("{name} was there before and is left as it is"),
    };
    warn!(
        "kernel {release} may corrupt checksums of vxlan packets that it masquerades (fixed in 5.7 \
         and in stable releases of 2020): {done}; if connections take a minute to open, run \
         `ethtool -K {name} tx-checksum-ip-generic off`"
    );
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::host::interface::ExternalAddress;
    use crate::host::state::tests::link;
    use crate::route::Families;

    fn settings() -> VxlanBackendConfig {
        VxlanBackendConfig::parse(&serde_json::json!({"VNI": 18888})).unwrap()
    }

    fn external() -> ExternalInterface {
        let v4 = ExternalAddress::of(Ipv4Addr::new(192, 0, 2, 1), None);
        let (name, addresses) = ("eth0".to_owned(), Families::of_v4(v4, None));
        ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 }
    }

    fn found(vxlan: Option<Vxlan>) -> Link {
        Link { vxlan, ..link(9, "flannel.18888") }
    }

    #[test]
    fn mtu_is_never_above_the_interface() {
        let of = |json| {
            let settings = VxlanBackendConfig::parse(&json).unwrap();
            mtu_bytes::<Ipv4Addr>(&settings, &external())
        };
        assert_eq!(of(serde_json::json!({})), 1450);
        assert_eq!(of(serde_json::json!({"MTU": 1400})), 1350);
        assert_eq!(of(serde_json::json!({"MTU": 9000})), 1450, "the kernel refuses more");
    }

    #[test]
    fn only_unchangeable_differences_replace_the_device() {
        assert_eq!(name::<Ipv4Addr>(&settings()), "flannel.18888");
        let wanted = vxlan::<Ipv4Addr>(&settings(), &external());
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
    fn each_family_has_a_device_of_its_own() {
        let [v4, v6] = [name::<Ipv4Addr>(&settings()), name::<Ipv6Addr>(&settings())];
        assert_eq!([v4.as_str(), &v6], ["flannel.18888", "flannel-v6.18888"]);
        let address: Ipv6Addr = "fd99::1".parse().unwrap();
        let v6 = ExternalAddress::of(address, None);
        let addresses = Families::of_v6(external().v4(), v6);
        let dual = ExternalInterface { addresses, ..external() };
        let wanted = vxlan::<Ipv6Addr>(&settings(), &dual);
        assert_eq!(wanted.local, Some(address.into()));
        let of_v4 = Link { vxlan: Some(vxlan::<Ipv4Addr>(&settings(), &dual)), ..found(None) };
        let why = mismatch(&wanted, &of_v4, None).unwrap_or_default();
        assert!(why.contains("192.0.2.1 and not fd99::1"), "another tunnel is kept: {why:?}");
    }

    #[test]
    fn mtu_is_50_or_70_bytes_below_the_underlay() {
        let settings = |mtu_bytes| VxlanBackendConfig { mtu_bytes, ..settings() };
        let both = |settings: &VxlanBackendConfig| {
            let external = &external();
            [mtu_bytes::<Ipv4Addr>(settings, external), mtu_bytes::<Ipv6Addr>(settings, external)]
        };
        assert_eq!(both(&settings(None)), [1450, 1430]);
        // Backend.MTU is the wire's, as flannel's.
        assert_eq!(both(&settings(Some(1400))), [1350, 1330]);
    }
}

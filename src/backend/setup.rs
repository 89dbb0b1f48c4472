//! What a backend is started with: its settings, the interface, the lease.

use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::backend::handover::Handover;
use crate::backend_kind::{BackendKind, BackendName};
use crate::config::network::{
    BackendConfig, CloudBackendConfig, ExtensionBackendConfig, IpsecBackendConfig, NetworkConfig,
    NetworkConfigError, SubnetRange, UdpBackendConfig, VxlanBackendConfig, WireguardBackendConfig,
    flag,
};
use crate::config::options::{
    DataplaneOptions, EngineChoice, FastPathChoice, InterfaceOptions, WireguardChoice,
};
use crate::control::lease::LeaseAttributes;
use crate::control::status::ControlStatus;
use crate::host::follower::Following;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::{MtuError, no_room};
use crate::host::state::KernelFamily;
use crate::route::{IpAddress, Prefix, Prefixes};

/// The longest time between two listings for backends all of whose changes the kernel reports: it
/// finds whatever a lost event would have reported. A listing costs far below a millisecond.
pub(super) const INTERFACE_PERIOD: Duration = Duration::from_secs(60);

/// A backend with its own part of the network configuration, parsed.
#[derive(Debug, Clone)]
pub enum BackendSettings {
    /// The userspace dataplane.
    Udp(UdpBackendConfig),
    /// The kernel's VXLAN.
    Vxlan(VxlanBackendConfig),
    /// Plain routes.
    HostGw,
    /// The kernel's IPv4 in IPv4.
    Ipip {
        /// Whether hosts of one link send to each other without the tunnel.
        direct_routing: bool,
    },
    /// WireGuard.
    Wireguard(WireguardBackendConfig),
    /// IPsec.
    Ipsec(IpsecBackendConfig),
    /// Routes of a cloud's network.
    Cloud(BackendKind, CloudBackendConfig),
    /// A subnet only.
    Alloc,
    /// Commands.
    Extension(ExtensionBackendConfig),
}

/// What an operator can choose from.
const BUILT: &str = "udp, vxlan, host-gw, ipip, wireguard, ipsec, aws-vpc, gce, ali-vpc, \
                     tencent-vpc, alloc, extension";

/// What a backend is started with.
#[derive(Clone)]
pub struct Setup {
    /// The interface that carries the traffic.
    pub external: ExternalInterface,
    /// How it was found, to find its next address.
    pub interface: InterfaceOptions,
    /// Whether the backend follows that.
    pub follow_address: bool,
    /// The whole overlay.
    pub networks: Prefixes,
    /// The overlay of the last run: what that run left behind lies in it.
    pub former_networks: Option<Prefixes>,
    /// This host's lease.
    pub subnets: Prefixes,
    /// What this node publishes with it.
    pub attributes: LeaseAttributes,
    /// Tells whether the peers are from the store, or from the cache of a start without it.
    pub control: Arc<ControlStatus>,
    /// How the udp backend carries packets.
    pub dataplane: DataplaneOptions,
    /// What this weftd has from the last one, and hands to the next.
    pub handover: Handover,
    /// From which subnets of IPv4 nodes get theirs.
    pub subnet_range: Option<SubnetRange>,
    /// Between two looks at a cloud's route tables.
    pub cloud_period: Duration,
}

/// What a backend reserves on the host with, before anything is written to the store.
pub struct Claim<'a> {
    /// The interface that carries the traffic.
    pub external: &'a ExternalInterface,
    /// The whole overlay.
    pub networks: Prefixes,
    /// This host's lease of the last run, which it probably gets again.
    pub previous_subnet: Option<Prefix>,
    /// How the udp backend carries packets.
    pub dataplane: DataplaneOptions,
    /// What this weftd has from the last one.
    pub handover: &'a Handover,
    /// Where the wireguard backend has this host's key.
    pub wireguard_key_file: &'a Path,
}

impl BackendSettings {
    /// Parses the backend's part of the network configuration. flannel may have types that this
    /// build has not.
    pub fn parse(network: &NetworkConfig) -> Result<Self, NetworkConfigError> {
        let BackendConfig { settings, kind } = &network.backend;
        let kind = match kind {
            BackendName::Known(kind) => *kind,
            BackendName::Other(kind) => {
                return Err(NetworkConfigError::Invalid(format!(
                    "unknown backend type {kind:?}; set Backend.Type in the network configuration \
                     to one of {BUILT}, or run flanneld on this cluster, if that has it"
                )));
            }
        };
        let refuses_both = kind == BackendKind::Ipsec || kind.is_cloud();
        if refuses_both && network.ranges.v6().is_some() {
            let other = if kind.is_cloud() { "vxlan" } else { "wireguard, which encrypts both" };
            return Err(NetworkConfigError::Invalid(format!(
                "the {kind} backend carries IPv4 alone: set EnableIPv6 to false in the network \
                 configuration, or choose {other}"
            )));
        }
        if kind.has_ipv4_alone() && network.ranges.v4().is_none() {
            return Err(NetworkConfigError::Invalid(format!(
                "the {kind} backend carries IPv4 alone, and the network configuration has none; \
                 choose vxlan, host-gw or udp"
            )));
        }
        Ok(match kind {
            BackendKind::Udp => Self::Udp(UdpBackendConfig::parse(settings)?),
            BackendKind::Vxlan => Self::Vxlan(VxlanBackendConfig::parse(settings)?),
            BackendKind::HostGw => Self::HostGw,
            BackendKind::Ipip => Self::Ipip { direct_routing: flag(settings, "DirectRouting")? },
            BackendKind::Wireguard => Self::Wireguard(WireguardBackendConfig::parse(settings)?),
            BackendKind::Ipsec => Self::Ipsec(IpsecBackendConfig::parse(settings)?),
            BackendKind::AwsVpc => Self::Cloud(kind, CloudBackendConfig::parse_aws(settings)?),
            BackendKind::Gce => Self::Cloud(kind, CloudBackendConfig::default()),
            BackendKind::AliVpc | BackendKind::TencentVpc => {
                Self::Cloud(kind, CloudBackendConfig::parse_keyed(settings)?)
            }
            BackendKind::Alloc => Self::Alloc,
            BackendKind::Extension => Self::Extension(ExtensionBackendConfig::parse(settings)?),
        })
    }

    /// The backend's name in the network configuration and in leases.
    pub fn kind(&self) -> BackendKind {
        match self {
            Self::Udp(_) => BackendKind::Udp,
            Self::Vxlan(_) => BackendKind::Vxlan,
            Self::HostGw => BackendKind::HostGw,
            Self::Ipip { .. } => BackendKind::Ipip,
            Self::Wireguard(_) => BackendKind::Wireguard,
            Self::Ipsec(_) => BackendKind::Ipsec,
            Self::Cloud(kind, _) => *kind,
            Self::Alloc => BackendKind::Alloc,
            Self::Extension(_) => BackendKind::Extension,
        }
    }

    /// Whether what the node publishes depends on what it published before.
    pub fn goes_by_former(&self) -> bool {
        matches!(self, Self::Vxlan(_))
    }
}

/// MTU of a tunnel's device in bytes: what the tunnel's packets may have on the external interface,
/// or `configured_bytes` (`Backend.MTU`) if that is less, without the tunnel's headers.
pub(super) fn tunnel_mtu_bytes(
    configured_bytes: Option<u32>,
    external: &ExternalInterface,
    overhead_bytes: u32,
) -> u32 {
    let below = configured_bytes.unwrap_or(u32::MAX).min(external.mtu_bytes);
    below.saturating_sub(overhead_bytes)
}

/// Whether packets of the family have room in such a device.
pub(super) fn check_room<A: KernelFamily>(
    configured_bytes: Option<u32>,
    external: &ExternalInterface,
    overhead_bytes: u32,
) -> Result<(), MtuError> {
    if tunnel_mtu_bytes(configured_bytes, external, overhead_bytes) >= A::MTU_BYTES_MIN {
        return Ok(());
    }
    let what = match configured_bytes.filter(|bytes| *bytes < external.mtu_bytes) {
        Some(bytes) => format!("Backend.MTU is {bytes}"),
        None => format!("the external interface has MTU {}", external.mtu_bytes),
    };
    Err(no_room::<A>(&what, overhead_bytes))
}

/// Warns of a `Backend.MTU` that the interface does not take.
pub(super) fn warn_of_wide_mtu(configured_bytes: Option<u32>, external: &ExternalInterface) {
    if let Some(bytes) = configured_bytes.filter(|bytes| *bytes > external.mtu_bytes) {
        let (name, most) = (&external.name, external.mtu_bytes);
        warn!(
            "Backend.MTU {bytes} is above the {most} of {name}, which is taken in its place, less \
             the tunnel's headers"
        );
    }
}

/// Warns of flags for workers where there are none.
pub(super) fn warn_of_idle_flags(kind: BackendKind, given: DataplaneOptions) {
    /// So many of the flags, which come first, are for WireGuard's workers, too.
    const OF_ANY_WORKERS: usize = 4;
    let DataplaneOptions { engine, workers, fast_path, offload, wireguard, .. } = given;
    let given = [
        ("--engine", engine != EngineChoice::Auto),
        ("--workers", workers.is_some()),
        ("--worker-priority", given.workers_are_ordinary),
        ("--offload", !offload.automatic),
        ("--source-ports", given.has_one_source_port),
        ("--fast-path", fast_path == FastPathChoice::On),
        ("--peer-check", given.is_peer_check_strict),
    ];
    // With wireguard it may come to pass that there are workers.
    let may_be_workers = kind == BackendKind::Wireguard && wireguard != WireguardChoice::Kernel;
    let of_workers = if may_be_workers { &given[OF_ANY_WORKERS..] } else { &given[..] };
    for (flag, _) in of_workers.iter().filter(|(_, is_given)| *is_given) {
        warn!("{flag} has no effect with the {kind} backend");
    }
    if kind != BackendKind::Wireguard && wireguard != WireguardChoice::Auto {
        warn!("--wireguard has no effect: the backend is {kind}");
    }
}

/// What a node publishes where peers need no more than its addresses.
pub fn addresses(kind: BackendKind, external: &ExternalInterface) -> LeaseAttributes {
    let v4 = external.v4().map(|v4| v4.public_address);
    LeaseAttributes::at(kind, v4, public_ipv6(&kind.into(), external))
}

/// The IPv6 address that peers are told, if there is one to tell.
pub fn public_ipv6(kind: &BackendName, external: &ExternalInterface) -> Option<Ipv6Addr> {
    let public_address = external.v6()?.public_address;
    of_link_alone(kind, external).is_none().then_some(public_address)
}

/// The IPv6 address of the interface if it is of the link alone, and no peer is told it: of several
/// links another host may have it, and tunnels go beyond one. Not if somebody asked for it, as
/// nodes without IPv4 do, which are known by it.
pub(super) fn of_link_alone(kind: &BackendName, external: &ExternalInterface) -> Option<Ipv6Addr> {
    let v6 = external.v6().filter(|v6| v6.public_address == v6.address && v6.address.is_of_link());
    let has_tunnel = kind.is(BackendKind::Vxlan) || kind.is(BackendKind::Wireguard);
    v6.filter(|_| has_tunnel && external.v4().is_some()).map(|v6| v6.address)
}

impl Setup {
    /// Where routes of ours may lie.
    pub(super) fn networks_v4(&self) -> Vec<Prefix> {
        each_once(self.networks.v4(), self.former_networks.and_then(Prefixes::v4))
    }

    /// The same of IPv6.
    pub(super) fn networks_v6(&self) -> Vec<Prefix<Ipv6Addr>> {
        each_once(self.networks.v6(), self.former_networks.and_then(Prefixes::v6))
    }

    /// What the backend follows of the host: routes to `networks`, listed every `period` at least.
    pub(super) fn following(&self, networks: Vec<Prefix>, period: Duration) -> Following {
        Following {
            external: self.external.clone(),
            interface: self.interface.clone(),
            follow_address: self.follow_address,
            networks,
            networks_v6: Vec::new(),
            all_route_events: false,
            period,
        }
    }
}

fn each_once<A: IpAddress>(now: Option<Prefix<A>>, former: Option<Prefix<A>>) -> Vec<Prefix<A>> {
    now.into_iter().chain(former.filter(|_| former != now)).collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::host::interface::ExternalAddress;
    use crate::route::Families;

    #[test]
    fn beside_ipv4_no_peer_of_vxlan_is_told_an_address_of_the_link_alone() {
        let link: Ipv6Addr = "fe80::1".parse().unwrap();
        let v4 = Some(ExternalAddress::of(Ipv4Addr::new(192, 0, 2, 1), None));
        let told = |kind, v4, public| {
            let addresses = Families::new(v4, Some(ExternalAddress::of(link, public))).unwrap();
            let name = "eth0".to_owned();
            let external = ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 };
            super::addresses(kind, &external).public_ipv6
        };
        let public = "2001:db8::1".parse().ok();
        assert_eq!(told(BackendKind::Vxlan, v4, None), None);
        assert_eq!(told(BackendKind::Vxlan, v4, public), public, "it was asked for");
        assert_eq!(told(BackendKind::Vxlan, None, None), Some(link), "the node is known by it");
        assert_eq!(told(BackendKind::HostGw, v4, None), Some(link), "its peers are on the link");
    }

    fn parse(backend: &str) -> Result<BackendSettings, NetworkConfigError> {
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{backend}}}"#);
        BackendSettings::parse(&NetworkConfig::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn unbuilt_type_names_those_that_are_built() {
        let psk = "x".repeat(96);
        for kind in BUILT.split(", ") {
            let psk = if kind == "ipsec" { format!(r#","PSK":"{psk}""#) } else { String::new() };
            let parsed = parse(&format!(r#"{{"Type":"{kind}"{psk}}}"#));
            assert_eq!(parsed.unwrap().kind().name(), kind);
        }
        let error = parse(r#"{"Type":"tun-x"}"#).unwrap_err();
        assert!(matches!(&error, NetworkConfigError::Invalid(text) if text.contains("tun-x")));
        let text = error.to_string();
        assert!(text.contains(BUILT) && !text.contains('\n'), "one line says so: {text}");
    }

    #[test]
    fn only_ipip_ipsec_and_clouds_need_ipv4() {
        for kind in BUILT.split(", ") {
            let text = format!(
                r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/48",
                    "Backend":{{"Type":"{kind}"}}}}"#
            );
            let network = NetworkConfig::parse(text.as_bytes()).unwrap();
            match BackendSettings::parse(&network) {
                Ok(settings) => assert_eq!(settings.kind().name(), kind),
                Err(error) => {
                    let text = error.to_string();
                    let named = BackendKind::named(kind).unwrap();
                    assert!(named.has_ipv4_alone() && text.contains(kind), "{text}");
                }
            }
        }
        for (kind, is_taken) in
            [("ipip", true), ("ipsec", false), ("aws-vpc", false), ("gce", false)]
        {
            let psk = "x".repeat(96);
            let both = format!(
                r#"{{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48",
                    "Backend":{{"Type":"{kind}","PSK":"{psk}"}}}}"#
            );
            let both = NetworkConfig::parse(both.as_bytes()).unwrap();
            assert_eq!(BackendSettings::parse(&both).is_ok(), is_taken, "{kind} with both");
        }
    }

    #[test]
    fn keys_of_ipip_are_read() {
        let direct = |text| match parse(text) {
            Ok(BackendSettings::Ipip { direct_routing }) => Some(direct_routing),
            _ => None,
        };
        assert_eq!(direct(r#"{"Type":"ipip"}"#), Some(false));
        assert_eq!(direct(r#"{"Type":"ipip","DirectRouting":true}"#), Some(true));
        let error = parse(r#"{"Type":"ipip","DirectRouting":7}"#).unwrap_err().to_string();
        assert!(error.contains("Backend.DirectRouting"), "{error}");
    }

    #[test]
    fn invalid_value_names_its_key() {
        let error = parse(r#"{"Type":"vxlan","VNI":"one"}"#).unwrap_err().to_string();
        assert!(error.contains("Backend.VNI"), "{error}");
    }
}

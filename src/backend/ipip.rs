//! What is particular to the ipip backend: its lease, the kernel's device `flannel.ipip`, and a way
//! through that to each peer's subnet. A tunnel over IPv4, of IPv4 alone.

use std::net::Ipv4Addr;

use rustix::io::Errno;
use tracing::{info, warn};

use crate::backend::error::{StartError, StartResult};
use crate::backend::family::CarriedFamily;
use crate::backend::setup::{Claim, addresses, check_room};
use crate::backend_kind::BackendKind;
use crate::control::lease::LeaseAttributes;
use crate::failure::with_causes;
use crate::host::interface::ExternalInterface;
use crate::host::netlink::{self, NetlinkError, devices};
use crate::host::state::{Ipip, KernelFamily, Link, LinkId, RouteSpec};
use crate::host::tables::{Way, Ways};
use crate::route::Prefix;

const KIND: BackendKind = BackendKind::Ipip;

/// flannel's name of the device.
pub(super) const NAME: &str = "flannel.ipip";

/// Makes the device, if there is none of this kind: what the kernel lacks for it, or who has its
/// name, must be known before a lease is taken.
pub(super) async fn prepare(
    direct_routing: bool,
    claim: Claim<'_>,
) -> StartResult<LeaseAttributes> {
    let external = claim.external;
    check_room::<Ipv4Addr>(None, external, KIND.overhead_bytes())?;
    let found = netlink::link_named(NAME).await?;
    if found.as_ref().is_none_or(|link| link.ipip.is_none())
        && let Err(source) = add(external, mtu_bytes(external)).await
    {
        let cure = advice(&source, found.is_some());
        return Err(StartError::Device { name: NAME, cure, source });
    }
    info!("IPIP config: DirectRouting={direct_routing}");
    if let Some(network) = claim.networks.v6() {
        warn!(
            "{KIND} carries IPv4 alone, with flannel too: nothing of {network} passes between \
             hosts; for IPv6 choose vxlan, host-gw or udp"
        );
    }
    Ok(addresses(KIND, external))
}

/// MTU of the device, in bytes.
pub(super) fn mtu_bytes(external: &ExternalInterface) -> u32 {
    external.mtu_bytes.saturating_sub(KIND.overhead_bytes())
}

/// Why an ipip device cannot stay, in a word and both values; `None` if it can.
pub(super) fn mismatch(found: &Link, external: &ExternalInterface) -> Option<String> {
    let Ipip { local, remote } = found.ipip?;
    let wanted = local_address(external);
    let parts =
        [("local address", wanted, local), ("remote address", Ipv4Addr::UNSPECIFIED, remote)];
    let other = parts.into_iter().find(|(_, wanted, found)| wanted != found);
    other.map(|(what, wanted, found)| format!("its {what} is {found} and not {wanted}"))
}

/// Not every address: of devices that differ in nothing the kernel has one, and its module makes
/// `tunl0` with none by itself, which somebody may use.
fn local_address(external: &ExternalInterface) -> Ipv4Addr {
    Ipv4Addr::own(external).unwrap_or(Ipv4Addr::UNSPECIFIED)
}

/// Makes the device, switched off.
pub(super) async fn add(external: &ExternalInterface, mtu_bytes: u32) -> Result<(), NetlinkError> {
    devices::add_ipip(NAME, local_address(external), mtu_bytes).await
}

/// Why the kernel may refuse to make the device, and what to do about it; whether another has its
/// name.
pub(super) fn advice(error: &NetlinkError, has_name: bool) -> String {
    let NetlinkError::Refused(_, source) = error else { return with_causes(error) };
    match Errno::from_io_error(source) {
        Some(Errno::EXIST) if has_name => format!(
            "a device of another type has its name, and may be somebody's; remove or rename it \
             (`ip link delete {NAME}`)"
        ),
        Some(Errno::EXIST) => {
            "another ipip device has the same address and no remote one, see `ip \
                               -d link show type ipip`; remove it"
                .to_owned()
        }
        Some(Errno::OPNOTSUPP) => "the kernel lacks ipip, whose module it loads by itself where \
                                   there is one (`modprobe ipip` on the host, which containers \
                                   share); install it, or choose another Backend.Type"
            .to_owned(),
        Some(Errno::PERM) => "weftd lacks CAP_NET_ADMIN in this network namespace".to_owned(),
        Some(_) | None => with_causes(error),
    }
}

/// The ways to the subnets of `hosts`: the device sends each packet to the router of its route. It
/// marks the routes as ours, so their protocol is flannel's.
pub(super) fn ways<A: KernelFamily>(
    hosts: impl Iterator<Item = (Prefix<A>, A)>,
    link: &LinkId,
) -> Ways<A> {
    let way = |(subnet, host)| {
        let route = RouteSpec {
            gateway: Some(host),
            is_onlink: true,
            ..RouteSpec::into_device(subnet, link.clone())
        };
        (subnet, Way { route, entries: Vec::new(), yields: false })
    };
    hosts.map(way).collect()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::host::interface::ExternalAddress;
    use crate::host::state::tests::link;
    use crate::route::Families;

    fn external(mtu_bytes: u32) -> ExternalInterface {
        let v4 = ExternalAddress::of(Ipv4Addr::new(192, 0, 2, 1), None);
        let addresses = Families::of_v4(v4, None);
        ExternalInterface { name: "eth0".to_owned(), index: 2, addresses, mtu_bytes }
    }

    #[test]
    fn mtu_is_20_bytes_below_the_underlay() {
        assert_eq!([1500, 9000, 10].map(|bytes| mtu_bytes(&external(bytes))), [1480, 8980, 0]);
    }

    #[test]
    fn only_other_ends_replace_the_device() {
        let (own, any) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::UNSPECIFIED);
        let other = Ipv4Addr::new(192, 0, 2, 9);
        for (local, remote, differs) in [
            (own, any, None),
            (other, any, Some("local address is 192.0.2.9 and not 192.0.2.1")),
            (any, any, Some("local address is 0.0.0.0")),
            (own, other, Some("remote address is 192.0.2.9 and not 0.0.0.0")),
        ] {
            let found = Link { ipip: Some(Ipip { local, remote }), ..link(9, NAME) };
            let why = mismatch(&found, &external(1500));
            let is_told = differs.is_none_or(|it| why.as_ref().is_some_and(|why| why.contains(it)));
            assert_eq!((why.is_some(), is_told), (differs.is_some(), true), "{why:?}");
        }
        assert_eq!(mismatch(&link(9, NAME), &external(1500)), None, "of another type: left");
    }

    #[test]
    fn what_the_kernel_lacks_is_told_by_name() {
        let told = |errno: Errno, has_name| {
            let source = io::Error::from_raw_os_error(errno.raw_os_error());
            advice(&NetlinkError::Refused(String::new(), source), has_name)
        };
        for (errno, has_name, words) in [
            (Errno::EXIST, true, "link delete"),
            (Errno::EXIST, false, "type ipip"),
            (Errno::OPNOTSUPP, false, "modprobe ipip"),
            (Errno::PERM, false, "CAP_NET_ADMIN"),
        ] {
            let advice = told(errno, has_name);
            assert!(advice.contains(words), "{errno}: {advice}");
        }
    }

    #[test]
    fn each_peer_is_reached_by_its_host() {
        let hosts = [("10.5.1.0/24".parse().unwrap(), Ipv4Addr::new(192, 0, 2, 7))];
        let device = LinkId { index: 9, name: NAME.to_owned() };
        let ways = ways(hosts.into_iter(), &device);
        let routes: Vec<_> = ways.values().map(|way| way.route.to_string()).collect();
        assert_eq!(routes, ["10.5.1.0/24 via 192.0.2.7 dev flannel.ipip onlink"]);
        assert!(ways.values().all(|way| way.entries.is_empty()), "the device knows no neighbours");
    }
}

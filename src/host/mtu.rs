//! The MTU of the overlay device from the MTU of the underlay.
//! Pure arithmetic with limits.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::backend_kind::BackendKind;
use crate::host::state::KernelFamily;

/// Smallest MTU of an overlay of IPv4. Below 68 (RFC 791, the largest packet that every IPv4 module
/// must take unfragmented) Linux switches it off: the device's address and route would vanish.
pub const OVERLAY_MTU_BYTES_MIN: u32 = Ipv4Addr::MTU_BYTES_MIN;

/// Largest MTU of an overlay: what one UDP datagram over IPv4 can carry, which is less than over
/// IPv6. A loopback interface with its MTU of 65,536 is beyond it.
pub const OVERLAY_MTU_BYTES_MAX: u32 = u16::MAX as u32 - BackendKind::Udp.overhead_bytes();

/// Smallest MTU of an overlay that carries IPv6 (RFC 8200, section 5). Below, Linux switches it off
/// on the device (`addrconf_notify`, net/ipv6/addrconf.c).
pub const IPV6_MTU_BYTES_MIN: u16 = Ipv6Addr::MTU_BYTES_MIN as u16;

/// Why there is no MTU for the overlay.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MtuError(String);

/// Bytes that the udp backend's tunnel adds to each packet, between hosts of this family.
pub fn tunnel_overhead_bytes(underlay: IpAddr) -> u32 {
    let over_ipv4 = BackendKind::Udp.overhead_bytes();
    match underlay {
        IpAddr::V4(_) => over_ipv4,
        IpAddr::V6(_) => over_ipv4 - Ipv4Addr::HEADER_BYTES + Ipv6Addr::HEADER_BYTES,
    }
}

/// The MTU of the overlay device in bytes: what fits into one datagram on the external interface,
/// beside `overhead_bytes` of the tunnel, or less if `configured_bytes` (`Backend.MTU`) says so.
pub fn overlay_mtu_bytes(
    external_bytes: u32,
    overhead_bytes: u32,
    configured_bytes: Option<u32>,
) -> Result<u16, MtuError> {
    let most = external_bytes.saturating_sub(overhead_bytes);
    let mtu_bytes = configured_bytes.unwrap_or(most);
    let possible = OVERLAY_MTU_BYTES_MIN..=OVERLAY_MTU_BYTES_MAX;
    let problem = match (configured_bytes, u16::try_from(mtu_bytes)) {
        (Some(configured), _) if configured > most => format!(
            "Backend.MTU is {configured}, but the external interface carries at most {most} bytes \
             inside the tunnel (its MTU less {overhead_bytes}); Backend.MTU can only lower the MTU"
        ),
        (_, Ok(fitting)) if possible.contains(&mtu_bytes) => return Ok(fitting),
        (Some(configured), _) => format!(
            "Backend.MTU is {configured}, but an overlay MTU must be between \
             {OVERLAY_MTU_BYTES_MIN} and {OVERLAY_MTU_BYTES_MAX}"
        ),
        (None, _) => {
            let what = format!("the external interface has MTU {external_bytes}");
            return Err(no_room::<Ipv4Addr>(&what, overhead_bytes));
        }
    };
    Err(MtuError(problem))
}

/// That `what`, an interface or a setting, is too narrow or much too wide for packets of the family
/// in a tunnel with so many bytes of headers.
pub fn no_room<A: KernelFamily>(what: &str, overhead_bytes: u32) -> MtuError {
    MtuError(format!(
        "{what}, which leaves no overlay MTU between {} and {OVERLAY_MTU_BYTES_MAX} after \
         {overhead_bytes} bytes of tunnel headers; choose another interface (--iface) or correct \
         its MTU, or Backend.MTU",
        A::MTU_BYTES_MIN
    ))
}

/// What packets of IPv6 may always have inside, if the overlay `has_ipv6` and `mtu_bytes` is less:
/// then those that are longer than the external interface takes go in fragments. An interface that
/// can carry no IPv6 itself is refused, and so is a `Backend.MTU` that leaves IPv6 no room.
pub fn with_room_for_ipv6(
    has_ipv6: bool,
    mtu_bytes: u16,
    external_bytes: u32,
    overhead_bytes: u32,
) -> Result<u16, MtuError> {
    let least_bytes = u32::from(IPV6_MTU_BYTES_MIN);
    let is_configured = u32::from(mtu_bytes) < external_bytes.saturating_sub(overhead_bytes);
    if !has_ipv6 || mtu_bytes >= IPV6_MTU_BYTES_MIN {
        Ok(mtu_bytes)
    } else if is_configured || external_bytes < least_bytes {
        Err(MtuError(format!(
            "the overlay's MTU is {mtu_bytes}, and IPv6 needs {least_bytes}: the external \
             interface must have an MTU of {least_bytes} at least, and Backend.MTU may not be less \
             than that; or set EnableIPv6 to false"
        )))
    } else {
        Ok(IPV6_MTU_BYTES_MIN)
    }
}

/// What becomes of packets of IPv6 on the path of a peer that takes no more than `path_bytes` of
/// the `whole_bytes` that this host's interface takes, between hosts of this family; nothing if
/// that is no less than packets of IPv6 may always have, which pods can be told.
pub fn beyond_path(underlay: IpAddr, path_bytes: u16, whole_bytes: u16) -> &'static str {
    match underlay {
        _ if path_bytes >= IPV6_MTU_BYTES_MIN => "",
        IpAddr::V6(_) if path_bytes < whole_bytes => {
            "; of IPv6 pods can't be told less than 1280: TCP that begins from now on sends what \
             passes, and longer packets go in fragments if routers say that the path is narrow, \
             and are lost if none does"
        }
        IpAddr::V4(_) | IpAddr::V6(_) => {
            "; of IPv6 pods can't be told less than 1280: longer packets go in fragments, which \
             arrive unless routers drop them"
        }
    }
}

/// The longest packet that each path over IPv6 takes whole.
pub fn least_whole_bytes() -> u16 {
    IPV6_MTU_BYTES_MIN - tunnel_overhead_bytes(Ipv6Addr::UNSPECIFIED.into()) as u16
}

/// As [`overlay_mtu_bytes`], for an external interface that changed while the overlay runs: a
/// configured MTU that no longer fits gives way, since pods that talk are worth more than it.
pub fn followed_mtu_bytes(
    external_bytes: u32,
    overhead_bytes: u32,
    configured_bytes: Option<u32>,
) -> Result<u16, MtuError> {
    let ceiling_bytes = external_bytes.saturating_sub(overhead_bytes);
    let configured_bytes = configured_bytes.filter(|bytes| *bytes <= ceiling_bytes);
    overlay_mtu_bytes(external_bytes, overhead_bytes, configured_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(answer: Result<u16, MtuError>, with: &str) {
        let error = answer.expect_err("accepted").to_string();
        assert!(error.starts_with(with), "{error}");
    }

    #[test]
    fn tunnel_overhead_is_28_bytes_and_48_over_ipv6() {
        assert_eq!(tunnel_overhead_bytes(Ipv4Addr::LOCALHOST.into()), 28);
        assert_eq!(tunnel_overhead_bytes(Ipv6Addr::LOCALHOST.into()), 48);
        assert_eq!(overlay_mtu_bytes(1500, 28, None), Ok(1472));
        assert_eq!(overlay_mtu_bytes(9000, 28, None), Ok(8972));
    }

    #[test]
    fn mtu_limits_are_exact() {
        assert_eq!(overlay_mtu_bytes(96, 28, None), Ok(68));
        refused(overlay_mtu_bytes(95, 28, None), "the external interface has MTU 95,");
        assert_eq!(overlay_mtu_bytes(65535, 28, None), Ok(65507));
        for nonsense in [0, 27, 28, 65536, u32::MAX] {
            let error = format!("the external interface has MTU {nonsense},");
            refused(overlay_mtu_bytes(nonsense, 28, None), &error);
        }
    }

    #[test]
    fn configured_mtu_yields_to_a_smaller_interface() {
        assert_eq!(followed_mtu_bytes(9000, 28, Some(1472)), Ok(1472));
        assert_eq!(followed_mtu_bytes(1400, 28, Some(1472)), Ok(1372));
        refused(followed_mtu_bytes(95, 28, None), "the external interface has MTU 95,");
    }

    #[test]
    fn ipv6_has_its_least_mtu_on_any_interface_that_can_carry_it() {
        let of = |mtu_bytes, external_bytes, overhead_bytes| {
            with_room_for_ipv6(true, mtu_bytes, external_bytes, overhead_bytes)
        };
        assert_eq!(of(1472, 1500, 28), Ok(1472));
        assert_eq!(of(1280, 1308, 28), Ok(1280));
        for external_bytes in [1280, 1300, 1307] {
            let mtu_bytes = external_bytes as u16;
            assert_eq!(of(mtu_bytes - 28, external_bytes, 28), Ok(1280), "in fragments");
            assert_eq!(of(mtu_bytes - 48, external_bytes, 48), Ok(1280), "in fragments");
        }
        refused(of(1251, 1279, 28), "the overlay's MTU is 1251, and IPv6 needs 1280");
        refused(of(1279, 1500, 28), "the overlay's MTU is 1279, and IPv6 needs 1280");
        assert_eq!(with_room_for_ipv6(false, 1000, 1028, 28), Ok(1000));
    }

    #[test]
    fn configuration_only_lowers_the_mtu() {
        assert_eq!(overlay_mtu_bytes(1500, 28, Some(1400)), Ok(1400));
        assert_eq!(overlay_mtu_bytes(1500, 28, Some(1472)), Ok(1472));
        assert_eq!(overlay_mtu_bytes(65536, 28, Some(1472)), Ok(1472));
        let error = "Backend.MTU is 1473, but the external interface carries at most 1472 bytes";
        refused(overlay_mtu_bytes(1500, 28, Some(1473)), error);
        for nonsense in [0, 67] {
            let error = format!("Backend.MTU is {nonsense}, but an overlay MTU must be between 68");
            refused(overlay_mtu_bytes(1500, 28, Some(nonsense)), &error);
        }
        let error = "Backend.MTU is 65508, but an overlay MTU must be between 68 and 65507";
        refused(overlay_mtu_bytes(u32::MAX, 28, Some(65508)), error);
    }
}

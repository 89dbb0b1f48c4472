//! The MTU of the overlay device from the MTU of the underlay.
//! Pure arithmetic with limits.

use crate::backend_kind::BackendKind;

/// Bytes that the udp backend's tunnel adds to each packet.
const TUNNEL_OVERHEAD_BYTES: u32 = BackendKind::Udp.overhead_bytes();

/// Smallest MTU of an overlay. Below 68 (RFC 791, the largest packet that every IPv4 module must
/// take unfragmented) Linux switches IPv4 off on the device: its address and route would vanish
/// (`inetdev_valid_mtu`, net/ipv4/devinet.c).
pub const OVERLAY_MTU_BYTES_MIN: u32 = 68;

/// Largest MTU of an overlay: what one UDP datagram over IPv4 can carry. A loopback interface with
/// its MTU of 65,536 is beyond it.
pub const OVERLAY_MTU_BYTES_MAX: u32 = u16::MAX as u32 - TUNNEL_OVERHEAD_BYTES;

/// Why there is no MTU for the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MtuError {
    /// The underlay leaves too little or its MTU is nonsense.
    #[error(
        "the external interface has MTU {external_bytes}, which leaves no overlay MTU between \
         {OVERLAY_MTU_BYTES_MIN} and {OVERLAY_MTU_BYTES_MAX} after {TUNNEL_OVERHEAD_BYTES} bytes \
         of tunnel headers; choose another interface (--iface) or correct its MTU"
    )]
    External {
        /// MTU of the external interface.
        external_bytes: u32,
    },
    /// The configured MTU is nonsense.
    #[error(
        "Backend.MTU is {configured_bytes}, but an overlay MTU must be between \
         {OVERLAY_MTU_BYTES_MIN} and {OVERLAY_MTU_BYTES_MAX}"
    )]
    Configured {
        /// `Backend.MTU`.
        configured_bytes: u32,
    },
    /// The configured MTU does not fit the underlay.
    #[error(
        "Backend.MTU is {configured_bytes}, but the external interface carries at most \
         {ceiling_bytes} bytes inside the tunnel (its MTU less {TUNNEL_OVERHEAD_BYTES}); \
         Backend.MTU can only lower the MTU"
    )]
    AboveExternal {
        /// `Backend.MTU`.
        configured_bytes: u32,
        /// The most that the external interface allows.
        ceiling_bytes: u32,
    },
}

/// The MTU of the overlay device in bytes: what fits into one datagram on the external interface,
/// or less if `configured_bytes` (`Backend.MTU`) says so.
pub fn overlay_mtu_bytes(
    external_bytes: u32,
    configured_bytes: Option<u32>,
) -> Result<u16, MtuError> {
    let ceiling_bytes = external_bytes.saturating_sub(TUNNEL_OVERHEAD_BYTES);
    let mtu_bytes = configured_bytes.unwrap_or(ceiling_bytes);
    let is_possible = (OVERLAY_MTU_BYTES_MIN..=OVERLAY_MTU_BYTES_MAX).contains(&mtu_bytes);
    match (configured_bytes, u16::try_from(mtu_bytes)) {
        (Some(configured_bytes), _) if configured_bytes > ceiling_bytes => {
            Err(MtuError::AboveExternal { configured_bytes, ceiling_bytes })
        }
        (_, Ok(mtu_bytes)) if is_possible => Ok(mtu_bytes),
        (Some(configured_bytes), _) => Err(MtuError::Configured { configured_bytes }),
        (None, _) => Err(MtuError::External { external_bytes }),
    }
}

/// As [`overlay_mtu_bytes`], for an external interface that changed while the overlay runs: a
/// configured MTU that no longer fits gives way, since pods that talk are worth more than it.
pub fn followed_mtu_bytes(
    external_bytes: u32,
    configured_bytes: Option<u32>,
) -> Result<u16, MtuError> {
    let ceiling_bytes = external_bytes.saturating_sub(TUNNEL_OVERHEAD_BYTES);
    overlay_mtu_bytes(external_bytes, configured_bytes.filter(|bytes| *bytes <= ceiling_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnel_overhead_is_28_bytes() {
        assert_eq!(overlay_mtu_bytes(1500, None), Ok(1472));
        assert_eq!(overlay_mtu_bytes(9000, None), Ok(8972));
    }

    #[test]
    fn mtu_limits_are_exact() {
        assert_eq!(overlay_mtu_bytes(96, None), Ok(68));
        assert_eq!(overlay_mtu_bytes(95, None), Err(MtuError::External { external_bytes: 95 }));
        assert_eq!(overlay_mtu_bytes(65535, None), Ok(65507));
        for nonsense in [0, 27, 28, 65536, u32::MAX] {
            let error = MtuError::External { external_bytes: nonsense };
            assert_eq!(overlay_mtu_bytes(nonsense, None), Err(error));
        }
    }

    #[test]
    fn configured_mtu_yields_to_a_smaller_interface() {
        assert_eq!(followed_mtu_bytes(9000, Some(1472)), Ok(1472));
        assert_eq!(followed_mtu_bytes(1400, Some(1472)), Ok(1372));
        assert_eq!(followed_mtu_bytes(95, None), Err(MtuError::External { external_bytes: 95 }));
    }

    #[test]
    fn configuration_only_lowers_the_mtu() {
        assert_eq!(overlay_mtu_bytes(1500, Some(1400)), Ok(1400));
        assert_eq!(overlay_mtu_bytes(1500, Some(1472)), Ok(1472));
        assert_eq!(overlay_mtu_bytes(65536, Some(1472)), Ok(1472));
        assert_eq!(
            overlay_mtu_bytes(1500, Some(1473)),
            Err(MtuError::AboveExternal { configured_bytes: 1473, ceiling_bytes: 1472 })
        );
        for nonsense in [0, 67] {
            let error = MtuError::Configured { configured_bytes: nonsense };
            assert_eq!(overlay_mtu_bytes(1500, Some(nonsense)), Err(error));
        }
        assert_eq!(
            overlay_mtu_bytes(u32::MAX, Some(65508)),
            Err(MtuError::Configured { configured_bytes: 65508 })
        );
    }
}

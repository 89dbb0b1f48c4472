//! The kinds of backends, by their names in the network configuration.

/// Backends that this build has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// IPv4 in UDP, through the userspace dataplane.
    Udp,
    /// The kernel's VXLAN.
    Vxlan,
    /// Plain routes between hosts on one link.
    HostGw,
    /// A subnet, and nothing else.
    Alloc,
    /// The operator's own commands.
    Extension,
}

/// A backend that can't be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// flannel has it, this build doesn't.
    #[error(
        "backend type {kind:?} is not built into this weftd; set Backend.Type in the network \
         configuration to one of {BUILT}, or run flanneld on this cluster"
    )]
    NotBuilt {
        /// The type asked for.
        kind: String,
    },
    /// Nobody knows it.
    #[error(
        "unknown backend type {kind:?}; set Backend.Type in the network configuration to one of \
         {BUILT}"
    )]
    Unknown {
        /// The type asked for.
        kind: String,
    },
}

/// What an operator can choose from.
const BUILT: &str = "udp, vxlan, host-gw, alloc, extension";

/// Every other type that some flannel release has had.
const FLANNEL_TYPES: [&str; 7] =
    ["ali-vpc", "aws-vpc", "gce", "ipip", "ipsec", "tencent-vpc", "wireguard"];

impl BackendKind {
    /// Every kind.
    pub const ALL: [Self; 5] = [Self::Udp, Self::Vxlan, Self::HostGw, Self::Alloc, Self::Extension];

    /// Reads the lower-case type of the network configuration.
    pub fn parse(kind: &str) -> Result<Self, BackendError> {
        let built = Self::ALL.into_iter().find(|built| built.name() == kind);
        built.ok_or_else(|| {
            let (is_flannels, kind) = (FLANNEL_TYPES.contains(&kind), kind.to_owned());
            if is_flannels {
                BackendError::NotBuilt { kind }
            } else {
                BackendError::Unknown { kind }
            }
        })
    }

    /// Its name in the network configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Vxlan => "vxlan",
            Self::HostGw => "host-gw",
            Self::Alloc => "alloc",
            Self::Extension => "extension",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unbuilt_type_names_those_that_are_built() {
        for kind in BackendKind::ALL {
            assert_eq!(BackendKind::parse(kind.name()), Ok(kind));
            assert!(BUILT.split(", ").any(|name| name == kind.name()), "{kind:?} is not offered");
        }
        for kind in FLANNEL_TYPES {
            let error = BackendKind::parse(kind).unwrap_err().to_string();
            assert!(error.contains("is not built") && error.contains(kind), "{error}");
            assert!(!error.contains('\n'), "one line says so: {error}");
        }
        let error = BackendKind::parse("").unwrap_err();
        assert!(error.to_string().starts_with("unknown backend type"), "{error}");
    }
}

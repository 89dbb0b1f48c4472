//! What a lease means on this host, per backend kind: a closed set, one file each.

pub mod udp;

/// Backends that this build carries packets with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// IPv4 in UDP, through the userspace dataplane.
    Udp,
}

/// A backend that can't be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// flannel has it, this build doesn't.
    #[error(
        "backend type {kind:?} is not built into this weftd; set Backend.Type to \"udp\" in the \
         network configuration, or run flanneld on this cluster"
    )]
    NotBuilt {
        /// The type asked for.
        kind: String,
    },
    /// Nobody knows it.
    #[error(
        "unknown backend type {kind:?}; set Backend.Type in the network configuration to \"udp\""
    )]
    Unknown {
        /// The type asked for.
        kind: String,
    },
}

/// Every other type that some flannel release has had.
const FLANNEL_TYPES: [&str; 11] = [
    "alloc",
    "ali-vpc",
    "aws-vpc",
    "extension",
    "gce",
    "host-gw",
    "ipip",
    "ipsec",
    "tencent-vpc",
    "vxlan",
    "wireguard",
];

impl BackendKind {
    /// Reads the lower-case type of the network configuration.
    pub fn parse(kind: &str) -> Result<Self, BackendError> {
        match kind {
            "udp" => Ok(Self::Udp),
            _ if FLANNEL_TYPES.contains(&kind) => {
                Err(BackendError::NotBuilt { kind: kind.to_owned() })
            }
            _ => Err(BackendError::Unknown { kind: kind.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_udp_runs_and_the_others_say_whether_flannel_knows_them() {
        assert_eq!(BackendKind::parse("udp"), Ok(BackendKind::Udp));
        for kind in FLANNEL_TYPES {
            let error = BackendKind::parse(kind).unwrap_err();
            assert!(error.to_string().contains("is not built"), "{error}");
        }
        let error = BackendKind::parse("").unwrap_err();
        assert!(error.to_string().starts_with("unknown backend type"), "{error}");
    }
}

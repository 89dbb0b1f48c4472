//! Why a store did not do what it was asked, and why a node has no subnet.

use std::net::Ipv4Addr;

use crate::config::network::CONFIG_BYTES_MAX;
use crate::control::lease::ValueError;
use crate::route::Prefix;

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nobody configured the network yet.
    #[error(
        "there is no network configuration at {place}; write one, such as \
         {{\"Network\":\"10.5.0.0/16\"}}"
    )]
    NoConfig {
        /// The key or file.
        place: String,
    },
    /// The configuration is larger than any.
    #[error("the network configuration at {place} has more than {CONFIG_BYTES_MAX} bytes")]
    ConfigTooLarge {
        /// The key or file.
        place: String,
    },
    /// Another writer was there first.
    #[error("another writer changed {key} first")]
    Conflict {
        /// The key below `subnets/`.
        key: String,
    },
    /// Another node claims this node's PublicIP.
    #[error(
        "PublicIP {public_ip} belongs to {holder}, and two nodes must not share a subnet: give \
         one of them another address with --public-ip or --iface. If that node is gone, its claim \
         ends within a minute"
    )]
    Duplicate {
        /// The address.
        public_ip: Ipv4Addr,
        /// The other node, in words.
        holder: String,
    },
    /// Changes since the asked revision are not available: list again.
    #[error("the store no longer has the history since revision {revision}")]
    HistoryLost {
        /// The revision asked for.
        revision: i64,
    },
    /// The store did not answer, or cannot serve now. Worth a retry.
    #[error("{operation}: the store is unavailable: {detail}")]
    Unavailable {
        /// The operation.
        operation: &'static str,
        /// The error of the store or the transport.
        detail: String,
    },
    /// The store answered that we may not.
    #[error("{operation}: the store refused: {detail}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// The store's error, and what to do about it.
        detail: String,
    },
    /// The lease cannot be written as a value.
    #[error("the lease cannot be written")]
    Value(#[from] ValueError),
    /// A file of the local store could not be used.
    #[error("local store: cannot {action} {path}")]
    File {
        /// The operation.
        action: &'static str,
        /// With which file.
        path: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

impl StoreError {
    /// Whether the store answered, if only with an error.
    #[must_use]
    pub fn store_answered(&self) -> bool {
        !matches!(self, Self::Unavailable { .. } | Self::Refused { .. } | Self::File { .. })
    }

    /// Whether a write that failed with this certainly changed nothing. A write without an answer
    /// may have happened, or may still happen.
    #[must_use]
    pub fn nothing_was_written(&self) -> bool {
        matches!(
            self,
            Self::Conflict { .. } | Self::Duplicate { .. } | Self::Refused { .. } | Self::Value(_)
        )
    }
}

/// Why there is no subnet now.
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    /// Every subnet is taken.
    #[error(
        "out of subnets: all from {min} to {max} are taken; remove leases of nodes that are \
         gone, or enlarge the network"
    )]
    Exhausted {
        /// First subnet that may be leased.
        min: Prefix,
        /// Last subnet that may be leased.
        max: Prefix,
    },
    /// Others were faster, again and again.
    #[error("lost the races for all subnets of {listings} listings against other nodes")]
    Contended {
        /// How often all leases were listed.
        listings: u32,
    },
    /// The kubelet has not registered the Node.
    #[error("there is no Node {node:?} yet: waiting for its kubelet to register it")]
    NoNode {
        /// The Node.
        node: String,
    },
    /// The controller manager has not assigned a subnet. The first words are flannel's.
    #[error(
        "node {node:?} pod cidr not assigned: waiting for the cluster's controller manager, which \
         has to run with --allocate-node-cidrs (kubeadm: --pod-network-cidr)"
    )]
    Unassigned {
        /// The Node.
        node: String,
    },
    /// The subnet is of another network. The words are flannel's.
    #[error(
        "subnet \"{network}\" specified in the flannel net config doesn't contain \"{subnet}\" \
         PodCIDR of the {node:?} node: correct Network in the net config, or the cluster's \
         --cluster-cidr"
    )]
    Outside {
        /// The Node.
        node: String,
        /// Its subnet.
        subnet: Prefix,
        /// The configured network.
        network: Prefix,
    },
    /// What is assigned cannot be used.
    #[error("node {node:?}: {detail}")]
    Unusable {
        /// The Node.
        node: String,
        /// What is wrong.
        detail: String,
    },
    /// flannel waits as long, and ends.
    #[error(
        "error waiting for nodeController to sync state: the API did not answer within {minutes} \
         minutes"
    )]
    NotSynced {
        /// How long it was waited.
        minutes: u64,
        /// The last error.
        #[source]
        source: StoreError,
    },
    /// The store failed.
    #[error("cannot acquire a lease")]
    Store(#[from] StoreError),
}

impl AcquireError {
    /// Whether only an operator can help, so that the start fails, as flannel's does.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Outside { .. } | Self::Unusable { .. } | Self::NotSynced { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_definite_refusal_means_nothing_written() {
        let (operation, detail) = ("creating the lease", String::new());
        let lost = StoreError::Unavailable { operation, detail: detail.clone() };
        assert!(!lost.nothing_was_written(), "a write of unknown outcome may have happened");
        assert!(StoreError::Refused { operation, detail }.nothing_was_written());
        assert!(StoreError::Conflict { key: "10.5.1.0-24".to_owned() }.nothing_was_written());
    }
}

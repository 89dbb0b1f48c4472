//! Why a store did not do what it was asked, and why a node has no subnet.

use std::net::IpAddr;

use crate::config::whole_file::FileError;
use crate::control::lease::ValueError;

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nobody configured the network yet.
    #[error(
        "there is no network configuration at {0}; if this cluster has one, it is elsewhere \
         (--etcd-prefix, --local-store) or was lost; if it is new, write one, such as \
         {{\"Network\":\"10.5.0.0/16\"}}"
    )]
    NoConfig(String),
    /// Another writer was there first.
    #[error("another writer changed {0} first")]
    Conflict(String),
    /// Another node claims the address by which this node is known.
    #[error(
        "{} {address} belongs to {holder}, and two nodes must not share a subnet: give one of \
         them another address with {} or --iface. If that node is gone, its claim ends within a \
         minute",
        field_of(*address),
        flag_of(*address)
    )]
    Duplicate {
        /// The address.
        address: IpAddr,
        /// The other node, in words.
        holder: String,
    },
    /// Changes since the asked revision are not available: list again.
    #[error("the store no longer has the history since the last revision seen")]
    HistoryLost,
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
    #[error("local store: {0}")]
    File(#[from] FileError),
}

/// What a lease's value calls an address by which a node is known.
pub fn field_of(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "PublicIP" } else { "PublicIPv6" }
}

/// The flag that gives a node such an address.
pub fn flag_of(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "--public-ip" } else { "--public-ipv6" }
}

/// What a store did.
pub type StoreResult<T> = Result<T, StoreError>;

impl StoreError {
    pub(crate) fn unavailable(operation: &'static str, detail: impl Into<String>) -> Self {
        Self::Unavailable { operation, detail: detail.into() }
    }

    /// Whether the store answered, if only with an error.
    pub fn store_answered(&self) -> bool {
        !matches!(self, Self::Unavailable { .. } | Self::Refused { .. } | Self::File { .. })
    }

    /// Whether a write that failed with this certainly changed nothing. A write without an answer
    /// may have happened, or may still happen.
    pub fn nothing_was_written(&self) -> bool {
        matches!(
            self,
            Self::Conflict(_) | Self::Duplicate { .. } | Self::Refused { .. } | Self::Value(_)
        )
    }
}

/// Why the store's options cannot work, in words. Trying again does not help.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectError(pub(super) String);

/// Why there is no subnet now.
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    /// Every subnet, from the first to the last that may be leased, is taken.
    #[error(
        "out of subnets: all from {} to {} are taken; remove leases of nodes that are gone, or \
         enlarge the network",
        .0[0], .0[1]
    )]
    Exhausted([String; 2]),
    /// Others were faster, again and again.
    #[error("lost the races for all subnets of {0} listings against other nodes")]
    Contended(u32),
    /// The kubelet has not registered the Node.
    #[error("there is no Node {0:?} yet: waiting for its kubelet to register it")]
    NoNode(String),
    /// The controller manager has not assigned a subnet. The first words are flannel's.
    #[error(
        "node {0:?} pod cidr not assigned: waiting for the cluster's controller manager, which \
         has to run with --allocate-node-cidrs (kubeadm: --pod-network-cidr)"
    )]
    Unassigned(String),
    /// What is assigned cannot be used, for this reason.
    #[error("{0}")]
    Unusable(String),
    /// flannel waits as long, and ends.
    #[error(
        "error waiting for nodeController to sync state: the API did not answer within {0} \
         minutes"
    )]
    NotSynced(u64, #[source] StoreError),
    /// The store failed.
    #[error("cannot acquire a lease")]
    Store(#[from] StoreError),
}

impl AcquireError {
    /// Whether only an operator can help, so that the start fails, as flannel's does.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Unusable(_) | Self::NotSynced(..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_definite_refusal_means_nothing_written() {
        let operation = "creating the lease";
        let lost = StoreError::unavailable(operation, "");
        assert!(!lost.nothing_was_written(), "a write of unknown outcome may have happened");
        assert!(StoreError::Refused { operation, detail: String::new() }.nothing_was_written());
        assert!(StoreError::Conflict("10.5.1.0-24".to_owned()).nothing_was_written());
    }
}

//! Subnets that the cluster assigns, and nobody chooses: why there is none yet.

use std::net::Ipv4Addr;

use super::{Granted, Store, StoreError};
use crate::control::lease::LeaseAttributes;
use crate::control::status::ControlStatus;
use crate::route::Prefix;

/// Why a node has no assigned subnet.
#[derive(Debug, thiserror::Error)]
pub enum AssignError {
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
        /// What it said last.
        #[source]
        source: StoreError,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl AssignError {
    /// Whether only an operator can help, so that the start fails, as flannel's does.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Outside { .. } | Self::Unusable { .. } | Self::NotSynced { .. } => true,
            Self::NoNode { .. } | Self::Unassigned { .. } | Self::Store(_) => false,
        }
    }
}

impl Store {
    /// Whether subnets are assigned, so that a node chooses none and cannot lose it.
    #[must_use]
    pub fn assigns(&self) -> bool {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(_) => true,
            Self::Etcd(_) | Self::Local(_) => false,
            #[cfg(test)]
            Self::Memory(_) => false,
        }
    }

    /// Of a store that assigns: waits for its first answer, and gives the address that its
    /// operator chose for this node, if one was chosen.
    pub(in crate::control) async fn sync(&self) -> Result<Option<Ipv4Addr>, AssignError> {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.sync().await,
            Self::Etcd(_) | Self::Local(_) => Ok(None),
            #[cfg(test)]
            Self::Memory(_) => Ok(None),
        }
    }

    /// Of a store that assigns: what it says of this node from an earlier run, if that can be read.
    /// `None` of a store that assigns none.
    pub(in crate::control) async fn former(
        &self,
    ) -> Option<Result<Option<LeaseAttributes>, StoreError>> {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(store) => Some(store.former().await),
            Self::Etcd(_) | Self::Local(_) => None,
            #[cfg(test)]
            Self::Memory(_) => None,
        }
    }

    /// Takes the subnet that the store assigned; `None` of a store that assigns none.
    pub(in crate::control) async fn take_assigned(
        &self,
        network: Prefix,
        attributes: &LeaseAttributes,
    ) -> Option<Result<Granted, AssignError>> {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(store) => Some(store.take_assigned(network, attributes).await),
            Self::Etcd(_) | Self::Local(_) => {
                let _ = (network, attributes);
                None
            }
            #[cfg(test)]
            Self::Memory(_) => None,
        }
    }

    /// Keeps true what an assigning store shows of this node. Never ends.
    pub(in crate::control) async fn keep_assigned(
        &self,
        status: &ControlStatus,
    ) -> std::convert::Infallible {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.keep(status).await,
            Self::Etcd(_) | Self::Local(_) => {
                let _ = status;
            }
            #[cfg(test)]
            Self::Memory(_) => {}
        }
        std::future::pending().await
    }

    /// The network works: an assigning store may tell the cluster.
    pub(in crate::control) fn network_is_up(&self) {
        match self {
            #[cfg(feature = "kube")]
            Self::Kube(store) => store.network_is_up(),
            Self::Etcd(_) | Self::Local(_) => {}
            #[cfg(test)]
            Self::Memory(_) => {}
        }
    }
}

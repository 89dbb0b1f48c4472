//! What is known once the dataplane runs, for whoever reports it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::backend::peer::state::Reachability;
use crate::backend::status::{PlaneState, Workers};
use crate::backend_kind::BackendKind;
use crate::control::lease::Peers;
use crate::engine::stalled_for;
use crate::netfilter::reconciler::Flavour;
use crate::route::Prefix;
use crate::status::{Guard, Kept, SubnetFile};

/// What is known once the dataplane runs.
#[derive(Debug)]
pub(super) struct Running {
    /// The whole overlay.
    pub(super) network: Prefix,
    /// This host's lease.
    pub(super) subnet: Prefix,
    /// The dataplane, which follows rebuilds.
    pub(super) dataplane: watch::Receiver<PlaneState>,
    /// The backend.
    pub(super) kind: BackendKind,
    /// How the peers are.
    pub(super) reachability: watch::Receiver<Arc<Reachability>>,
    /// The workers, if there are any.
    pub(super) workers: Option<Workers>,
    /// Whether the subnet file is written.
    pub(super) subnet_file: watch::Receiver<SubnetFile>,
    /// The leases of all other nodes.
    pub(super) leases: watch::Receiver<Arc<Peers>>,
    /// The rules, if any are kept.
    pub(super) rules: Option<(Flavour, watch::Receiver<Kept>)>,
    /// The state of the guard of the tunnel's port, if one is kept.
    pub(super) guard: Option<watch::Receiver<Guard>>,
}

impl Running {
    /// For how long each worker has hung, if it does; none does while the device is made again.
    pub(super) fn stalled(&self) -> Vec<Option<Duration>> {
        let Some(Workers { stats, .. }) = &self.workers else { return Vec::new() };
        let is_up = self.dataplane.borrow().is_up;
        stats.iter().map(|stats| stalled_for(stats).filter(|_| is_up)).collect()
    }
}

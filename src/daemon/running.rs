//! What is known once the dataplane runs, for whoever reports it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::backend::status::View;
use crate::backend_kind::BackendKind;
use crate::control::lease::Peers;
use crate::engine::stalled_for;
use crate::netfilter::reconciler::Flavour;
use crate::route::Prefixes;
use crate::status::{Guard, Kept, SubnetFile};

/// What is known once the dataplane runs.
#[derive(Debug)]
pub(super) struct Running {
    /// The whole overlay.
    pub(super) networks: Prefixes,
    /// This host's lease.
    pub(super) subnets: Prefixes,
    /// The backend.
    pub(super) kind: BackendKind,
    /// What it shows of itself, which follows rebuilds.
    pub(super) view: View,
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
        let is_up = self.view.state.borrow().is_up;
        self.view.workers.iter().map(|stats| stalled_for(stats).filter(|_| is_up)).collect()
    }
}

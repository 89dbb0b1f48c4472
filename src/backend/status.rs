//! What a backend tells the rest of the daemon while it runs: its state, its counters, and which
//! subnet it reaches by which host.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;
use tracing::info;

use crate::backend::network::Setup;
use crate::backend::udp::WorkerState;
use crate::control::lease::LeaseAttributes;
use crate::host::interface::ExternalInterface;
use crate::route::{Prefix, Published};
use crate::stats::WorkerStats;

/// Lines that one update may log before it sums up: a cluster that starts is one piece of news.
const LOGGED_PER_UPDATE_MAX: usize = 8;

/// What is known about the plane from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaneState {
    /// Whether packets can flow; false while the plane is being made again.
    pub is_up: bool,
    /// The dataplane in one line, for the log and the status.
    pub description: String,
    /// The interface that carries the tunnel, by the name that it has now.
    pub interface: String,
    /// MTU of the overlay, in bytes; it follows the external interface.
    pub mtu_bytes: u32,
    /// The address that peers send to; it follows the external interface.
    pub public_address: Ipv4Addr,
    /// The workers, in the order of their counters; none where the kernel carries the packets.
    pub workers: Vec<WorkerState>,
}

/// Subnets of other hosts and the hosts' addresses.
pub type Ways = BTreeMap<Prefix, Ipv4Addr>;

/// Counters of a backend whose packets weftd never sees.
#[derive(Debug, Default)]
pub struct Counters {
    /// Peers that are set up in full.
    pub programmed: Number,
    /// Peers that should be and are not: refused by the kernel, or by a command.
    pub failed: Number,
    /// Leases of nodes with another backend.
    pub ignored: Number,
    /// Leases of this backend whose data is no use.
    pub unusable: Number,
    /// Edits and commands that failed, ever.
    pub failures: Number,
    /// Things of ours that somebody removed and that were put back, ever.
    pub repairs: Number,
}

/// A number that one task writes and others read.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// The number now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, number: usize) {
        self.0.store(number as u64, Ordering::Relaxed);
    }

    pub(super) fn add(&self, number: usize) {
        self.0.fetch_add(number as u64, Ordering::Relaxed);
    }
}

/// Who carries the packets, and where their figures are.
#[derive(Debug, Clone)]
pub enum Carrier {
    /// weftd's own workers.
    Workers {
        /// The counters of each; they outlive a rebuilt device.
        stats: Vec<Arc<WorkerStats>>,
        /// Where routes are published.
        routes: Published,
    },
    /// The kernel, or whatever commands have set up.
    Other {
        /// What weftd did for it.
        counters: Arc<Counters>,
        /// What is set up.
        ways: watch::Receiver<Arc<Ways>>,
    },
}

/// All that the rest of the daemon sees of a backend.
#[derive(Debug, Clone)]
pub struct View {
    /// The plane as it is, and each change of it.
    pub state: watch::Receiver<PlaneState>,
    /// What this node says of itself, and each change of it.
    pub attributes: watch::Receiver<LeaseAttributes>,
    /// Who carries the packets, and where their figures are.
    pub carrier: Carrier,
}

/// The sending ends, for a backend without workers.
#[derive(Debug)]
pub(super) struct Teller {
    pub(super) state: watch::Sender<PlaneState>,
    pub(super) attributes: watch::Sender<LeaseAttributes>,
    pub(super) counters: Arc<Counters>,
    ways: watch::Sender<Arc<Ways>>,
}

impl Teller {
    pub(super) fn new(description: String, mtu_bytes: u32, setup: &Setup) -> Self {
        let (workers, is_up, external) = (Vec::new(), true, &setup.external);
        let (interface, public_address) = (external.name.clone(), external.public_address);
        let state =
            PlaneState { is_up, description, interface, mtu_bytes, public_address, workers };
        let (state, ways) = (watch::Sender::new(state), watch::Sender::default());
        let attributes = watch::Sender::new(setup.attributes.clone());
        Self { state, attributes, counters: Arc::default(), ways }
    }

    pub(super) fn view(&self) -> View {
        let (counters, ways) = (Arc::clone(&self.counters), self.ways.subscribe());
        View {
            state: self.state.subscribe(),
            attributes: self.attributes.subscribe(),
            carrier: Carrier::Other { counters, ways },
        }
    }

    /// Changes the state, and wakes its readers only if it differs.
    pub(super) fn state(&self, change: impl FnOnce(&mut PlaneState)) {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        });
    }

    /// Tells that the backend goes on with the address of `to`.
    pub(super) fn moved(&self, from: &ExternalInterface, to: &ExternalInterface) {
        info!("the address of {} went from {} to {}; following", to.name, from.address, to.address);
        let public_ip = to.public_address;
        self.attributes.send_if_modified(|said| {
            std::mem::replace(&mut said.public_ip, public_ip) != public_ip
        });
        self.state(|state| state.public_address = public_ip);
    }

    /// Logs what differs from the last time, in flannel's words.
    pub(super) fn ways(&self, ways: Ways) {
        let before = self.ways.send_replace(Arc::new(ways));
        let now = Arc::clone(&self.ways.borrow());
        let mut news = Vec::new();
        for (subnet, via) in now.iter() {
            match before.get(subnet) {
                Some(was) if was == via => {}
                Some(was) => news.push(format!("Subnet moved: {subnet} from {was} to {via}")),
                None => news.push(format!("Subnet added: {subnet} via {via}")),
            }
        }
        let gone = before.keys().filter(|subnet| !now.contains_key(subnet));
        news.extend(gone.map(|subnet| format!("Subnet removed: {subnet}")));
        for line in news.iter().take(LOGGED_PER_UPDATE_MAX) {
            info!("{line}");
        }
        if news.len() > LOGGED_PER_UPDATE_MAX {
            let more = news.len() - LOGGED_PER_UPDATE_MAX;
            info!("{more} more changes of subnets; {} peers now", now.len());
        }
    }
}

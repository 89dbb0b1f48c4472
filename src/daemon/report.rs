//! What weftd says about itself on the status socket: one JSON object for `weft status`, and the
//! same counters as Prometheus text. Reads counters; never touches the dataplane.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::backend::udp::PlaneState;
use crate::control::status::{ControlStatus, RejectReason};
use crate::daemon::health::Readiness;
use crate::host::interface::ExternalInterface;
use crate::route::{Prefix, Published};
use crate::stats::{DirectionStats, DropReason, WorkerStats};

/// Peers that one status lists; the count is always exact.
const PEERS_LISTED_MAX: usize = 1000;

/// What is known once the dataplane runs.
#[derive(Debug)]
pub struct Running {
    /// The interface that carries the tunnel.
    pub external: ExternalInterface,
    /// The whole overlay.
    pub network: Prefix,
    /// This host's lease.
    pub subnet: Prefix,
    /// The dataplane, which follows rebuilds.
    pub dataplane: watch::Receiver<PlaneState>,
    /// The counters of each worker.
    pub stats: Vec<Arc<WorkerStats>>,
    /// The published routes.
    pub routes: Published,
}

impl Running {
    /// The counters of all workers together.
    fn total(&self) -> WorkerStats {
        WorkerStats::total(self.stats.iter().map(Arc::as_ref))
    }
}

/// The daemon's state, for whoever asks.
#[derive(Debug)]
pub struct Report {
    control: Arc<ControlStatus>,
    readiness: Readiness,
    running: OnceLock<Running>,
}

impl Report {
    /// A daemon that has no lease yet.
    #[must_use]
    pub fn new(control: Arc<ControlStatus>, readiness: Readiness) -> Self {
        Self { control, readiness, running: OnceLock::new() }
    }

    /// The dataplane runs. Called once.
    pub fn running(&self, running: Running) {
        self.running.set(running).ok();
    }

    /// The status as JSON; fields are only ever added.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let rejected: serde_json::Map<String, Value> = RejectReason::ALL
            .iter()
            .filter(|reason| self.control.rejected(**reason) > 0)
            .map(|reason| (reason.name().to_owned(), self.control.rejected(*reason).into()))
            .collect();
        let mut status = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ready": self.readiness.is_ready(),
            "stale": self.control.cached_as_of_unix().is_some(),
            "store": {
                "up": self.control.store_is_up(),
                "lease_expires_unix": self.control.lease_expires_unix(),
                "renewals": self.control.renewals(),
                "failures": self.control.store_failures(),
                "rejected": rejected,
                "subnet_refused": self.control.subnet_is_refused(),
                "refused_subnet": self.control.refused_subnet().map(|subnet| subnet.to_string()),
            },
            "stale_as_of_unix": self.control.cached_as_of_unix(),
            "cache": {
                "writes": self.control.cache_writes(),
                "failures": self.control.cache_failures(),
            },
            "peers": self.control.peers(),
            "peers_held": self.control.held_peers(),
        });
        if let Some(running) = self.running.get() {
            let plane = running.dataplane.borrow().clone();
            status["lease"] = json!({
                "network": running.network.to_string(),
                "subnet": running.subnet.to_string(),
                "public_ip": plane.public_address.to_string(),
                "mtu_bytes": plane.mtu_bytes,
            });
            status["interface"] = running.external.name.clone().into();
            let total = running.total();
            status["dataplane"] = plane.description.into();
            status["routes"] = routes_json(&running.routes);
            status["egress"] = direction_json(&total.egress);
            status["ingress"] = direction_json(&total.ingress);
            status["worker"] = worker_json(&total);
            let workers = plane.workers.iter().zip(&running.stats).enumerate();
            status["workers"] = workers
                .map(|(index, (state, stats))| {
                    let mut worker = worker_json(stats);
                    worker["index"] = index.into();
                    worker["engine"] = state.engine.to_string().into();
                    worker["processor"] = state.processor.into();
                    worker["egress"] = direction_json(&stats.egress);
                    worker["ingress"] = direction_json(&stats.ingress);
                    worker
                })
                .collect();
        }
        status
    }

    /// The counters in Prometheus text format.
    #[must_use]
    pub fn to_metrics(&self) -> String {
        let mut out = Metrics(String::new());
        out.family("flannel_ready", "gauge", "Whether weftd is ready.");
        out.sample("flannel_ready", "", u64::from(self.readiness.is_ready()));
        out.family("flannel_store_up", "gauge", "Whether the last store exchange succeeded.");
        out.sample("flannel_store_up", "", u64::from(self.control.store_is_up()));
        let (stale, control) = (self.control.cached_as_of_unix(), &self.control);
        out.family("flannel_stale", "gauge", "Whether lease and peers are from the cache.");
        out.sample("flannel_stale", "", u64::from(stale.is_some()));
        out.family(
            "flannel_subnet_refused",
            "gauge",
            "Whether the cluster assigned another subnet.",
        );
        out.sample("flannel_subnet_refused", "", u64::from(control.subnet_is_refused()));
        out.family("flannel_cache_writes_total", "counter", "Times that the cache was written.");
        out.sample("flannel_cache_writes_total", "", control.cache_writes());
        out.family("flannel_cache_failures_total", "counter", "Times that writing it failed.");
        out.sample("flannel_cache_failures_total", "", control.cache_failures());
        out.family("flannel_peers", "gauge", "Nodes with a lease, this one aside.");
        out.sample("flannel_peers", "", self.control.peers());
        out.family("flannel_peers_held", "gauge", "Peers kept though their leases vanished.");
        out.sample("flannel_peers_held", "", self.control.held_peers());
        if let Some(seconds) = self.control.lease_expires_unix() {
            out.family("flannel_lease_expiry_seconds", "gauge", "End of the own lease, unix time.");
            out.sample("flannel_lease_expiry_seconds", "", seconds);
        }
        out.family("flannel_store_rejected_total", "counter", "Store entries that were ignored.");
        for reason in RejectReason::ALL {
            let label = format!("{{why=\"{}\"}}", reason.name());
            out.sample("flannel_store_rejected_total", &label, self.control.rejected(reason));
        }
        if let Some(running) = self.running.get() {
            out.dataplane(&running.total());
        }
        out.0
    }
}

fn routes_json(routes: &Published) -> Value {
    let table = routes.load();
    let listed = table.peers().iter().take(PEERS_LISTED_MAX);
    listed
        .map(|peer| json!({ "subnet": peer.subnet.to_string(), "via": peer.address.to_string() }))
        .collect()
}

fn direction_json(stats: &DirectionStats) -> Value {
    let drops: serde_json::Map<String, Value> = DropReason::ALL
        .iter()
        .filter(|reason| stats.drops(**reason) > 0)
        .map(|reason| (reason.id().to_owned(), stats.drops(*reason).into()))
        .collect();
    json!({
        "packets_received": stats.packets_received.get(),
        "bytes_received": stats.bytes_received.get(),
        "packets_forwarded": stats.packets_forwarded.get(),
        "bytes_forwarded": stats.bytes_forwarded.get(),
        "reads": stats.reads.get(),
        "writes": stats.writes.get(),
        "icmp_sent": stats.icmp_sent.get(),
        "icmp_limited": stats.icmp_limited.get(),
        "drops": drops,
    })
}

fn worker_json(stats: &WorkerStats) -> Value {
    json!({
        "sleeps": stats.sleeps.get(),
        "naps": stats.naps.get(),
        "gso_fallbacks": stats.gso_fallbacks.get(),
        "tun_fallbacks": stats.tun_fallbacks.get(),
        "receive_overflows": stats.receive_overflows.get(),
    })
}

struct Metrics(String);

impl Metrics {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").ok();
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        writeln!(self.0, "{name}{labels} {value}").ok();
    }

    fn dataplane(&mut self, stats: &WorkerStats) {
        let directions = [("egress", &stats.egress), ("ingress", &stats.ingress)];
        type Read = fn(&DirectionStats) -> u64;
        let families: [(&str, &str, Read); 6] = [
            ("flannel_packets_received_total", "Packets taken in.", |d| d.packets_received.get()),
            ("flannel_packets_total", "Packets forwarded.", |d| d.packets_forwarded.get()),
            ("flannel_bytes_total", "Bytes forwarded.", |d| d.bytes_forwarded.get()),
            ("flannel_reads_total", "Reads, super-packets and trains as one.", |d| d.reads.get()),
            ("flannel_writes_total", "Writes, super-packets and trains as one.", |d| {
                d.writes.get()
            }),
            ("flannel_icmp_sent_total", "ICMP errors sent.", |d| d.icmp_sent.get()),
        ];
        for (name, help, read) in families {
            self.family(name, "counter", help);
            for (direction, stats) in directions {
                self.sample(name, &format!("{{direction=\"{direction}\"}}"), read(stats));
            }
        }
        self.family("flannel_drops_total", "counter", "Packets dropped, by reason.");
        for (direction, stats) in directions {
            for reason in DropReason::ALL {
                let labels = format!("{{direction=\"{direction}\",reason=\"{}\"}}", reason.id());
                self.sample("flannel_drops_total", &labels, stats.drops(*reason));
            }
        }
        self.family("flannel_receive_overflows_total", "counter", "Datagrams lost in the socket.");
        self.sample("flannel_receive_overflows_total", "", stats.receive_overflows.get());
    }
}

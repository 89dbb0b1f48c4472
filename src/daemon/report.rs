//! What weftd reports on its status socket: one JSON object for `weft status`, and the
//! same counters as Prometheus text. Reads counters; never touches the dataplane.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::backend::status::{Carrier, Counters, KernelState, PeerHosts, PlaneState};
use crate::backend::udp::pair_names;
use crate::control::clock::unix_seconds;
use crate::control::rejected::RejectReason;
use crate::control::status::{ControlState, ControlStatus};
use crate::daemon::health::Readiness;
use crate::daemon::verdict::{Facts, Verdict};
use crate::fast_path::PeerCounts;
use crate::host::device_drops::{self, DeviceDrops};
use crate::netfilter::reconciler::{Flavour, RuleState};
use crate::route::{Prefix, Published};
use crate::stats::{DirectionStats, DropReason, FailedSends, WorkerStats};

/// Most peers that one status lists; the count is always exact.
const PEERS_LISTED_MAX: usize = 1000;

/// Peers that have a metric of their own, those with the most failed sends. Their number bounds
/// what a scrape costs; all failed sends are in `flannel_drops_total`.
const PEERS_MEASURED_MAX: usize = 100;

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
    pub(super) kind: &'static str,
    /// The data plane: workers, or the kernel.
    pub(super) carrier: Carrier,
    /// Whether the subnet file is written.
    pub(super) subnet_file: watch::Receiver<bool>,
    /// Failed tries to write the subnet file.
    pub(super) subnet_file_failures: Arc<AtomicU64>,
    /// The rules, if any are kept.
    pub(super) rules: Option<(Flavour, watch::Receiver<RuleState>)>,
}

/// The daemon's state.
#[derive(Debug)]
pub(super) struct Report {
    control: Arc<ControlStatus>,
    readiness: Readiness,
    running: OnceLock<Running>,
}

impl Report {
    /// A daemon that has no lease yet.
    pub(super) fn new(control: Arc<ControlStatus>, readiness: Readiness) -> Self {
        Self { control, readiness, running: OnceLock::new() }
    }

    /// The dataplane runs. Called once.
    pub(super) fn running(&self, running: Running) {
        self.running.set(running).ok();
    }

    /// The status as JSON; fields are only ever added.
    pub(super) fn to_json(&self) -> Value {
        let control = self.control.read();
        let rejected: serde_json::Map<String, Value> = RejectReason::NAMES
            .iter()
            .map(|(reason, name)| (name, control.rejected(*reason)))
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| ((*name).to_owned(), count.into()))
            .collect();
        let mut status = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ready": self.readiness.is_ready(),
            "verdict": self.verdict_json(&control),
            "stale": control.cached_as_of_unix.is_some(),
            "store": {
                "up": control.store_is_up,
                "lease_expires_unix": control.lease_expires_unix,
                "renewals": control.renewals,
                "failures": control.store_failures,
                "refused": control.refused(),
                "written_by_others": control.written_by_others,
                "duplicate_public_ip": control.duplicate_public_ip,
                "subnets_exhausted": control.subnets_exhausted,
                "rejected": rejected,
                "subnet_refused": control.subnet_is_refused,
                "refused_subnet": control.refused_subnet.map(|subnet| subnet.to_string()),
            },
            "restart_needed": control.restart_needed,
            "stale_as_of_unix": control.cached_as_of_unix,
            "cache": { "writes": control.cache_writes, "failures": control.cache_failures },
            "peers": control.peers,
            "peers_held": control.held_peers,
        });
        if let Some(running) = self.running.get() {
            let plane = running.dataplane.borrow().clone();
            status["lease"] = json!({
                "network": running.network.to_string(),
                "subnet": running.subnet.to_string(),
                "public_ip": plane.public_address.to_string(),
                "mtu_bytes": plane.mtu_bytes,
            });
            status["interface"] = plane.interface.clone().into();
            status["dataplane"] = plane.description.clone().into();
            status["subnet_file"] =
                json!({ "failures": running.subnet_file_failures.load(Ordering::Relaxed) });
            status["rules"] = rules_json(running);
            status["device_drops"] = device_drops_json(&device_drops(&plane));
            status["backend"] = json!({ "kind": running.kind });
            match &running.carrier {
                Carrier::Workers { stats, routes, kernel } => {
                    let read: Vec<_> = stats.iter().map(|worker| worker.read_once()).collect();
                    let total = WorkerStats::total(&read);
                    let taken = kernel.taken.each();
                    status["routes"] = routes_json(routes, &total.failed_sends, &taken);
                    status["fast_path"] = fast_path_json(&kernel.state.borrow(), &taken);
                    workers_json(&mut status, &plane, &total, &read);
                }
                Carrier::Other { counters, hosts } => {
                    status["routes"] = hosts_json(&hosts.borrow());
                    counters_json(&mut status["backend"], counters);
                }
            }
        }
        status
    }

    fn verdict_json(&self, control: &ControlState) -> Value {
        let running = self.running.get();
        let plane = running.map(|running| running.dataplane.borrow().clone());
        let rules = running.and_then(|running| running.rules.as_ref());
        let verdict = Verdict::of(Facts {
            is_ready: self.readiness.is_ready(),
            since_unix: self.readiness.since_unix(),
            control,
            plane: plane.as_ref(),
            is_subnet_file_written: running.is_some_and(|running| *running.subnet_file.borrow()),
            rules: rules.map(|(_, state)| *state.borrow()),
            now_unix: unix_seconds(),
        });
        json!({
            "state": verdict.state.name(),
            "since_unix": verdict.since_unix,
            "causes": verdict.causes,
        })
    }

    /// The counters in Prometheus text format.
    pub(super) fn to_metrics(&self) -> String {
        let mut out = Metrics(String::new());
        let control = self.control.read();
        out.gauge("flannel_ready", "Whether weftd is ready.", self.readiness.is_ready());
        out.control(&control);
        if let Some(running) = self.running.get() {
            match &running.carrier {
                Carrier::Workers { stats, kernel, .. } => {
                    out.fast_path(&kernel.state.borrow(), &kernel.taken.each());
                    out.dataplane(&WorkerStats::total(stats.iter().map(Arc::as_ref)));
                }
                Carrier::Other { counters, .. } => out.backend(counters),
            }
            out.device_drops(&device_drops(&running.dataplane.borrow()));
            let failures = running.subnet_file_failures.load(Ordering::Relaxed);
            let help = "Times that writing the subnet file failed.";
            out.counter("flannel_subnet_file_failures_total", help, failures);
            out.rules(running);
        }
        out.0
    }
}

type TakenByPeer = BTreeMap<(Prefix, SocketAddrV4), PeerCounts>;

/// Of the devices that the overlay's packets go through.
fn device_drops(plane: &PlaneState) -> Vec<DeviceDrops> {
    let pair = plane.device.iter().flat_map(|device| pair_names(device));
    let names: Vec<_> = plane.device.clone().into_iter().chain(pair).collect();
    let wanted = |name: &str| name == plane.interface || names.iter().any(|own| own == name);
    // Without procfs there is nothing to show.
    device_drops::read(wanted).unwrap_or_default()
}

fn device_drops_json(drops: &[DeviceDrops]) -> Value {
    let each = drops.iter().map(|DeviceDrops { device, received, sent }| {
        (device.clone(), json!({ "egress": sent, "ingress": received }))
    });
    Value::Object(each.collect())
}

/// Whether the kernel's programs carry packets, and what they took.
fn fast_path_json(state: &KernelState, taken: &TakenByPeer) -> Value {
    let mut json = taken_json(taken.values());
    match state {
        KernelState::On { peers } => {
            json["on"] = true.into();
            json["peers"] = (*peers).into();
        }
        KernelState::Off { reason } => {
            json["on"] = false.into();
            json["reason"] = reason.as_str().into();
        }
    }
    json
}

fn taken_json<'a>(counts: impl Iterator<Item = &'a PeerCounts> + Clone) -> Value {
    let sum = |field: fn(&PeerCounts) -> u64| counts.clone().map(field).sum::<u64>();
    json!({
        "packets_sent": sum(|counts| counts.packets_sent),
        "bytes_sent": sum(|counts| counts.bytes_sent),
        "packets_received": sum(|counts| counts.packets_received),
        "bytes_received": sum(|counts| counts.bytes_received),
    })
}

fn routes_json(routes: &Published, failed: &FailedSends, taken: &TakenByPeer) -> Value {
    let table = routes.load();
    let failed: BTreeMap<_, _> = failed.each().collect();
    let listed = table.peers().iter().take(PEERS_LISTED_MAX);
    listed
        .map(|peer| {
            json!({
                "subnet": peer.subnet.to_string(),
                "via": peer.address.to_string(),
                "failed_sends": failed.get(&peer.address).copied().unwrap_or(0),
                "fast_path": taken_json(taken.get(&(peer.subnet, peer.address)).into_iter()),
            })
        })
        .collect()
}

fn rules_json(running: &Running) -> Value {
    let Some((flavour, state)) = &running.rules else { return Value::Null };
    let state = *state.borrow();
    json!({
        "kept_by": flavour.name(),
        "in_place": state.is_in_place,
        "checks": state.checks,
        "repairs": state.repairs,
        "failures": state.failures,
    })
}

fn hosts_json(hosts: &PeerHosts) -> Value {
    let listed = hosts.iter().take(PEERS_LISTED_MAX);
    listed
        .map(|(subnet, via)| json!({ "subnet": subnet.to_string(), "via": via.to_string() }))
        .collect()
}

fn counters_json(backend: &mut Value, counters: &Counters) {
    backend["peers_programmed"] = counters.programmed.get().into();
    backend["peers_failed"] = counters.failed.get().into();
    backend["leases_ignored"] = counters.ignored.get().into();
    backend["leases_unusable"] = counters.unusable.get().into();
    backend["failures"] = counters.failures.get().into();
    backend["repairs"] = counters.repairs.get().into();
}

/// The workers' counters, of which `total` is the sum: a reader may add them up and compare.
fn workers_json(
    status: &mut Value,
    plane: &PlaneState,
    total: &WorkerStats,
    stats: &[WorkerStats],
) {
    status["egress"] = direction_json(&total.egress);
    status["ingress"] = direction_json(&total.ingress);
    status["worker"] = worker_json(total);
    let workers = plane.workers.iter().zip(stats).enumerate();
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

    fn gauge(&mut self, name: &str, help: &str, value: impl TryInto<u64>) {
        self.family(name, "gauge", help);
        self.sample(name, "", value.try_into().unwrap_or(u64::MAX));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    fn control(&mut self, control: &ControlState) {
        let (up, refused) = (control.store_is_up, control.refused().is_some());
        self.gauge("flannel_store_up", "Whether the last store exchange succeeded.", up);
        self.gauge("flannel_store_refused", "Whether the store refuses a request.", refused);
        let stale = control.cached_as_of_unix.is_some();
        self.gauge("flannel_stale", "Whether lease and peers are from the cache.", stale);
        let help = "Whether the cluster assigned another subnet.";
        self.gauge("flannel_subnet_refused", help, control.subnet_is_refused);
        let help = "Whether the store has another network.";
        self.gauge("flannel_restart_needed", help, control.restart_needed);
        let help = "Times that the cache was written.";
        self.counter("flannel_cache_writes_total", help, control.cache_writes);
        let help = "Times that writing it failed.";
        self.counter("flannel_cache_failures_total", help, control.cache_failures);
        self.gauge("flannel_peers", "Nodes with a lease, this one aside.", control.peers);
        let help = "Peers kept though their leases vanished.";
        self.gauge("flannel_peers_held", help, control.held_peers);
        if let Some(seconds) = control.lease_expires_unix {
            let help = "End of the own lease, unix time.";
            self.gauge("flannel_lease_expiry_seconds", help, seconds);
        }
        let help = "Times that somebody else wrote the own lease with this node's PublicIP.";
        self.counter("flannel_lease_written_by_others_total", help, control.written_by_others);
        let is_duplicate = control.duplicate_public_ip.is_some();
        self.gauge("flannel_duplicate_public_ip", "Whether another node has it.", is_duplicate);
        let help = "Tries that found no free subnet.";
        self.counter("flannel_subnets_exhausted_total", help, control.subnets_exhausted);
        let name = "flannel_store_rejected_total";
        self.family(name, "counter", "Store entries that were ignored.");
        for (reason, why) in RejectReason::NAMES {
            let label = format!("{{why=\"{why}\"}}");
            self.sample(name, &label, control.rejected(reason));
        }
    }

    fn rules(&mut self, running: &Running) {
        let Some((_, state)) = &running.rules else { return };
        let state = *state.borrow();
        let help = "Whether the last look found the rules.";
        self.gauge("flannel_rules_in_place", help, state.is_in_place);
        let help = "Looks at the rules that succeeded.";
        self.counter("flannel_rules_checks_total", help, state.checks);
        let help = "Looks that found rules missing.";
        self.counter("flannel_rules_repairs_total", help, state.repairs);
        self.counter(
            "flannel_rules_failures_total",
            "Looks or repairs that failed.",
            state.failures,
        );
    }

    fn backend(&mut self, counters: &Counters) {
        self.gauge("flannel_backend_peers_programmed", "Peers set up.", counters.programmed.get());
        self.gauge("flannel_backend_peers_failed", "Peers not set up.", counters.failed.get());
        let help = "Leases of other backends.";
        self.gauge("flannel_backend_leases_ignored", help, counters.ignored.get());
        self.gauge(
            "flannel_backend_leases_unusable",
            "Leases without data.",
            counters.unusable.get(),
        );
        let help = "Edits and commands that failed.";
        self.counter("flannel_backend_failures_total", help, counters.failures.get());
        self.counter("flannel_backend_repairs_total", "Things put back.", counters.repairs.get());
    }

    fn fast_path(&mut self, state: &KernelState, taken: &TakenByPeer) {
        let is_on = matches!(state, KernelState::On { .. });
        self.gauge("flannel_fast_path", "Whether the kernel's programs carry packets.", is_on);
        let sum = |field: fn(&PeerCounts) -> u64| taken.values().map(field).sum::<u64>();
        let packets = [sum(|taken| taken.packets_sent), sum(|taken| taken.packets_received)];
        let bytes = [sum(|taken| taken.bytes_sent), sum(|taken| taken.bytes_received)];
        for (name, help, [egress, ingress]) in [
            ("flannel_fast_path_packets_total", "Packets that these programs took.", packets),
            ("flannel_fast_path_bytes_total", "Bytes that these programs took.", bytes),
        ] {
            self.family(name, "counter", help);
            self.sample(name, "{direction=\"egress\"}", egress);
            self.sample(name, "{direction=\"ingress\"}", ingress);
        }
    }

    fn device_drops(&mut self, drops: &[DeviceDrops]) {
        let name = "flannel_device_drops_total";
        self.family(name, "counter", "Packets that the kernel dropped at a device.");
        for DeviceDrops { device, received, sent } in drops {
            for (direction, count) in [("egress", sent), ("ingress", received)] {
                let labels = format!("{{device=\"{device}\",direction=\"{direction}\"}}");
                self.sample(name, &labels, *count);
            }
        }
    }

    fn dataplane(&mut self, stats: &WorkerStats) {
        let directions = [("egress", &stats.egress), ("ingress", &stats.ingress)];
        type Read = fn(&DirectionStats) -> u64;
        let families: [(&str, &str, Read); 6] = [
            ("flannel_packets_received_total", "Packets taken in.", |d| d.packets_received.get()),
            ("flannel_packets_total", "Packets forwarded.", |d| d.packets_forwarded.get()),
            ("flannel_bytes_total", "Bytes forwarded.", |d| d.bytes_forwarded.get()),
            ("flannel_reads_total", "Reads, super-packets and GSO batches as one.", |d| {
                d.reads.get()
            }),
            ("flannel_writes_total", "Writes, super-packets and GSO batches as one.", |d| {
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
        self.failed_sends(&stats.failed_sends);
        let help = "Datagrams lost in the socket.";
        self.counter("flannel_receive_overflows_total", help, stats.receive_overflows.get());
    }

    fn failed_sends(&mut self, failed: &FailedSends) {
        let name = "flannel_peer_failed_sends_total";
        self.family(name, "counter", "Packets that could not be sent to this peer.");
        let mut peers: Vec<_> = failed.each().collect();
        peers.sort_unstable_by_key(|(peer, packets)| (Reverse(*packets), *peer));
        for (peer, packets) in peers.into_iter().take(PEERS_MEASURED_MAX) {
            self.sample(name, &format!("{{peer=\"{peer}\"}}"), packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_send_metrics_are_bounded_to_worst_peers() {
        let failed = FailedSends::default();
        for number in 0..2 * PEERS_MEASURED_MAX as u16 {
            let peer = format!("192.0.2.{}:8285", number).parse();
            let Ok(peer) = peer else { break };
            failed.add(peer, u64::from(number) + 1);
        }
        let mut out = Metrics(String::new());
        out.failed_sends(&failed);
        let samples: Vec<_> = out.0.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples.len(), PEERS_MEASURED_MAX);
        let worst = "flannel_peer_failed_sends_total{peer=\"192.0.2.199:8285\"} 200";
        assert_eq!(samples[0], worst);
    }
}

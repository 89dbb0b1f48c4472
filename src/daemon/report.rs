//! What weftd reports on its status socket: one JSON object for `weft status`, and the
//! same counters as Prometheus text. Reads counters; never touches the dataplane.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::backend::status::{Carrier, Counters, KernelState, PlaneState};
use crate::backend::udp::pair_names;
use crate::backend_kind::BackendKind;
use crate::config::options::{ShownSetting, ShownSettings};
use crate::control::clock::unix_seconds;
use crate::control::lease::Peers;
use crate::control::manager::SubnetManager;
use crate::control::rejected::RejectReason;
use crate::control::request_times::RequestTimes;
use crate::control::status::{ControlState, ControlStatus};
use crate::daemon::drop_samples;
use crate::daemon::health::Readiness;
use crate::daemon::log;
use crate::daemon::metrics::Metrics;
use crate::daemon::peer_rows::{self, PeerRow};
use crate::daemon::process::Process;
use crate::daemon::status::{Page, SCHEMA};
use crate::daemon::verdict::{self, Facts, Verdict};
use crate::engine::stalled_for;
use crate::fast_path::PeerCounts;
use crate::host::device_drops::{self, DeviceDrops};
use crate::netfilter::guard_keeper::GuardState;
use crate::netfilter::reconciler::{Flavour, RuleState};
use crate::route::Prefix;
use crate::stats::{DirectionStats, DropReason, WorkerStats};

/// Most peers that one status lists; `weft peers` has all.
const PEERS_LISTED_MAX: usize = 1000;

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
    /// The data plane: workers, or the kernel.
    pub(super) carrier: Carrier,
    /// Whether the subnet file is written.
    pub(super) subnet_file: watch::Receiver<bool>,
    /// Failed tries to write the subnet file.
    pub(super) subnet_file_failures: Arc<AtomicU64>,
    /// The leases of all other nodes.
    pub(super) leases: watch::Receiver<Arc<Peers>>,
    /// The rules, if any are kept.
    pub(super) rules: Option<(Flavour, watch::Receiver<RuleState>)>,
    /// The state of the guard of the tunnel's port, if one is kept.
    pub(super) guard: Option<watch::Receiver<GuardState>>,
}

impl Running {
    /// Which workers hang, and for how long; none while the device is made again.
    fn stalled_workers(&self) -> impl Iterator<Item = (usize, Duration)> {
        let stats = match &self.carrier {
            Carrier::Workers { stats, .. } if self.dataplane.borrow().is_up => stats.as_slice(),
            Carrier::Workers { .. } | Carrier::Other { .. } => &[],
        };
        let each = stats.iter().enumerate();
        each.filter_map(|(index, stats)| Some((index, stalled_for(stats)?)))
    }
}

/// The daemon's state.
#[derive(Debug)]
pub(super) struct Report {
    control: Arc<ControlStatus>,
    /// How long the store's answers take, if it is no store of files.
    request_times: Option<Arc<RequestTimes>>,
    readiness: Readiness,
    settings: ShownSettings,
    running: OnceLock<Running>,
}

impl Report {
    /// A daemon that has no lease yet.
    pub(super) fn new(
        manager: &SubnetManager,
        readiness: Readiness,
        settings: ShownSettings,
    ) -> Self {
        let (control, request_times) = (manager.status(), manager.request_times());
        Self { control, request_times, readiness, settings, running: OnceLock::new() }
    }

    /// The dataplane runs. Called once.
    pub(super) fn running(&self, running: Running) {
        self.running.set(running).ok();
    }

    /// What a path of the status socket shows.
    pub(super) fn page(&self, path: &str) -> Option<Page> {
        match path {
            "/status" => Some(Page::json(&self.to_json())),
            "/config" => Some(Page::json(&self.config_json())),
            "/peers" => Some(Page::json(&self.peers_json())),
            "/metrics" => Some(Page::metrics(self.to_metrics())),
            "/log" => Some(Page::plain(log::last_lines())),
            _ => {
                let seen = path.strip_prefix("/drops/")?;
                Some(Page::json(&drop_samples::json(self.running.get(), seen)))
            }
        }
    }

    /// The status as JSON; fields are only ever added.
    fn to_json(&self) -> Value {
        let control = self.control.read();
        let rejected: serde_json::Map<String, Value> = RejectReason::NAMES
            .iter()
            .map(|(reason, name)| (name, control.rejected(*reason)))
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| ((*name).to_owned(), count.into()))
            .collect();
        let mut status = json!({
            "schema": SCHEMA,
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
            status["device"] = plane.device.clone().into();
            status["dataplane"] = plane.description.clone().into();
            status["subnet_file"] =
                json!({ "failures": running.subnet_file_failures.load(Ordering::Relaxed) });
            status["rules"] = rules_json(running);
            status["guard"] = guard_json(running);
            status["device_drops"] = device_drops_json(&device_drops(&plane));
            status["backend"] = json!({ "kind": running.kind });
            let rows = peer_rows::of(running);
            status["peer_states"] = json!(peer_rows::states(&rows));
            status["narrow_paths"] = peer_rows::narrow_paths(running).into();
            status["routes"] = rows.iter().take(PEERS_LISTED_MAX).map(PeerRow::to_json).collect();
            match &running.carrier {
                Carrier::Workers { stats, kernel, .. } => {
                    let read: Vec<_> = stats.iter().map(|worker| worker.read_once()).collect();
                    let total = WorkerStats::total(&read);
                    let taken = kernel.taken.total();
                    status["fast_path"] = fast_path_json(&kernel.state.borrow(), &taken);
                    workers_json(&mut status, &plane, &total, &read);
                }
                Carrier::Other { counters, .. } => {
                    counters_json(&mut status["backend"], counters);
                }
            }
        }
        status
    }

    /// Every flag as JSON.
    fn config_json(&self) -> Value {
        let settings = self.settings.0.iter().map(|setting| {
            let ShownSetting { name, value, given_by } = setting;
            json!({ "name": name, "value": value, "given_by": given_by })
        });
        let settings: Value = settings.collect();
        json!({ "schema": SCHEMA, "settings": settings })
    }

    /// All peers as JSON.
    fn peers_json(&self) -> Value {
        let rows = self.running.get().map(peer_rows::of).unwrap_or_default();
        json!({ "schema": SCHEMA, "peers": rows.iter().map(PeerRow::to_json).collect::<Value>() })
    }

    /// The first line of `weft status`, without its age.
    pub(super) fn headline(&self) -> String {
        let Verdict { state, causes, .. } = self.verdict(&self.control.read());
        let cause = causes.first().map(|cause| format!(": {cause}"));
        state.name().to_owned() + &cause.unwrap_or_default()
    }

    /// The first worker that hangs, in words.
    pub(super) fn stalled(&self) -> Option<String> {
        let (index, age) = self.running.get()?.stalled_workers().next()?;
        Some(verdict::stalled(index, age))
    }

    fn verdict_json(&self, control: &ControlState) -> Value {
        let verdict = self.verdict(control);
        json!({
            "state": verdict.state.name(),
            "since_unix": verdict.since_unix,
            "causes": verdict.causes,
        })
    }

    fn verdict(&self, control: &ControlState) -> Verdict {
        let running = self.running.get();
        let plane = running.map(|running| running.dataplane.borrow().clone());
        let silent = running.map(peer_rows::silent).unwrap_or_default();
        let rules = running.and_then(|running| running.rules.as_ref());
        let guard = running.and_then(|running| running.guard.as_ref());
        let stalled = self.stalled();
        Verdict::of(Facts {
            is_ready: self.readiness.is_ready(),
            since_unix: self.readiness.since_unix(),
            control,
            plane: plane.as_ref(),
            is_subnet_file_written: running.is_some_and(|running| *running.subnet_file.borrow()),
            rules: rules.map(|(_, state)| *state.borrow()),
            guard: guard.map(|state| *state.borrow()),
            silent: &silent,
            stalled: stalled.as_deref(),
            now_unix: unix_seconds(),
        })
    }

    /// The counters in Prometheus text format.
    pub(super) fn to_metrics(&self) -> String {
        let mut out = Metrics(String::new());
        out.build();
        out.control(self.readiness.is_ready(), &self.control.read());
        self.request_times.iter().for_each(|times| out.store_requests(&times.read()));
        let process = Process::read();
        process.iter().for_each(|process| out.process(process));
        if let Some(running) = self.running.get() {
            match &running.carrier {
                Carrier::Workers { stats, kernel, .. } => {
                    process.iter().for_each(|process| out.workers(process));
                    out.stalled(running.stalled_workers().count());
                    out.narrow_paths(peer_rows::narrow_paths(running));
                    out.fast_path(&kernel.state.borrow(), &kernel.taken.total());
                    out.dataplane(&WorkerStats::total(stats.iter().map(Arc::as_ref)));
                    let rows = peer_rows::of(running);
                    out.failed_sends(peer_rows::failed_sends(&rows));
                    out.peer_states(&peer_rows::states(&rows));
                }
                Carrier::Other { counters, .. } => out.backend(counters),
            }
            let plane = running.dataplane.borrow().clone();
            out.plane(running.kind, &plane);
            out.device_drops(&device_drops(&plane));
            out.subnet_file(running.subnet_file_failures.load(Ordering::Relaxed));
            out.rules(running);
            out.guard(running);
        }
        out.0
    }
}

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
fn fast_path_json(state: &KernelState, taken: &PeerCounts) -> Value {
    let mut json = taken_json(taken);
    match state {
        KernelState::On { peers } => {
            json["on"] = true.into();
            json["peers"] = (*peers).into();
        }
        KernelState::Off(off) => {
            json["on"] = false.into();
            json["why"] = off.why.into();
            json["reason"] = off.reason.as_str().into();
        }
    }
    json
}

pub(super) fn taken_json(counts: &PeerCounts) -> Value {
    json!({
        "packets_sent": counts.packets_sent,
        "bytes_sent": counts.bytes_sent,
        "packets_received": counts.packets_received,
        "bytes_received": counts.bytes_received,
    })
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

fn guard_json(running: &Running) -> Value {
    let Some(state) = &running.guard else { return Value::Null };
    let GuardState { rules, port, peers, dropped } = *state.borrow();
    json!({
        "port": port,
        "in_place": rules.is_in_place,
        "peers": peers,
        "checks": rules.checks,
        "repairs": rules.repairs,
        "failures": rules.failures,
        "dropped_from_strangers": dropped.from_strangers,
        "dropped_from_pods": dropped.from_pods,
    })
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

//! What weftd reports on its status socket: one reading of all counters, for `weft status`, for
//! metrics and for the verdict alike. Never touches the dataplane.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hyper::StatusCode;
use tokio::time::sleep;
use tracing::info;

use crate::backend::setup::public_ipv6;
use crate::backend::status::PlaneState;
use crate::backend::udp::pair_names;
use crate::control::clock::unix_seconds;
use crate::control::manager::SubnetManager;
use crate::control::status::{ControlState, ControlStatus};
use crate::daemon::contain::panics;
use crate::daemon::health::Readiness;
use crate::daemon::http::{self, Reply};
use crate::daemon::lately::{self, CarrierLosses, DropLooks};
use crate::daemon::running::Running;
use crate::daemon::{drop_samples, log, metrics, peer_rows, process, verdict};
use crate::host::netlink;
use crate::stats::WorkerStats;
use crate::status::{
    Backend, Config, DeviceDrops, Direction, FastPath, Lease, LeaseIpv6, Peers, Rules, SCHEMA,
    Setting, Start, Status, Store, Verdict, Worker, WorkerCounts,
};

/// Most peers that one status lists; `weft peers` has all.
const PEERS_LISTED_MAX: usize = 1000;

/// The daemon's state.
#[derive(Debug)]
pub(super) struct Report {
    control: Arc<ControlStatus>,
    readiness: Readiness,
    settings: Vec<Setting>,
    running: OnceLock<Running>,
    /// What was dropped lately.
    looks: DropLooks,
    carrier_losses: CarrierLosses,
}

impl Report {
    /// A daemon that has no lease yet.
    pub(super) fn new(
        manager: &SubnetManager,
        readiness: Readiness,
        settings: Vec<Setting>,
    ) -> Self {
        let control = manager.status();
        let (running, looks) = (OnceLock::new(), DropLooks::new(Instant::now()));
        let carrier_losses = CarrierLosses::default();
        Self { control, readiness, settings, running, looks, carrier_losses }
    }

    /// The dataplane runs. Called once.
    pub(super) fn running(&self, running: Running) {
        self.running.set(running).ok();
    }

    /// Looks from time to time at what is dropped and at the interface, for ever.
    pub(super) async fn keep_looking(&self) -> Infallible {
        loop {
            if let Some(running) = self.running.get() {
                let stats = &running.view.workers;
                if !stats.is_empty() {
                    let mut total = Direction::default();
                    for direction in stats.iter().flat_map(|it| [&it.egress, &it.ingress]) {
                        total += &Direction::from(direction);
                    }
                    self.looks.look(total.drops, Instant::now());
                }
                let interface = running.view.state.borrow().external.name.clone();
                // What can't be read now can be at the next look.
                if let Ok(Some(link)) = netlink::link_named(&interface).await
                    && let Some(counted) = link.carrier_losses
                {
                    self.carrier_losses.look(counted, Instant::now());
                }
            }
            sleep(lately::LOOK).await;
        }
    }

    /// What a path of the status socket shows.
    pub(super) fn page(&self, path: &str) -> Option<Reply> {
        match path {
            "/status" => {
                let mut status = self.read();
                status.routes.truncate(PEERS_LISTED_MAX);
                Some(http::json(&status))
            }
            "/config" => {
                let settings = self.settings.clone();
                Some(http::json(&Config { schema: SCHEMA, settings }))
            }
            "/peers" => {
                let control = self.control.read();
                let rows = |running| peer_rows::of(running, &control);
                let peers = self.running.get().map(rows).unwrap_or_default();
                Some(http::json(&Peers { schema: SCHEMA, peers }))
            }
            "/metrics" => Some(http::metrics(self.metrics())),
            "/log" => Some(http::text(StatusCode::OK, log::last_lines())),
            _ => {
                let seen = path.strip_prefix("/drops/")?;
                Some(http::json(&drop_samples::read(self.running.get(), seen)))
            }
        }
    }

    /// Everything, at this moment.
    pub(super) fn read(&self) -> Status {
        let control = self.control.read();
        let (process, times) = process::read().unzip();
        let mut status = Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ready: self.readiness.is_ready(),
            stale: control.cached_as_of_unix.is_some(),
            stale_as_of_unix: control.cached_as_of_unix,
            store: Store { refused: control.refused(), ..control.store.clone() },
            restart_needed: control.restart_needed,
            cache: control.cache.clone(),
            peers: control.peers,
            peers_held: control.held_peers,
            process,
            internal_errors: panics(),
            log_messages: log::messages().map(|(level, count)| (level.to_owned(), count)).collect(),
            ..Status::default()
        };
        match self.running.get() {
            None => {
                let step = control.start_step.unwrap_or("starting").to_owned();
                status.start = Some(Start { step, hindrance: control.start_hindrance });
            }
            Some(running) => {
                add_running(&mut status, running, &control, &self.looks);
                status.carrier_lost_lately = self.carrier_losses.lately();
                let mut flags = self.settings.iter().filter(|_| running.view.udp.is_some());
                let check = flags.find(|flag| flag.name == "peer-check");
                status.peer_check = check.map(|flag| flag.value.clone());
                for (worker, times) in status.workers.iter_mut().zip(times.unwrap_or_default()) {
                    [worker.ran_seconds, worker.waited_seconds] =
                        times.map(|time| Some(time.as_secs_f64()));
                }
            }
        }
        let faults = verdict::faults(&status, unix_seconds());
        status.verdict = Verdict {
            state: verdict::state(&status, &faults),
            since_unix: self.readiness.since_unix(),
            causes: faults.iter().map(|fault| fault.text.clone()).collect(),
            faults,
        };
        status
    }

    /// The same as Prometheus text.
    pub(super) fn metrics(&self) -> String {
        metrics::text(&self.read())
    }

    /// Answers on `/metrics` of an address of its own, for a Prometheus elsewhere, for ever;
    /// drop the future to stop. An address that can't be had is tried again: nobody's packets
    /// depend on it.
    pub(super) async fn serve_metrics(self: Arc<Self>, address: SocketAddr) -> Infallible {
        let listen = async || http::listen(address, "metrics", "--metrics-address").await;
        let listener = http::patiently(listen).await;
        info!("Metrics on http://{address}/metrics");
        let page =
            move |_: &_, path: &str| (path == "/metrics").then(|| http::metrics(self.metrics()));
        http::serve(async || Ok(listener.accept().await?.0), page).await
    }

    /// The first line of `weft status`, without its age.
    pub(super) fn headline(&self) -> String {
        let Verdict { state, faults, .. } = self.read().verdict;
        let fault = faults.first().map(|fault| format!(": {}", fault.text));
        state.name().to_owned() + &fault.unwrap_or_default()
    }

    /// The first worker that hangs, in words.
    pub(super) fn stalled(&self) -> Option<String> {
        let stalled = self.running.get()?.stalled();
        let mut hanging = stalled.iter().enumerate();
        hanging.find_map(|(index, age)| Some(verdict::stalled(index, age.as_ref()?.as_secs())))
    }
}

fn lease(running: &Running, plane: &PlaneState) -> Lease {
    let Running { networks, subnets, .. } = running;
    let v4 = plane.external.v4();
    let ipv6 = networks.v6().zip(subnets.v6()).map(|(network, subnet)| LeaseIpv6 {
        network,
        subnet,
        public_ip: public_ipv6(&running.kind.into(), &plane.external),
    });
    let (network, subnet) = networks.v4().zip(subnets.v4()).unzip();
    let public_ip = subnet.and(v4).map(|v4| v4.public_address);
    Lease { network, subnet, public_ip, mtu_bytes: plane.mtu_bytes, ipv6 }
}

fn add_running(status: &mut Status, running: &Running, control: &ControlState, looks: &DropLooks) {
    let plane = running.view.state.borrow().clone();
    status.lease = Some(lease(running, &plane));
    status.device_drops = device_drops(&plane);
    status.subnet_file = Some(running.subnet_file.borrow().clone());
    status.rules = running.rules.as_ref().map(|(flavour, state)| Rules {
        kept_by: flavour.name().to_owned(),
        kept: *state.borrow(),
    });
    status.guard = running.guard.as_ref().map(|state| state.borrow().clone());
    status.routes = peer_rows::of(running, control);
    for peer in &status.routes {
        *status.peer_states.entry(peer.state).or_default() += 1;
    }
    let mut backend = Backend { kind: Some(running.kind), done: None };
    match &running.view.udp {
        Some(udp) => {
            status.narrow_paths = running.view.reachability.borrow().path_mtus.len();
            let taken = peer_rows::traffic(udp.taken.total());
            status.fast_path = Some(FastPath { taken, ..udp.fast_path.borrow().clone() });
        }
        None => backend.done = Some(plane.done.clone()),
    }
    if !running.view.workers.is_empty() {
        status.handshakes = plane.handshakes;
        let total = add_workers(status, &plane, &running.view.workers);
        status.drops_lately = Some(looks.lately(&total.drops, Instant::now()));
        for (worker, stalled) in status.workers.iter_mut().zip(running.stalled()) {
            worker.stalled_seconds = stalled.map(|age| age.as_secs());
        }
    }
    status.backend = Some(backend);
    status.dataplane_is_up = Some(plane.is_up);
    status.dataplane_wrong = plane.wrong;
    status.tunnel = plane.tunnel;
    (status.device, status.ipv6_device) = (plane.device, plane.device_v6);
    status.interface = Some(plane.external.name);
    status.dataplane = Some(plane.description);
}

/// What the kernel dropped at the devices that the overlay's packets go through: at a full queue of
/// the TUN device, at a card that could not keep up, at a redirect of the fast path that failed.
fn device_drops(plane: &PlaneState) -> BTreeMap<String, DeviceDrops> {
    let pair = plane.device.iter().flat_map(|device| pair_names(device));
    let own = [&plane.device, &plane.device_v6].into_iter().flatten().cloned();
    let names: Vec<_> = own.chain(pair).collect();
    let wanted = |name: &String| *name == plane.external.name || names.contains(name);
    // Without procfs there is nothing to show.
    let devices = procfs::net::dev_status().unwrap_or_default().into_iter();
    let devices = devices.filter(|(name, _)| wanted(name));
    devices
        .map(|(name, it)| (name, DeviceDrops { egress: it.sent_drop, ingress: it.recv_drop }))
        .collect()
}

/// The workers' counters and their sums: a reader may add them up and compare. Returns the sum of
/// both directions.
fn add_workers(status: &mut Status, plane: &PlaneState, stats: &[Arc<WorkerStats>]) -> Direction {
    let (mut egress, mut ingress) = (Direction::default(), Direction::default());
    let mut counts = WorkerCounts::default();
    for (worker, stats) in plane.workers.iter().zip(stats) {
        let worker = Worker {
            egress: Direction::from(&stats.egress),
            ingress: Direction::from(&stats.ingress),
            counts: WorkerCounts::from(stats.as_ref()),
            ..worker.clone()
        };
        egress += &worker.egress;
        ingress += &worker.ingress;
        counts += worker.counts;
        status.workers.push(worker);
    }
    let mut both = egress.clone();
    both += &ingress;
    (status.egress, status.ingress, status.worker) = (Some(egress), Some(ingress), Some(counts));
    both
}

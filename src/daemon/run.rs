//! weftd from start to stop: flanneld's start order and log phrases, one owner for every task,
//! and an exit code that says how it ended.

use std::convert::Infallible;
use std::fmt::Display;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use crate::backend::BackendKind;
use crate::backend::udp::{PlaneState, UdpNetwork, UdpSetup};
use crate::config::network::{NetworkConfig, NetworkConfigError, UdpBackendConfig};
use crate::config::options::{ForwardRules, Options};
use crate::config::subnet_file::{Previous, SubnetFile};
use crate::control::acquire::AcquireError;
use crate::control::backoff::Backoff;
use crate::control::lease::{LeaseAttributes, Peers};
use crate::control::manager::{OwnLease, SubnetManager, Timing};
use crate::control::run::End;
use crate::daemon::health::{HealthServer, Readiness};
use crate::daemon::identity;
use crate::daemon::notify;
use crate::daemon::report::{Report, Running};
use crate::daemon::status::StatusServer;
use crate::daemon::subnet_writer::SubnetWriter;
use crate::host::interface::{ExternalInterface, discover};
use crate::host::lock::{DaemonLock, LockError};
use crate::host::netlink::Netlink;

/// flanneld's pause between two tries to read the network configuration.
const CONFIG_RETRY: Duration = Duration::from_secs(1);

/// Between two log lines that say the same about what keeps the start waiting.
const REPORT_PERIOD: Duration = Duration::from_secs(60);

/// flanneld's phrase, which operators grep for.
const BACKEND_PHRASE: &str = "Error fetching backend";

/// flanneld dies of a panic, code 2, when the health address is taken.
const EXIT_HEALTH: u8 = 2;

/// Runs the daemon until it is stopped or can't go on.
#[must_use]
pub fn run(options: Options) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            error!("cannot start the control plane: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(until_stopped(options));
    // Work on the blocking threads, such as a wait for the local store's lock or for a name
    // server, cannot be cancelled, and nobody needs its result any more.
    runtime.shutdown_background();
    code
}

async fn until_stopped(options: Options) -> ExitCode {
    info!("Installing signal handlers");
    let stop = match StopSignals::install() {
        Ok(stop) => stop,
        Err(error) => {
            error!("cannot install signal handlers: {error}");
            return ExitCode::FAILURE;
        }
    };
    let readiness = Readiness::default();
    let health = match options.health {
        None => None,
        Some(address) => match HealthServer::bind(address).await {
            Ok(server) => Some(server),
            Err(error) => {
                error!("{:#}", anyhow::Error::from(error));
                return ExitCode::from(EXIT_HEALTH);
            }
        },
    };
    let health = async {
        match health {
            Some(server) => server.serve(readiness.clone()).await,
            None => std::future::pending().await,
        }
    };
    let stopped = async {
        let signal = stop.received().await;
        info!("shutdownHandler sent cancel signal... ({signal})");
    };
    // The order of what ends is the order of its lines: what `serve` drops comes between the two.
    tokio::select! {
        end = serve(&options, &readiness) => match end {
            Ok(never) => match never {},
            Err(error) => {
                info!("Waiting for all goroutines to exit");
                error!("{error:#}");
                ExitCode::FAILURE
            }
        },
        never = health => match never {},
        () = stopped => {
            info!("Waiting for all goroutines to exit");
            info!("Exiting cleanly...");
            ExitCode::SUCCESS
        }
    }
}

/// Everything between the signal handlers and the end. Dropping it stops the packet worker,
/// removes the TUN device, and leaves lease and subnet file as they are.
async fn serve(options: &Options, readiness: &Readiness) -> anyhow::Result<Infallible> {
    let _lock = lock(options)?;
    let previous = read_previous(options);
    let timing = Timing { stale_hold: options.stale_hold, ..Timing::default() };
    let manager = SubnetManager::connect(&options.store, previous.subnet)
        .context("Failed to create SubnetManager")?
        .with_timing(timing);
    let manager = match identity::of_this_host() {
        Ok(identity) => manager.with_identity(identity),
        Err(error) => {
            warn!("a second node with the same PublicIP would not be noticed: {error}");
            manager
        }
    };
    info!("Created subnet manager: {}", manager.describe());
    let report = Arc::new(Report::new(manager.status(), readiness.clone()));
    let status = async {
        match StatusServer::bind(&options.status_socket) {
            Ok(server) => {
                let (status, metrics) = (Arc::clone(&report), Arc::clone(&report));
                server.serve(move || status.to_json(), move || metrics.to_metrics()).await
            }
            Err(error) => {
                warn!(
                    "no status socket, `weft status` won't work: {:#}",
                    anyhow::Error::from(error)
                );
                std::future::pending().await
            }
        }
    };
    tokio::select! {
        end = work(options, &manager, readiness, &report) => end,
        never = status => match never {},
    }
}

async fn work(
    options: &Options,
    manager: &SubnetManager,
    readiness: &Readiness,
    report: &Report,
) -> anyhow::Result<Infallible> {
    let plan = wait_for_plan(manager).await?;
    info!("Found network config - Backend type: {}", plan.network.backend.kind);
    let external = external_interface(options).await?;
    let attributes = LeaseAttributes::udp(external.public_address);
    let (plan, own) = acquire_until_leased(manager, plan, &attributes).await?;
    let setup = UdpSetup {
        external: external.clone(),
        interface: options.interface.clone(),
        follow_address: options.follow_address,
        settings: plan.settings,
        network: plan.network.network,
        subnet: own.lease.subnet,
        offload: options.offload,
        engine: options.engine,
        workers: options.workers,
    };
    let network = UdpNetwork::start(setup).await.context("Error registering network")?;
    warn_of_missing_rules(options.forward_rules, plan.network.enable_nftables);
    let subnet_file = SubnetFile {
        network: plan.network.network,
        subnet: own.lease.subnet,
        mtu_bytes: u32::from(network.mtu_bytes()),
        masquerade: false,
    };
    let writer = SubnetWriter::new(&options.subnet_file, subnet_file);
    writer.write_first();
    report.running(Running {
        external,
        network: plan.network.network,
        subnet: own.lease.subnet,
        dataplane: network.state(),
        stats: network.stats(),
        routes: network.routes(),
    });
    info!("Running backend.");
    notify::ready();
    let ready = tell_readiness(readiness, writer.state(), network.state());
    let plane = network.state();
    tokio::select! {
        // In this order, so that a start which is ready says so first.
        biased;
        never = ready => match never {},
        never = writer.keep(plane) => match never {},
        end = carry(manager, own, options.renew_margin, network) => bail!("{}", describe_end(end)),
    }
}

/// `/readyz` is green while the subnet file is written and the plane is up.
async fn tell_readiness(
    readiness: &Readiness,
    mut file_written: watch::Receiver<bool>,
    mut plane: watch::Receiver<PlaneState>,
) -> Infallible {
    let mut is_told = false;
    loop {
        let is_ready = *file_written.borrow_and_update() && plane.borrow_and_update().is_up;
        readiness.set(is_ready);
        if is_ready && !is_told {
            info!("flannel is ready");
            is_told = true;
        }
        let changed = tokio::select! {
            changed = file_written.changed() => changed,
            changed = plane.changed() => changed,
        };
        if changed.is_err() {
            // The backend was dropped, and so will be this.
            std::future::pending::<()>().await;
        }
    }
}

/// Renews the lease, follows the others, and carries packets, until the lease is lost.
async fn carry(
    manager: &SubnetManager,
    own: OwnLease,
    renew_margin: Duration,
    mut network: UdpNetwork,
) -> End {
    let _farewell = Farewell;
    let (sender, leases) = watch::channel(Arc::new(Peers::new()));
    let attributes = network.attributes();
    tokio::select! {
        end = manager.run_moving(own, renew_margin, &sender, attributes) => end,
        never = network.run(leases) => match never {},
    }
}

/// Says flanneld's last words about the lease, however its monitoring ends.
struct Farewell;

impl Drop for Farewell {
    fn drop(&mut self) {
        info!("Stopped monitoring lease");
    }
}

fn describe_end(end: End) -> String {
    match end {
        End::Revoked { new_owner: Some(owner) } => format!(
            "the subnet now belongs to the node at {owner}; two nodes must not share one. If that \
             node is a clone of this one, remove its copy of the subnet file"
        ),
        End::Revoked { new_owner: None } => {
            "the lease was deleted from the store; start again to acquire a new one".to_owned()
        }
        End::Duplicate => {
            "another node has this node's PublicIP; two nodes must not share a subnet".to_owned()
        }
    }
}

/// Another daemon with this subnet file is a mistake. A lock that can't be had for another reason,
/// such as a read-only directory, is as little a reason not to carry packets as a subnet file that
/// can't be written.
fn lock(options: &Options) -> anyhow::Result<Option<DaemonLock>> {
    match DaemonLock::acquire(&options.subnet_file) {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ LockError::Unusable { .. }) => {
            let error = anyhow::Error::from(error);
            warn!("a second daemon would not be noticed, going on without a lock: {error:#}");
            Ok(None)
        }
        Err(error @ (LockError::Held { .. } | LockError::NoFileName(_))) => Err(error.into()),
    }
}

fn read_previous(options: &Options) -> Previous {
    let previous = Previous::read(&options.subnet_file).unwrap_or_else(|error| {
        warn!(
            "cannot read the last subnet file, going on without: {:#}",
            anyhow::Error::from(error)
        );
        Previous::default()
    });
    for complaint in &previous.complaints {
        warn!("{}: {complaint}", options.subnet_file.display());
    }
    previous
}

/// The network configuration, its backend's part understood.
struct Plan {
    network: NetworkConfig,
    settings: UdpBackendConfig,
}

impl Plan {
    fn new(network: NetworkConfig) -> anyhow::Result<Self> {
        let kind = BackendKind::parse(&network.backend.kind).context(BACKEND_PHRASE)?;
        let settings = match kind {
            BackendKind::Udp => {
                UdpBackendConfig::parse(&network.backend.settings).context(BACKEND_PHRASE)?
            }
        };
        Ok(Self { network, settings })
    }
}

/// flanneld waits for the configuration for ever, so that it may be written after the nodes start.
/// A backend that can't be run is an error, as in flanneld.
async fn wait_for_plan(manager: &SubnetManager) -> anyhow::Result<Plan> {
    let mut told = Told::default();
    loop {
        match read_config(manager).await? {
            Ok(network) => return Plan::new(network),
            Err(error) => {
                told.once(format!("Couldn't fetch network config: {error:#}"), |text| {
                    error!("{text}");
                });
            }
        }
        sleep(CONFIG_RETRY).await;
    }
}

/// The inner error may go away when somebody writes the configuration; the outer one is final.
async fn read_config(manager: &SubnetManager) -> anyhow::Result<anyhow::Result<NetworkConfig>> {
    let bytes = match manager.network_config().await {
        Ok(bytes) => bytes,
        Err(error) => return Ok(Err(error.into())),
    };
    match NetworkConfig::parse(&bytes) {
        Err(error @ NetworkConfigError::NoBackendType) => {
            Err(anyhow::Error::from(error).context(BACKEND_PHRASE))
        }
        parsed => Ok(parsed.map_err(anyhow::Error::from)),
    }
}

/// Acquires a subnet, for as long as it takes. The remedy for a full network is to enlarge it, so
/// its configuration is read again before each further try.
async fn acquire_until_leased(
    manager: &SubnetManager,
    mut plan: Plan,
    attributes: &LeaseAttributes,
) -> anyhow::Result<(Plan, OwnLease)> {
    let mut backoff = Backoff::default();
    let (mut told, mut told_config) = (Told::default(), Told::default());
    loop {
        let error = match manager.acquire(&plan.network, attributes).await {
            Ok(own) => return Ok((plan, own)),
            Err(error) => error,
        };
        let is_exhausted = matches!(error, AcquireError::Exhausted { .. });
        let error = anyhow::Error::from(error);
        told.once(format!("No subnet yet, still trying: {error:#}"), |text| warn!("{text}"));
        sleep(backoff.next_wait()).await;
        if !is_exhausted {
            continue;
        }
        match read_config(manager).await? {
            Ok(network) if network == plan.network => {}
            Ok(network) => {
                info!("the network configuration has changed; trying with the new one");
                plan = Plan::new(network)?;
            }
            // The remedy may hold a slip of the pen.
            Err(error) => {
                let text = format!("Couldn't fetch network config: {error:#}");
                told_config.once(text, |text| error!("{text}; going on with the last one"));
            }
        }
    }
}

/// Says a thing when it is new, and again once a minute.
#[derive(Default)]
struct Told(Option<(String, Instant)>);

impl Told {
    fn once(&mut self, text: String, say: impl FnOnce(&str)) {
        let now = Instant::now();
        match &self.0 {
            Some((last, at)) if *last == text && now.duration_since(*at) < REPORT_PERIOD => {}
            Some(_) | None => {
                say(&text);
                self.0 = Some((text, now));
            }
        }
    }
}

async fn external_interface(options: &Options) -> anyhow::Result<ExternalInterface> {
    let netlink = Netlink::open().context("cannot talk to the kernel about its network")?;
    let external = discover(&netlink, &options.interface).await?;
    Ok(external)
}

fn warn_of_missing_rules(rules: ForwardRules, enable_nftables: bool) {
    if enable_nftables {
        warn!(
            "EnableNFTables in the network configuration has no effect: this weftd sets no rules, \
             neither with nftables nor with iptables"
        );
    }
    match rules {
        ForwardRules::Default => warn!(
            "no forward rules are set, because this weftd has none yet: if the FORWARD policy is \
             DROP, accept the overlay network there yourself; --iptables-forward-rules=false \
             silences this"
        ),
        ForwardRules::On | ForwardRules::Off => {}
    }
}

/// SIGINT and SIGTERM; either stops the daemon.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    fn install() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn received(mut self) -> impl Display {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

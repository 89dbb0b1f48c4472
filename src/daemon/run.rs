//! weftd from start to stop: flanneld's start order and log phrases, one owner for every task,
//! and an exit code that says how it ended.

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
use crate::backend::udp::{UdpNetwork, UdpSetup};
use crate::config::network::{NetworkConfig, UdpBackendConfig};
use crate::config::options::{ForwardRules, Options};
use crate::config::subnet_file::{Previous, SubnetFile};
use crate::control::lease::{LeaseAttributes, Peers};
use crate::control::manager::{OwnLease, SubnetManager};
use crate::control::run::End;
use crate::daemon::health::{HealthServer, Readiness};
use crate::daemon::notify;
use crate::daemon::report::{Report, Running};
use crate::daemon::status::StatusServer;
use crate::host::interface::{ExternalInterface, discover};
use crate::host::lock::DaemonLock;
use crate::host::netlink::Netlink;

/// flanneld's pause between two tries to read the network configuration.
const CONFIG_RETRY: Duration = Duration::from_secs(1);

/// Between two log lines that say the same about a missing network configuration.
const CONFIG_REPORT: Duration = Duration::from_secs(60);

/// Pause between two tries to write the subnet file; disks that were full get room in minutes.
const SUBNET_FILE_RETRY: Duration = Duration::from_secs(5);

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
    tokio::select! {
        end = serve(&options, &readiness) => match end {
            Ok(never) => match never {},
            Err(error) => {
                error!("{error:#}");
                ExitCode::FAILURE
            }
        },
        never = health => match never {},
        signal = stop.received() => {
            info!("shutdownHandler sent cancel signal... ({signal})");
            info!("Waiting for all goroutines to exit");
            info!("Exiting cleanly...");
            ExitCode::SUCCESS
        }
    }
}

/// Everything between the signal handlers and the end. Dropping it stops the packet worker,
/// removes the TUN device, and leaves lease and subnet file as they are.
async fn serve(
    options: &Options,
    readiness: &Readiness,
) -> anyhow::Result<std::convert::Infallible> {
    let _lock = DaemonLock::acquire(&options.subnet_file)?;
    let previous = read_previous(options);
    let manager = SubnetManager::connect(&options.store, previous.subnet)
        .context("Failed to create SubnetManager")?;
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
) -> anyhow::Result<std::convert::Infallible> {
    let config = wait_for_config(manager).await;
    info!("Found network config - Backend type: {}", config.backend.kind);
    let settings =
        match BackendKind::parse(&config.backend.kind).context("Error fetching backend")? {
            BackendKind::Udp => UdpBackendConfig::parse(&config.backend.settings)
                .context("Error fetching backend")?,
        };
    let external = external_interface(options).await?;
    let attributes = LeaseAttributes::udp(external.public_address);
    let own = manager.acquire_until_leased(&config, &attributes).await;
    let setup = UdpSetup {
        external: external.clone(),
        settings,
        network: config.network,
        subnet: own.lease.subnet,
        offload: options.offload,
        engine: options.engine,
    };
    let network = UdpNetwork::start(setup).await.context("Error registering network")?;
    warn_of_missing_rules(options.forward_rules);
    let subnet_file = SubnetFile {
        network: config.network,
        subnet: own.lease.subnet,
        mtu_bytes: u32::from(network.mtu_bytes()),
        masquerade: false,
    };
    let written = write_subnet_file(options, &subnet_file);
    report.running(Running {
        external,
        network: config.network,
        subnet: own.lease.subnet,
        mtu_bytes: network.mtu_bytes(),
        dataplane: network.state(),
        stats: network.stats(),
        routes: network.routes(),
    });
    info!("Running backend.");
    readiness.set(written);
    notify::ready();
    info!("flannel is ready");
    let retry = async {
        if !written {
            keep_writing(options, &subnet_file).await;
            readiness.set(true);
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        end = carry(manager, own, options.renew_margin, network) => bail!("{}", describe_end(end)),
        () = retry => unreachable!("a pending future never ends"),
    }
}

/// Renews the lease, follows the others, and carries packets, until the lease is lost.
async fn carry(
    manager: &SubnetManager,
    own: OwnLease,
    renew_margin: Duration,
    mut network: UdpNetwork,
) -> End {
    let (sender, leases) = watch::channel(Arc::new(Peers::new()));
    tokio::select! {
        end = manager.run(own, renew_margin, &sender) => end,
        never = network.run(leases) => match never {},
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

/// flanneld waits for the configuration for ever, so that it may be written after the nodes start.
async fn wait_for_config(manager: &SubnetManager) -> NetworkConfig {
    let mut told = Told::default();
    loop {
        let parsed = match manager.network_config().await {
            Ok(bytes) => NetworkConfig::parse(&bytes).map_err(anyhow::Error::from),
            Err(error) => Err(error.into()),
        };
        match parsed {
            Ok(config) => return config,
            Err(error) => told.once(format!("Couldn't fetch network config: {error:#}")),
        }
        sleep(CONFIG_RETRY).await;
    }
}

/// Says a thing when it is new, and again once a minute.
#[derive(Default)]
struct Told(Option<(String, Instant)>);

impl Told {
    fn once(&mut self, text: String) {
        let now = Instant::now();
        match &self.0 {
            Some((last, at)) if *last == text && now.duration_since(*at) < CONFIG_REPORT => {}
            Some(_) | None => {
                error!("{text}");
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

fn warn_of_missing_rules(rules: ForwardRules) {
    match rules {
        ForwardRules::Default => warn!(
            "no forward rules are set, because this weftd has none yet: if the FORWARD policy is \
             DROP, accept the overlay network there yourself; --iptables-forward-rules=false \
             silences this"
        ),
        ForwardRules::On | ForwardRules::Off => {}
    }
}

fn write_subnet_file(options: &Options, file: &SubnetFile) -> bool {
    let path = &options.subnet_file;
    match file.write(path) {
        Ok(()) => {
            info!("Wrote subnet file to {}", path.display());
            true
        }
        Err(error) => {
            let every = SUBNET_FILE_RETRY.as_secs();
            let error = anyhow::Error::from(error);
            warn!("Failed to write subnet file: {error:#}; trying again every {every} s");
            false
        }
    }
}

async fn keep_writing(options: &Options, file: &SubnetFile) {
    loop {
        sleep(SUBNET_FILE_RETRY).await;
        // The first failure was told; only the success is news.
        if file.write(&options.subnet_file).is_ok() {
            info!("Wrote subnet file to {}", options.subnet_file.display());
            return;
        }
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

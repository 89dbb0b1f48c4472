//! weftd from start to stop: flanneld's start order and log phrases, one owner for every task,
//! and an exit code that shows how it ended.

use std::cell::{OnceCell, RefCell};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::future::OptionFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};
use tracing::{error, info, warn};

use crate::backend::handover::Handover;
use crate::backend::running::Backend;
use crate::backend::status::PlaneState;
use crate::config::options::Options;
use crate::config::subnet_file::Previous;
use crate::control::changes::next_change;
use crate::control::lease::{LeaseAttributes, Peers};
use crate::control::manager::SubnetManager;
use crate::control::run::{End, Held};
use crate::control::timing::Timing;
use crate::daemon::begin::{Begun, Start, read_previous, unless_taken};
use crate::daemon::cache_writer::CacheWriter;
use crate::daemon::configured::{Former, MANAGER_PHRASE};
use crate::daemon::health::{self, Readiness};
use crate::daemon::port_guard::PortGuard;
use crate::daemon::report::Report;
use crate::daemon::running::Running;
use crate::daemon::status::PrivateSocket;
use crate::daemon::subnet_writer::SubnetWriter;
use crate::daemon::take_over::{self, Beginning, Predecessor, Successor};
use crate::daemon::{contain, descriptors, http, identity, limits, notify, rules};
use crate::host::lock::DaemonLock;
use crate::route::Prefixes;
use crate::status;

/// Before the control plane starts again after a panic, which may have a cause that lasts.
const PANIC_PAUSE: Duration = Duration::from_secs(1);
/// A run that ends so within this time of its start may have met the cause in what it went by.
const PANIC_AGAIN: Duration = Duration::from_secs(60);

/// flanneld panics, which is exit code 2, when the health address is taken.
const EXIT_HEALTH: u8 = 2;

/// Runs the daemon until it is stopped or can't go on.
pub(super) fn run(options: Options, timing: Timing, passed: Vec<OwnedFd>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // A thread that has looked up a name has the rights of the start, and waits for nothing.
        .thread_keep_alive(Duration::ZERO)
        .build()
        .context("cannot start the control plane");
    let code = runtime.and_then(|runtime| {
        let code = runtime.block_on(until_ended(&options, timing, passed));
        // A wait for a name server cannot be cancelled, and nobody needs its result any more.
        runtime.shutdown_background();
        code
    });
    code.unwrap_or_else(|error| {
        error!("{error:#}");
        ExitCode::FAILURE
    })
}

/// Starts with the tunnel that the service manager has `passed`, or that the running weftd hands
/// over if `--take-over` is given. If a successor asks for the tunnel and then fails, or after a
/// panic, the control plane starts again with the tunnel that it has; if a successor of a container
/// has gone on and ends, with a new one.
async fn until_ended(options: &Options, timing: Timing, passed: Vec<OwnedFd>) -> Result<ExitCode> {
    limits::raise_open_files()?;
    info!("Installing signal handlers");
    let mut stop = Box::pin(stop_signals().context("cannot install signal handlers")?);
    // The predecessor is dropped last: it takes that for the end of this process.
    let Beginning { mut predecessor, mut handover, lock } = tokio::select! {
        begun = take_over::begin(options, passed) => begun?,
        () = stop.as_mut() => return Ok(ExitCode::SUCCESS),
    };
    let lock = RefCell::new(lock);
    let is_in_container = take_over::is_in_container();
    let (mut manager, mut former) = (OnceCell::new(), RefCell::new(None));
    loop {
        let readiness = Readiness::default();
        let (successors, asked) = mpsc::channel(1);
        let (began, is_again) = (Instant::now(), former.borrow().is_some());
        let kept = Kept { handover: &handover, lock: &lock, manager: &manager, former: &former };
        let run = Run { options, timing, kept, readiness, successors };
        let running = until_stopped(&run, stop.as_mut(), &mut predecessor, asked);
        let outcome = contain::unless_it_panics(running).await;
        if predecessor.is_some() {
            // It waits to hear that this one carries packets, and goes on, with the lock as it is.
            if let Some(lock) = lock.take() {
                lock.leave();
            }
            return Ok(match outcome {
                Some(Outcome::Exit(code)) => code,
                Some(Outcome::HandOver(_)) | None => ExitCode::FAILURE,
            });
        }
        match outcome {
            Some(Outcome::Exit(code)) => return Ok(code),
            Some(Outcome::HandOver(mut successor)) => {
                match take_over::hand_over(&mut successor, &handover, &lock, stop.as_mut()).await {
                    Ok(is_taken) => {
                        // Another weftd is the node now, so what was known is of no use.
                        (handover, manager, former) = Default::default();
                        // Sees that everything is closed.
                        drop(successor);
                        if !(is_taken && is_in_container) {
                            return Ok(ExitCode::SUCCESS);
                        }
                        let standing = take_over::stand_by(&options.subnet_file, stop.as_mut());
                        let Some(own) = standing.await else { return Ok(ExitCode::SUCCESS) };
                        *lock.borrow_mut() = Some(own);
                        continue;
                    }
                    Err(error) => error!("the weftd that was to take over failed: {error:#}"),
                }
            }
            None => {
                if timeout(PANIC_PAUSE, stop.as_mut()).await.is_ok() {
                    return Ok(ExitCode::SUCCESS);
                }
                if is_again && began.elapsed() < PANIC_AGAIN {
                    former.replace(None);
                }
            }
        }
        info!("starting again, with the tunnel as it is");
        if let Some(lock) = &*lock.borrow() {
            unless_taken(lock.come_back(&options.subnet_file))?;
        }
        handover = handover.come_back();
    }
}

/// How a run of the control plane ends.
enum Outcome {
    /// The process exits with this code.
    Exit(ExitCode),
    /// A weftd with `--take-over` asks for the tunnel; the workers go on.
    HandOver(Successor),
}

/// What one run of the control plane leaves to the next one.
#[derive(Clone, Copy)]
struct Kept<'a> {
    handover: &'a Handover,
    /// Empty until it is taken, or if it can't be.
    lock: &'a RefCell<Option<DaemonLock>>,
    /// Empty until the first run has made it.
    manager: &'a OnceCell<SubnetManager>,
    /// Empty until a tunnel carries packets. From then on nothing that a start lacks ends weftd.
    former: &'a RefCell<Option<Former>>,
}

/// What one run of the control plane is started with.
struct Run<'a> {
    options: &'a Options,
    timing: Timing,
    kept: Kept<'a>,
    readiness: Readiness,
    /// Receives each weftd that asks for the tunnel.
    successors: mpsc::Sender<Successor>,
}

async fn until_stopped(
    run: &Run<'_>,
    stop: Pin<&mut impl Future<Output = ()>>,
    predecessor: &mut Option<Predecessor>,
    mut asked: mpsc::Receiver<Successor>,
) -> Outcome {
    let Kept { handover, manager, former, .. } = run.kept;
    let mut listener = None;
    // The pod that an update replaces, perhaps flanneld's, has it until this one is ready.
    let may_wait = run.options.take_over && take_over::is_in_container();
    let must = |_: &SocketAddr| former.borrow().is_none() && !may_wait;
    if let Some(address) = run.options.health.filter(must) {
        match health::listen(address).await {
            Ok(made) => listener = Some(made),
            Err(error) => {
                error!("{error:#}");
                return Outcome::Exit(ExitCode::from(EXIT_HEALTH));
            }
        }
    }
    let health = run.options.health.map(|it| health::serve(it, listener, run.readiness.clone()));
    let stopped = async {
        stop.await;
        // Whoever did not listen before is not told why.
        notify::send("STOPPING=1", &[]).ok();
    };
    let asked = async {
        let successor = asked.recv().await;
        let last = former.borrow().clone();
        OptionFuture::from(last.as_ref().map(Former::save_cache)).await;
        // Before the tunnel is dropped.
        handover.leave();
        successor
    };
    // The order of what ends is the order of its lines: what `serve` drops comes between the two.
    let outcome = tokio::select! {
        Err(error) = serve(run) => {
            info!("Waiting for all goroutines to exit");
            error!("{error:#}");
            Outcome::Exit(ExitCode::FAILURE)
        }
        Some(never) = OptionFuture::from(health) => match never {},
        never = descriptors::keep_stored(handover.offered()) => match never {},
        Err(error) = take_over::release(predecessor, handover, run.timing.take_over_max) => {
            error!("{error:#}");
            Outcome::Exit(ExitCode::FAILURE)
        }
        Some(successor) = asked => Outcome::HandOver(successor),
        () = stopped => {
            info!("Waiting for all goroutines to exit");
            info!("Exiting cleanly...");
            Outcome::Exit(ExitCode::SUCCESS)
        }
    };
    // By its claim the next weftd knows the subnet as its own, should it have another address.
    let is_kept = run.options.dataplane.keep_tunnel && matches!(outcome, Outcome::Exit(_));
    if let Some(manager) = manager.get().filter(|_| !is_kept) {
        manager.release_claim().await;
    }
    outcome
}

/// Everything between the signal handlers and the end. Dropping it stops the packet worker,
/// removes the TUN device unless that is kept, and leaves lease and subnet file as they are.
async fn serve(run: &Run<'_>) -> Result<Infallible> {
    let Run { options, kept: Kept { handover, lock, former, .. }, readiness, successors, .. } = run;
    if lock.borrow().is_none() && former.borrow().is_none() {
        *lock.borrow_mut() = unless_taken(DaemonLock::acquire(&options.subnet_file))?;
    }
    let previous = read_previous(options);
    let manager = manager(run, previous.subnets).await?;
    info!("Created subnet manager: {}", manager.describe());
    let report = Arc::new(Report::new(manager, readiness.clone(), options.settings.clone()));
    let pages = Arc::clone(&report);
    let status = async {
        let what_lacks = "no status socket, `weft status` won't work";
        let listen = async || PrivateSocket::bind(&options.status_socket).context(what_lacks);
        http::patiently(listen).await.serve(move |path| pages.page(path)).await
    };
    let beside = take_over::socket_beside(&options.status_socket);
    let asked = async {
        let what_lacks = "no weftd can take over with --take-over";
        let listen = async || PrivateSocket::bind(&beside).context(what_lacks);
        take_over::answer(http::patiently(listen).await, handover, successors.clone()).await
    };
    let scraped = options.metrics_address.map(|address| Arc::clone(&report).serve_metrics(address));
    tokio::select! {
        end = work(run, manager, &previous, &report) => end,
        Some(never) = OptionFuture::from(scraped) => match never {},
        never = report.keep_looking() => match never {},
        never = notify::keep_status(|| report.headline()) => match never {},
        never = notify::keep_watchdog(|| report.stalled()) => match never {},
        never = status => match never {},
        never = asked => match never {},
    }
}

/// The access to the store, which is made once: a store that is away meanwhile ends no run.
async fn manager<'a>(run: &Run<'a>, previous: Option<Prefixes>) -> Result<&'a SubnetManager> {
    if let Some(manager) = run.kept.manager.get() {
        return Ok(manager);
    }
    let manager = SubnetManager::connect(&run.options.store, previous)
        .await
        .context(MANAGER_PHRASE)?
        .with_timing(run.timing);
    let manager = match identity::of_this_host() {
        Ok(identity) => manager.with_identity(identity),
        Err(error) => {
            warn!("a second node with the same PublicIP would not be noticed: {error}");
            manager
        }
    };
    Ok(run.kept.manager.get_or_init(|| manager))
}

async fn work(
    run: &Run<'_>,
    manager: &SubnetManager,
    previous: &Previous,
    report: &Report,
) -> Result<Infallible> {
    let Run { options, kept: Kept { handover, former, .. }, .. } = run;
    let before = former.borrow().clone();
    let start = Start { options, manager, previous, handover }.start(before.as_ref());
    let (Begun { plan, interface, held, guard, .. }, backend) = start.await?;
    let view = backend.view();
    let (plane, attributes) = (view.state.clone(), view.attributes.clone());
    let reconciler = rules::reconciler(options, &plan.network, held.subnets(), previous);
    let (rule_state, kept_rules) = (reconciler.state(), reconciler.kept());
    let refused = reconciler.refused();
    let trigger = rules::trigger(before.is_some()).await;
    let mut keep_rules = std::pin::pin!(reconciler.run(trigger));
    manager.status().start_is_at(Some("setting the rules"));
    rules::settled(keep_rules.as_mut(), rule_state.clone(), refused).await?;
    let port_guard = PortGuard::new(options.rules, &plan, previous);
    if before.is_none() {
        port_guard.check().await?;
    }
    backend.carries(handover);
    let writer = SubnetWriter::new(options, &plan.network, &held, plane.borrow().mtu_bytes);
    let (peers, leases) = watch::channel(Arc::new(Peers::new()));
    let cache = CacheWriter::of(options, &plan.network, manager.status());
    former.replace(Some(Former {
        plan: plan.clone(),
        interface,
        began_with: held.clone(),
        known: manager.known(),
        plane: plane.clone(),
        cache: cache.clone(),
    }));
    report.running(Running {
        networks: plan.network.networks(),
        subnets: held.subnets(),
        kind: plan.settings.kind(),
        view,
        subnet_file: writer.state(),
        leases: leases.clone(),
        rules: kept_rules,
        guard: port_guard.state(),
    });
    manager.status().start_is_at(None);
    info!("Running backend.");
    notify::ready();
    let limits = limits::keep(plan.settings.kind(), options, rule_state.clone(), writer.state());
    let ready = keep_readiness(run, manager, writer.state(), plane.clone(), rule_state);
    manager.go_by(&plan.network);
    let keep_cache = cache.clone().map(|cache| cache.keep(manager.known()));
    tokio::select! {
        // In this order, so that a start which is ready says so first.
        biased;
        never = limits => match never {},
        never = ready => match never {},
        error = keep_rules => Err(rules::fatal(error)),
        never = rules::keep_blackholes(options.rules, held.subnets(), previous) => match never {},
        never = port_guard.keep(leases, plane.clone()) => match never {},
        never = writer.keep(plane) => match never {},
        Some(never) = OptionFuture::from(keep_cache) => match never {},
        never = guard.keep(attributes.clone()) => match never {},
        never = manager.watch_alarms() => match never {},
        end = carry(manager, held, backend, attributes, peers) => {
            cache.iter().for_each(|cache| cache.forget());
            bail!("{}", describe_end(end))
        }
    }
}

/// `/readyz` is green while the subnet file is written and the plane is up, and rules were set; and
/// not before the weftd that has handed over is needed no more.
async fn keep_readiness(
    run: &Run<'_>,
    manager: &SubnetManager,
    mut subnet_file: watch::Receiver<status::SubnetFile>,
    mut plane: watch::Receiver<PlaneState>,
    mut rules: watch::Receiver<status::Kept>,
) -> Infallible {
    // If the start fails, the sender is dropped, and this future with it.
    rules.wait_for(|rules| rules.settled).await.ok();
    if run.kept.handover.has_predecessor() {
        run.kept.handover.outcome().await.ok();
    }
    let mut was_ready = false;
    loop {
        let is_ready = subnet_file.borrow_and_update().written && plane.borrow_and_update().is_up;
        run.readiness.set(is_ready);
        if is_ready && !was_ready {
            info!("flannel is ready");
            manager.network_is_up();
            was_ready = true;
        }
        tokio::select! {
            () = next_change(&mut subnet_file) => {}
            () = next_change(&mut plane) => {}
        }
    }
}

/// Renews the lease, follows the others, and carries packets, until the lease is lost.
async fn carry(
    manager: &SubnetManager,
    held: Held,
    mut backend: Backend,
    attributes: watch::Receiver<LeaseAttributes>,
    peers: watch::Sender<Arc<Peers>>,
) -> End {
    let _end = LogEnd;
    let leases = peers.subscribe();
    let end = tokio::select! {
        end = manager.run(held, &peers, attributes) => end,
        never = backend.run(leases) => match never {},
    };
    backend.let_go();
    end
}

/// Logs flanneld's phrase when the monitoring of the lease ends, however it ends.
struct LogEnd;

impl Drop for LogEnd {
    fn drop(&mut self) {
        info!("Stopped monitoring lease");
    }
}

fn describe_end(end: End) -> String {
    match end.new_owner {
        Some(owner) => format!(
            "the subnet now belongs to the node at {owner}; two nodes must not share one. If that \
             node is a clone of this one, remove its copy of the subnet file"
        ),
        None => "the lease is gone from the store; start again to acquire a new one".to_owned(),
    }
}

/// Waits for SIGINT or SIGTERM, and logs it. The handlers are in place when this returns.
fn stop_signals() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        let signal = tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        };
        info!("shutdownHandler sent cancel signal... ({signal})");
    })
}

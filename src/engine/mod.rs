//! Worker threads that move packets between the TUN device and the UDP socket.
//!
//! A worker owns its devices for as long as it runs and shares nothing with the rest of the
//! daemon but the published route table, the counters, and a stop signal. Engines differ in how
//! they wait and do I/O; what happens to a packet is in `forward`, the same for all.

mod cycle;
mod idle;
mod io;
mod mmsg;
mod outcome;
mod receive;
mod refusal;
mod ring;
mod transmit;
mod wake;

use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::device::{Tun, TunnelSocket};
use crate::forward::Local;
use crate::route::Published;
use crate::stats::WorkerStats;

use self::mmsg::Mmsg;
use self::ring::RingIo;

pub use crate::sys::ring::RingError;
pub use wake::Stop;

/// Everything a worker needs, ready to run.
pub struct WorkerConfig {
    /// The TUN queue that it alone reads.
    pub tun: Tun,
    /// The tunnel socket.
    pub socket: Arc<TunnelSocket>,
    /// This host.
    pub local: Local,
    /// Where the control plane publishes routes.
    pub routes: Published,
    /// Where it counts.
    pub stats: Arc<WorkerStats>,
    /// Datagrams that one UDP super-packet to the TUN device may hold.
    pub udp_segments_max: u16,
    /// How it is to do its I/O.
    pub engine: EngineWanted,
}

/// Ways of doing I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// One system call for each TUN packet, batches of datagrams.
    Mmsg,
    /// Batches of both through an io_uring.
    IoUring,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mmsg => "mmsg",
            Self::IoUring => "io_uring",
        })
    }
}

/// Which engine a worker is to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineWanted {
    /// This one, or none.
    Only(Engine),
    /// io_uring where it can be had, else mmsg.
    Best,
}

/// What a worker runs.
#[derive(Debug)]
pub struct Running {
    /// The engine.
    pub engine: Engine,
    /// Why it isn't io_uring, if that was wanted as the best.
    pub fallback: Option<RingError>,
}

/// A worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No thread or no stop signal.
    #[error("cannot start a thread")]
    Thread(#[from] std::io::Error),
    /// io_uring was asked for and can't be had.
    #[error("cannot use io_uring")]
    Ring(#[from] RingError),
}

/// Why a worker ended.
#[derive(Debug)]
pub enum WorkerEnd {
    /// It was told to.
    Stopped,
    /// The TUN device is gone; a new one and a new worker are needed.
    TunGone(std::io::Error),
    /// Waiting for work or receiving failed, which leaves nothing to go on with.
    WaitFailed(std::io::Error),
}

/// A running worker. Dropping it stops the thread and waits for it.
pub struct Worker {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    running: Running,
}

impl Worker {
    /// Starts the worker's thread and waits until it has its engine. `on_end` is called on that
    /// thread when it ends, after its devices are closed. A panic skips it; the device then
    /// vanishes with the thread, which the owner notices as it notices any other loss of the
    /// device.
    pub fn spawn(
        config: WorkerConfig,
        on_end: impl FnOnce(WorkerEnd) + Send + 'static,
    ) -> Result<Self, SpawnError> {
        let stop = Stop::new()?;
        let seen = stop.clone();
        let (report, reported) = mpsc::sync_channel(1);
        let thread =
            std::thread::Builder::new().name("weft-worker-0".to_owned()).spawn(move || {
                if let Some(end) = run(config, &seen, &report) {
                    on_end(end);
                }
            })?;
        // A thread that ends without a word has panicked.
        let running = reported.recv().map_err(std::io::Error::other)??;
        Ok(Self { stop, thread: Some(thread), running })
    }

    /// What it runs.
    #[must_use]
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// Tells the thread to end and waits until it has. Does nothing the second time.
    pub fn end(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported by the hook; there is nobody else to tell.
            thread.join().ok();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// The life of a worker's thread; `None` if it could not begin, which `report` has been told.
fn run(
    config: WorkerConfig,
    stop: &Stop,
    report: &mpsc::SyncSender<Result<Running, RingError>>,
) -> Option<WorkerEnd> {
    let ring = match config.engine {
        EngineWanted::Only(Engine::Mmsg) => None,
        EngineWanted::Only(Engine::IoUring) | EngineWanted::Best => {
            Some(RingIo::open(&config, stop))
        }
    };
    // The owner waits for this, so it is there to be told.
    let tell = |running| report.send(running).unwrap_or_default();
    let fallback = match ring {
        Some(Ok(ring)) => {
            tell(Ok(Running { engine: Engine::IoUring, fallback: None }));
            return Some(cycle::run(ring, ring::READ_BYTES, &config, stop));
        }
        Some(Err(error)) if config.engine != EngineWanted::Best => {
            tell(Err(error));
            return None;
        }
        Some(Err(error)) => Some(error),
        None => None,
    };
    tell(Ok(Running { engine: Engine::Mmsg, fallback }));
    Some(cycle::run(Mmsg::new(&config, stop), mmsg::READ_BYTES, &config, stop))
}

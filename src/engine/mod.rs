//! Worker threads that move packets between the TUN device and the UDP socket.
//!
//! A worker owns its devices for as long as it runs and shares nothing with the rest of the
//! daemon but the published route table, the counters, and a stop signal. Engines differ in how
//! they wait and do I/O; what happens to a packet is in `forward`, the same for all.

mod mmsg;
mod outcome;
mod refusal;
mod wake;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::device::{Tun, TunnelSocket};
use crate::forward::Local;
use crate::route::Published;
use crate::stats::WorkerStats;

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
}

/// Why a worker ended.
#[derive(Debug)]
pub enum WorkerEnd {
    /// It was told to.
    Stopped,
    /// The TUN device is gone; a new one and a new worker are needed.
    TunGone(io::Error),
    /// Waiting for work or receiving failed, which leaves nothing to go on with.
    WaitFailed(io::Error),
}

/// A running worker. Dropping it stops the thread and waits for it.
pub struct Worker {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the worker's thread. `on_end` is called on that thread when it ends, after its
    /// devices are closed. A panic skips it; the device then vanishes with the thread, which the
    /// owner notices as it notices any other loss of the device.
    pub fn spawn(
        config: WorkerConfig,
        on_end: impl FnOnce(WorkerEnd) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Stop::new()?;
        let seen = stop.clone();
        let thread = std::thread::Builder::new()
            .name("weft-worker-0".to_owned())
            .spawn(move || on_end(mmsg::run(config, &seen)))?;
        Ok(Self { stop, thread: Some(thread) })
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

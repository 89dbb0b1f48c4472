//! The queues of a TUN device: as many as its workers have lanes, and which packets go where; and
//! how long a predecessor may have them.

use std::io;
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tracing::{info, warn};

use crate::config::options::OffloadChoice;
use crate::device::{LANES, Steering, Tun, TunError, TunOffload};

/// Workers that have lanes: more of them part the pods by themselves, and so many queues can be
/// marked (`device::tun`).
const WORKERS_WITH_LANES_MAX: NonZeroU16 = NonZeroU16::new(16).expect("not zero");

/// How long obstacles at start may be a killed predecessor's.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(1);

/// Pause between two attempts meanwhile.
const LEFTOVER_RETRY: Duration = Duration::from_millis(20);

/// Tries for as long as a killed predecessor may be in the way: its io_uring holds its device and
/// its socket until the kernel has torn the ring down, some time after the process is gone.
pub(super) async fn patiently<T, E>(
    once: impl AsyncFn() -> Result<T, E>,
    is_perhaps_leftover: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let give_up = Instant::now() + LEFTOVER_PATIENCE;
    loop {
        match once().await {
            Err(error) if is_perhaps_leftover(&error) && Instant::now() < give_up => {
                sleep(LEFTOVER_RETRY).await;
            }
            made => return made,
        }
    }
}

/// Opens the queues of the device: for each worker [`LANES`], or one, if the kernel can't be told
/// which packets go where.
pub(super) fn open_queues(
    name: &str,
    offload: OffloadChoice,
    count: NonZeroU16,
) -> Result<Vec<Tun>, TunError> {
    let wanted = TunOffload { tso: offload.tso, uso: offload.uso };
    let lanes = count.checked_mul(LANES).filter(|_| count <= WORKERS_WITH_LANES_MAX);
    let (queues, program) = match (lanes, Steering::by_sender()) {
        (Some(lanes), Ok(program)) => (Tun::open(name, wanted, lanes)?, Ok(program)),
        (_, program) => {
            if let Err(error) = program {
                info!("one pod's flood delays all others, who share one lane: {error}");
            }
            (Tun::open(name, wanted, count)?, Steering::by_flow())
        }
    };
    steer(&queues, program);
    Ok(queues)
}

/// Has the kernel choose queues by the program, if there are several.
pub(super) fn steer(queues: &[Tun], program: io::Result<Steering>) {
    if queues.len() > 1
        && let Err(error) = program.and_then(|program| queues[0].steer(&program))
    {
        warn!(
            "flows cannot be pinned to workers, packets may be reordered: {error}; if a right is \
             lacking, grant CAP_BPF; else use --workers=1"
        );
    }
}

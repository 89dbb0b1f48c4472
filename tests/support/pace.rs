//! Time as a promise means it. A figure such as "within a second" is about a machine of usual speed
//! that has nothing else to do. Where others want the processors or the disk, the kernel tells for
//! how long somebody had to wait for them (`/proc/pressure`), and where another virtual machine had
//! the processor, for how long (`/proc/stat`): that time does not count. Nor do two thirds of the
//! rest, except with `scripts/test --all`: other machines are a third as fast.

use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};

use procfs::{CurrentSI, KernelStats};
use tokio::time::timeout;

/// However busy the machine is, one part in so many of the time counts.
const COUNTED_PART_MIN: u32 = 8;
/// How much slower a machine may be.
const SLOWER: u32 = 3;

/// Measures a time, less what the machine spent on others meanwhile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch {
    started: Instant,
    stalled: Option<Duration>,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), stalled: stalled() }
    }

    /// What counts of the time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        let all = self.started.elapsed();
        // A machine whose kernel does not tell may have been as busy as any.
        let stalled = stalled().zip(self.stalled).map_or(all, |(now, then)| now - then);
        let counted = all.saturating_sub(stalled).max(all / COUNTED_PART_MIN);
        counted / by_effort(SLOWER, 1)
    }

    /// What counts of `part` of it, if the machine was as busy then as all the time.
    pub(crate) fn of(&self, part: Duration) -> Duration {
        part.mul_f64(self.elapsed().as_secs_f64() / self.started.elapsed().as_secs_f64())
    }

    /// Whether more than `limit` of it counts.
    pub(crate) fn is_over(&self, limit: Duration) -> bool {
        self.started.elapsed() >= limit && self.elapsed() >= limit
    }
}

/// How long a repair that is promised within `promise` may take: beside other tests twice as long.
/// They make and delete namespaces and devices, the kernel makes one such change at a time (its
/// rtnl lock), and it tells nobody for how long the repair had to wait for them.
pub(crate) fn repair_limit(promise: Duration) -> Duration {
    by_effort(2 * promise, promise)
}

/// What `work` gives, unless it takes longer than `limit` by a [`Stopwatch`].
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let (watch, mut work) = (Stopwatch::start(), pin!(work));
    loop {
        match timeout(limit / 4, &mut work).await {
            Ok(outcome) => return Some(outcome),
            Err(_) if watch.is_over(limit) => return None,
            Err(_) => {}
        }
    }
}

/// For how long since the machine's start some task waited for a processor or the disk, or the
/// machine itself for a processor.
fn stalled() -> Option<Duration> {
    let waited: Option<Duration> = ["cpu", "io"].into_iter().map(stalled_for).sum();
    Some(waited? + stolen()?)
}

/// For how long since its start some processor of this machine was another machine's.
fn stolen() -> Option<Duration> {
    KernelStats::current().ok()?.total.steal_duration()
}

fn stalled_for(resource: &str) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?;
    let total = text.lines().find(|line| line.starts_with("some"))?.rsplit_once("total=")?.1;
    Some(Duration::from_micros(total.parse().ok()?))
}

/// Whether `scripts/test --all` runs the tests: as long, as often and as fast as the promise says.
/// Otherwise they do enough of it to show the same, side by side with others.
pub(crate) fn is_thorough() -> bool {
    std::env::var_os("WEFT_TEST_ALL").is_some()
}

/// The first, or the second with `scripts/test --all`.
pub(crate) fn by_effort<T>(usual: T, thorough: T) -> T {
    if is_thorough() { thorough } else { usual }
}

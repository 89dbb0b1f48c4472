//! What a running weftd says of itself, read from its status socket as the `weft` tool does.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize as _;
use serde_json::Value;
use weft::daemon::status::fetch_unix;
use weft::status::Cause;

use super::lab::{LEASE_TIMEOUT, wait_until};

/// One reading of a daemon's counters.
#[derive(Debug, Clone)]
pub(crate) struct Status(pub(crate) Value);

/// What a metric of the daemon in `dir` says, by its name with labels.
pub(crate) fn metric(dir: &Path, name: &str) -> Option<f64> {
    let text = fetch_unix(&dir.join("weft.sock"), "/metrics").ok()?;
    let text = String::from_utf8(text).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Whether the daemon in `dir` is ready.
pub(crate) fn is_ready(dir: &Path) -> bool {
    Status::try_of(dir).is_some_and(|status| status.0["ready"] == true)
}

impl Status {
    /// Asks the daemon whose socket is in `dir`, which may have just been started.
    ///
    /// # Panics
    /// When it does not answer within [`LEASE_TIMEOUT`].
    #[track_caller]
    pub(crate) fn of(dir: &Path) -> Self {
        let mut said = None;
        wait_until(LEASE_TIMEOUT, "weftd tells its status", || {
            said = Self::try_of(dir);
            said.is_some()
        });
        said.expect("it was told")
    }

    /// Asks the daemon whose socket is in `dir`; `None` if it does not answer.
    pub(crate) fn try_of(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fetch_unix(&dir.join("weft.sock"), "/status").ok()?).ok().map(Self)
    }

    /// A counter of `egress` or `ingress`, such as `packets_received`.
    pub(crate) fn count(&self, direction: &str, counter: &str) -> u64 {
        self.0[direction][counter]
            .as_u64()
            .unwrap_or_else(|| panic!("the status has no {direction} {counter}: {}", self.0))
    }

    /// Packets dropped for `reason`; a reason that never occurred is not listed.
    pub(crate) fn drops(&self, direction: &str, reason: &str) -> u64 {
        self.0[direction]["drops"][reason].as_u64().unwrap_or(0)
    }

    /// Packets dropped for any reason.
    pub(crate) fn drops_total(&self, direction: &str) -> u64 {
        let drops = self.0[direction]["drops"].as_object();
        drops.map_or(0, |drops| drops.values().filter_map(Value::as_u64).sum())
    }

    /// Packets that could not be sent to the peer at `address`, of all that are listed.
    pub(crate) fn failed_sends(&self, address: std::net::Ipv4Addr) -> u64 {
        let address = format!("{address}:8285");
        let routes = self.0["routes"].as_array().expect("the status lists routes");
        let to_it = routes.iter().filter(|route| route["via"] == address.as_str());
        to_it.map(|route| route["failed_sends"].as_u64().expect("a count")).sum()
    }

    /// Peers that packets go to.
    pub(crate) fn routes(&self) -> usize {
        let routes = self.0["routes"].as_array().into_iter().flatten();
        let is_used = |state: &Value| state != "other-backend" && state != "not-set-up";
        routes.filter(|route| is_used(&route["state"])).count()
    }

    /// What is wrong, the worst first, by the words for scripts.
    pub(crate) fn causes(&self) -> Vec<Cause> {
        let status = weft::status::Status::deserialize(&self.0).expect("the tool reads it too");
        status.verdict.faults.iter().map(|fault| fault.cause).collect()
    }

    /// How often the start has met what hinders it; nothing while nothing does.
    pub(crate) fn start_tries(&self) -> Option<u64> {
        self.0["start"]["hindrance"]["tries"].as_u64()
    }

    /// Waits until in both directions packets received = forwarded + dropped, for each worker as
    /// for all together, and gives the status of then. A packet is counted when it is taken in,
    /// and again when it has been handed on; in between it is neither, but not for long.
    ///
    /// # Panics
    /// When the sums stay different: packets are lost without a reason, or counted twice.
    #[track_caller]
    pub(crate) fn settled(dir: &Path) -> Self {
        let mut status = Self::of(dir);
        wait_until(Duration::from_secs(5), "packets received = forwarded + dropped", || {
            status = Self::of(dir);
            let workers = status.0["workers"].as_array().into_iter().flatten();
            let mut each = std::iter::once(&status.0).chain(workers);
            each.all(|counted| {
                ["egress", "ingress"].map(|way| is_conserved(&counted[way])) == [true; 2]
            })
        });
        status
    }
}

/// Whether of one direction, packets received = forwarded + dropped.
fn is_conserved(direction: &Value) -> bool {
    let count = |name: &str| direction[name].as_u64();
    let drops = direction["drops"].as_object();
    let dropped: u64 = drops.map_or(0, |drops| drops.values().filter_map(Value::as_u64).sum());
    let forwarded = count("packets_forwarded").expect("the status counts packets");
    count("packets_received") == Some(forwarded + dropped)
}

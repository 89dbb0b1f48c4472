//! What a running weftd says of itself, read from its status socket as the `weft` tool does.

use std::path::Path;

use serde_json::Value;

use weft::daemon::status::fetch_unix;

/// One reading of a daemon's counters.
#[derive(Debug, Clone)]
pub(crate) struct Status(pub(crate) Value);

impl Status {
    /// Asks the daemon whose socket is in `dir`.
    ///
    /// # Panics
    /// When it does not answer.
    #[track_caller]
    pub(crate) fn of(dir: &Path) -> Self {
        let bytes = fetch_unix(&dir.join("weft.sock"), "/status")
            .unwrap_or_else(|error| panic!("weftd does not tell its status: {error}"));
        Self(serde_json::from_slice(&bytes).expect("the status is JSON"))
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

    /// Peers in the published route table.
    pub(crate) fn routes(&self) -> usize {
        self.0["routes"].as_array().map_or(0, Vec::len)
    }

    /// Fails unless in both directions packets received = forwarded + dropped.
    #[track_caller]
    pub(crate) fn assert_conserved(&self) {
        for direction in ["egress", "ingress"] {
            let received = self.count(direction, "packets_received");
            let forwarded = self.count(direction, "packets_forwarded");
            let dropped = self.drops_total(direction);
            assert_eq!(
                received,
                forwarded + dropped,
                "{direction} packets are lost without a reason, or counted twice: {}",
                self.0[direction]
            );
        }
    }
}

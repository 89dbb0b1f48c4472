//! The other answers of the status socket.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::peer::Peer;
use crate::words::words;

/// The answer to `/peers`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peers {
    /// As in the status.
    pub schema: u32,
    /// Each lease of another node, in the order of the subnets.
    pub peers: Vec<Peer>,
}

/// The answer to `/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// As in the status.
    pub schema: u32,
    /// Every flag.
    pub settings: Vec<Setting>,
}

/// A flag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Setting {
    /// Its name without dashes.
    pub name: String,
    /// Its value; a secret is `***`.
    pub value: String,
    /// `--name`, the variable that stands for it, or nothing: then it is the default.
    pub given_by: Option<String>,
}

words! {
    /// Which way a packet goes.
    Way {
        /// From a pod to the network.
        Egress = "egress",
        /// From the network to a pod.
        Ingress = "ingress",
    }
}

/// The answer to `/drops/SEEN`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drops {
    /// As in the status.
    pub schema: u32,
    /// Why there are no samples.
    pub error: Option<String>,
    /// What to ask with the next time, as SEEN, for what comes after these.
    pub next: String,
    /// All packets that workers have dropped so far.
    pub dropped: u64,
    /// Some of them, by their time.
    pub samples: Vec<Sample>,
}

/// A dropped packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When, since 1970.
    pub at_unix_nanoseconds: u64,
    /// Which way it went.
    pub direction: Way,
    /// The number of the worker that dropped it.
    pub worker: usize,
    /// The id of the reason: docs/drop-reasons.md.
    pub reason: String,
    /// How many packets it stands for.
    pub packets: u64,
    /// Whom it came from or was to go to.
    pub peer: Option<SocketAddr>,
    /// Its length, of which there may be less in `bytes`.
    pub length_bytes: u32,
    /// The packet's beginning, as hexadecimal digits.
    pub bytes: String,
}

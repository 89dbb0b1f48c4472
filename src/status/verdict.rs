//! The sum of a status: whether pods can use the network, and what is wrong.

use serde::{Deserialize, Serialize};

use crate::words::words;

words! {
    /// Whether pods can use the network.
    #[derive(Default)]
    State {
        /// They can.
        Ready = "ready",
        /// They can, but something needs a person.
        Degraded = "degraded",
        /// They can't, or not all.
        #[default]
        #[serde(other)]
        NotReady = "not-ready",
    }
}

words! {
    /// What is wrong, for scripts: a word never changes its meaning.
    Cause {
        /// weftd is starting, and says at which step it is.
        Starting = "starting",
        /// It is starting and does not get on.
        StartHindered = "start-hindered",
        /// The dataplane can't carry packets now.
        DataplaneDown = "dataplane-down",
        /// It carries packets, and something is wrong with it.
        DataplaneHindered = "dataplane-hindered",
        /// The subnet file can't be written.
        SubnetFile = "subnet-file",
        /// The firewall's rules were never set.
        RulesNotSet = "rules-not-set",
        /// They are not in place any more.
        RulesNotInPlace = "rules-not-in-place",
        /// The guard of the tunnel's port can't be kept.
        GuardNotKept = "guard-not-kept",
        /// A worker hangs, or gets no processor.
        WorkerStalled = "worker-stalled",
        /// Another node has this one's PublicIP.
        DuplicatePublicIp = "duplicate-public-ip",
        /// The store does not answer.
        StoreAway = "store-away",
        /// The store answers and refuses something.
        StoreRefuses = "store-refuses",
        /// The cluster assigned another subnet to this node.
        SubnetRefused = "subnet-refused",
        /// Lease and peers are from the cache.
        Cached = "cached",
        /// The store has another network configuration.
        RestartNeeded = "restart-needed",
        /// Most leases vanished from the store at once.
        LeasesVanished = "leases-vanished",
        /// An entry of the store is no usable lease.
        EntryUnused = "entry-unused",
        /// A peer is sent packets and says nothing.
        PeerSilent = "peer-silent",
        /// Of a peer one way works, and the other doesn't.
        PeerOneWay = "peer-one-way",
        /// A peer's host, or a firewall, refuses what is sent to it.
        PeerRefused = "peer-refused",
        /// This host can't send to a peer.
        PeerUnsendable = "peer-unsendable",
        /// Much of what is sent to a peer is lost.
        PeerLossy = "peer-lossy",
        /// The kernel or a command refused a peer, or its lease lacks what the backend needs.
        PeerNotSetUp = "peer-not-set-up",
        /// The lease of a peer is of another backend, so no packets go there.
        PeerOtherBackend = "peer-other-backend",
        /// The external interface loses its carrier again and again.
        LinkFlaps = "link-flaps",
        /// One that a later release knows.
        #[serde(other)]
        Unknown = "unknown",
    }
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// For scripts.
    pub cause: Cause,
    /// For people: what, since when or how much, why, and what to do.
    pub text: String,
}

/// The sum of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verdict {
    /// Whether pods can use the network.
    pub state: State,
    /// Since when the node has been ready, or not, in seconds since 1970.
    pub since_unix: u64,
    /// What is wrong, the worst first: causes of not being ready, or what degrades a ready node.
    /// Since schema 2.
    pub faults: Vec<Fault>,
    /// The texts of the faults, as schema 1 has them. Not in the next schema.
    pub causes: Vec<String>,
}

impl Verdict {
    /// What is wrong, for people; an older weftd says it too.
    pub fn texts(&self) -> Vec<&str> {
        match self.faults.as_slice() {
            [] => self.causes.iter().map(String::as_str).collect(),
            faults => faults.iter().map(|fault| fault.text.as_str()).collect(),
        }
    }
}

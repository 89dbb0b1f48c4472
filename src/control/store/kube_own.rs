//! This node's own Node object: desired and actual annotations, and the next step between them. The
//! cluster assigns the subnet; a Node that was deleted and created again is written again, and one
//! with another subnet is refused, because every pod here would lose its address.

use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard};

use kube::core::params::ListParams;
use tokio::sync::Notify;

use super::kube_node::Node;
use crate::control::lease::LeaseAttributes;
use crate::failure::lock;
use crate::route::{Prefix, Prefixes};

/// The own Node, shared by list, watch and writer.
#[derive(Debug)]
pub(in crate::control) struct OwnNode {
    pub(in crate::control) name: String,
    state: Mutex<State>,
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The subnet, and what the annotations should say.
    held: Option<(Prefixes, LeaseAttributes)>,
    /// As last seen; `None` if it is gone.
    node: Option<Node>,
    /// When that was; `None` while nothing is known.
    seen: Option<i64>,
    /// Whether the network works and the Node may show it.
    pub(super) is_up: bool,
    /// The uid of the Node that shows it.
    pub(super) told_up: Option<String>,
}

/// What is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, until something changes.
    Rest,
    /// There is no Node, or it has no subnet, in words; it will come back.
    Await(&'static str),
    /// The Node has another subnet, or none that can be used.
    Refuse(String, Option<Prefix>),
    /// The annotations are to be patched.
    Annotate {
        /// With this.
        patch: String,
        /// The operator's address, if it is what is published.
        overwrite: Option<Ipv4Addr>,
    },
    /// The network works: the Node's condition is due.
    TellUp(String),
}

impl OwnNode {
    pub(super) fn new(name: String) -> Self {
        Self { name, state: Mutex::default(), changed: Notify::new() }
    }

    /// Selects it in a list.
    pub(super) fn alone(&self) -> ListParams {
        ListParams::default().fields(&format!("metadata.name={}", self.name))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// An event or an answer about the Node, unless it is older than what is known.
    pub(super) fn note(&self, node: Node, deleted: bool) {
        let (seen, revision) = (self.state().seen, node.revision);
        if seen.is_none_or(|seen| revision >= seen) {
            self.listed((!deleted).then_some(node), revision);
        }
    }

    /// What a listing of `revision` has, which is true whatever was seen before.
    pub(super) fn listed(&self, node: Option<Node>, revision: i64) {
        let mut state = self.state();
        (state.node, state.seen) = (node, Some(revision));
        self.changed.notify_one();
    }

    /// From now on the node holds `subnets` and publishes `desired`.
    pub(super) fn hold(&self, subnets: Prefixes, desired: &LeaseAttributes) {
        self.state().held = Some((subnets, desired.clone()));
        self.changed.notify_one();
    }

    pub(super) fn held(&self) -> Option<(Prefixes, LeaseAttributes)> {
        self.state().held.clone()
    }

    /// What is wrong with the operator's address for the others, if something is.
    pub(super) fn wrong_overwrite(&self) -> Option<String> {
        self.state().node.as_ref()?.overwrite().err()
    }

    /// What to do now.
    pub(super) fn next_step(&self, prefix: &str) -> Step {
        let state = self.state();
        let (Some((subnets, desired)), Some(_)) = (&state.held, state.seen) else {
            return Step::Rest;
        };
        let Some(node) = &state.node else { return Step::Await("is gone from the API") };
        match node.subnets() {
            Ok(None) => Step::Await("has no pod cidr any more"),
            Err(detail) => Step::Refuse(detail, None),
            Ok(Some(other)) if other.of_families(*subnets) != Some(*subnets) => {
                Step::Refuse(format!("its pod cidr is now {other}"), other.v4())
            }
            Ok(Some(_)) => match node.annotation_patch(desired, prefix) {
                Some(patch) => {
                    let overwrite = node.overwrite().ok().flatten();
                    Step::Annotate { patch, overwrite }
                }
                None if state.is_up && state.told_up.as_ref() != Some(&node.uid) => {
                    Step::TellUp(node.uid.clone())
                }
                None => Step::Rest,
            },
        }
    }
}

//! Leases in the Kubernetes API: a node's subnet is the one assigned to its Node, its attributes
//! are the Node's annotations, and nothing expires.
//!
//! The own Node's part is kept by `keep` and not by the lease machine, which only could lose a
//! subnet that nobody can take: listings show the machine its own lease as it was written.

use std::convert::Infallible;
use std::fmt::Display;
use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::header::CONTENT_TYPE;
use kube::core::params::{GetParams, ListParams};
use kube::core::{Request as Api, request};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use super::kube_connection::{Built, Connection, ITEM_BYTES_MAX, nodes};
use super::kube_node::{
    NODE_PUBLIC_IP, NODE_PUBLIC_IPV6, Node, PUBLIC_IP_OVERWRITE, Page, condition_patch, unreadable,
};
use super::kube_own::{OwnNode, Step};
use crate::config::kube::{KubeOptions, NodeSource};
use crate::config::network::{CONFIG_BYTES_MAX, NetworkConfig};
use crate::control::backoff::Backoff;
use crate::control::clock;
use crate::control::error::{AcquireError, ConnectError, StoreError, StoreResult};
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::rejected::Rejected;
use crate::control::snapshot::{ENTRIES_MAX, Granted, Snapshot};
use crate::control::status::ControlStatus;
use crate::failure::{LogOnce, with_causes};
use crate::route::Prefixes;

/// Nodes of one page: at some 15 KB each, a page is 4 MB, and 6,000 Nodes are 24 requests.
const PAGE_NODES: u32 = 250;
/// Largest page: nearly ten times the usual size of a Node.
const PAGE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Most pages: as many Nodes as a store may have leases, and as many that are none.
const PAGES_MAX: usize = 2 * ENTRIES_MAX / PAGE_NODES as usize + 1;
/// How long flannel waits for its first listing.
const SYNC_TIMEOUT: Duration = Duration::from_secs(600);
/// First and longest pause between two tries to write the own Node, or to find the own pod.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// How long a refusal to show the own pod is not final: a server that starts forbids everything
/// until it has read its roles, a second or two.
const REFUSED_MAX: Duration = Duration::from_secs(10);
/// Failures in a row to write the own Node before the status says so, if the API can be read: a
/// server that is replaced fails once or twice.
const FAILURES_TOLD: u32 = 3;

const WRITING: &str = "writing the own Node";

/// The Kubernetes API as a store.
pub struct KubeStore {
    pub(super) connection: Connection,
    /// What the names of flannel's annotations begin with.
    pub(super) prefix: String,
    pub(in crate::control) own: OwnNode,
    sync_timeout: Duration,
}

impl KubeStore {
    /// Reads the files that the options name, and learns which Node this is: of the API, if only
    /// the pod's name is known, for as long as it takes to answer.
    pub async fn open(options: &KubeOptions) -> Result<Self, ConnectError> {
        let connection = Connection::open(options).await?;
        check_network_config(&options.network_config)?;
        let sync_timeout = if options.wait_for_ever { Duration::MAX } else { SYNC_TIMEOUT };
        let node = match &options.node {
            NodeSource::Named(name) => name.clone(),
            NodeSource::Pod { namespace, name } => {
                node_of_pod(&connection, namespace, name, sync_timeout).await?
            }
        };
        Ok(Self {
            connection,
            prefix: options.annotations.name(""),
            own: OwnNode::new(node),
            sync_timeout,
        })
    }

    /// As the file says now: a ConfigMap that was changed is there within two minutes.
    pub(super) fn config(&self) -> StoreResult<Vec<u8>> {
        let file = &self.connection.options.network_config;
        let path = file.display();
        read_network_config(file).map_err(|error| StoreError::NoConfig(format!("{path} ({error})")))
    }

    /// All leases for an operator, who is no node: what the Node of this name says is one like any
    /// other.
    pub(in crate::control) async fn entries(&self) -> StoreResult<Snapshot> {
        let mut snapshot = self.list().await?;
        if let Some(entry) = self.read_own().await?.and_then(|node| node.lease()) {
            snapshot.add(entry);
        }
        Ok(snapshot)
    }

    pub(super) async fn list(&self) -> StoreResult<Snapshot> {
        let (mut snapshot, mut own) = (Snapshot::default(), None);
        let mut params = ListParams::default().limit(PAGE_NODES);
        for _ in 0..PAGES_MAX {
            let page = self.read_page("listing Nodes", nodes().list(&params), |node| match node {
                Ok(node) if node.name == self.own.name => own = Some(node),
                Ok(node) => node.lease().into_iter().for_each(|entry| snapshot.add(entry)),
                Err(mut rejected) => {
                    // Not as the own entry, which is kept apart from the lease machine.
                    if rejected.key == self.own.name {
                        rejected.key.insert_str(0, "the own Node ");
                    }
                    snapshot.add(Err(rejected));
                }
            });
            let (revision, next) = page.await?;
            params.continue_token = Some(next).filter(|next| !next.is_empty());
            if params.continue_token.is_none() {
                snapshot.revision = revision;
                break;
            }
        }
        snapshot.is_cut |= params.continue_token.is_some();
        self.own.listed(own, snapshot.revision);
        let held = self.own.held();
        let held = held.map(|(subnet, attributes)| Arc::new(self.lease(subnet, attributes)));
        snapshot.leases.extend(held);
        Ok(snapshot)
    }

    /// Gives each Node of one page, then the list's revision and the token of the next page.
    async fn read_page(
        &self,
        operation: &'static str,
        request: Built,
        mut give: impl FnMut(Result<Node, Rejected>),
    ) -> StoreResult<(i64, String)> {
        let bytes = self.connection.ask_whole(operation, request, PAGE_BYTES_MAX).await?;
        let page = Page::parse(&bytes).map_err(|why| StoreError::unavailable(operation, why))?;
        for item in page.items {
            let json = item.get().as_bytes();
            give(Node::parse(json, &self.prefix).map_err(|detail| unreadable(json, detail)));
        }
        Ok((page.revision, page.next))
    }

    /// The own lease, which has no version of its own: nobody else writes it.
    fn lease(&self, subnets: Prefixes, attributes: LeaseAttributes) -> Lease {
        Lease { key: self.own.name.clone(), ..Lease::reservation(subnets, attributes) }
    }

    /// Reads the own Node; `None` if there is none. By a list, which the roles of all flannels
    /// allow, while getting one Node is newer.
    async fn read_own(&self) -> StoreResult<Option<Node>> {
        let operation = "reading the own Node";
        let request = nodes().list(&self.own.alone());
        let mut found = None;
        let give = |node: Result<Node, Rejected>| {
            if node.as_ref().ok().is_none_or(|node| node.name == self.own.name) {
                found = Some(node);
            }
        };
        let (revision, _) = self.read_page(operation, request, give).await?;
        let wrong = |rejected: Rejected| StoreError::unavailable(operation, rejected.detail);
        let found = found.transpose().map_err(wrong)?;
        self.own.listed(found.clone(), revision);
        Ok(found)
    }

    /// Waits for the API's first answer, and gives the addresses that the operator set on the Node
    /// for this node to use, if there are any.
    pub(in crate::control) async fn sync(
        &self,
        status: &ControlStatus,
    ) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), AcquireError> {
        info!("Starting kube subnet manager");
        info!("Waiting {} for node controller to sync", clock::format_go_duration(SYNC_TIMEOUT));
        status.start_is_at(Some("waiting for the Kubernetes API to answer"));
        let what = "The Kubernetes API does not answer yet";
        let server = &self.connection.server;
        let hindered = |text: &str| {
            status.start_is_hindered(&format!("no subnet: the Kubernetes API at {server}: {text}"));
        };
        let node = retried(what, hindered, |_| self.sync_timeout, || self.read_own()).await;
        let minutes = self.sync_timeout.as_secs() / 60;
        let node = node.map_err(|error| AcquireError::NotSynced(minutes, error))?;
        info!("Node controller sync successful");
        let Some(node) = node else { return Ok((None, None)) };
        let v4 = self.address_in(&node, NODE_PUBLIC_IP, "--public-ip")?;
        Ok((v4, self.address_in(&node, NODE_PUBLIC_IPV6, "--public-ipv6")?))
    }

    /// What an annotation of the own Node says in place of an option, if there is such a one.
    fn address_in<A: FromStr + Display>(
        &self,
        node: &Node,
        annotation: &str,
        option: &str,
    ) -> Result<Option<A>, AcquireError> {
        let (text, name) = (node.said(annotation), format!("{}{annotation}", self.prefix));
        if text.is_empty() {
            return Ok(None);
        }
        let Ok(address) = text.parse() else {
            return Err(self.unusable(&format!(
                "its annotation {name} is {text:?}, which is no address for {option}"
            )));
        };
        info!("Using {address} of the node annotation {name:?} as {option}");
        Ok(Some(address))
    }

    /// What the own Node's annotations say from an earlier run; `None` if that can't be used.
    pub(in crate::control) async fn former(&self) -> StoreResult<Option<LeaseAttributes>> {
        Ok(self.read_own().await?.and_then(|node| node.attributes().ok()))
    }

    /// Takes the subnet that the cluster assigned to the own Node, and publishes it there.
    pub(in crate::control) async fn take_assigned(
        &self,
        networks: Prefixes,
        attributes: &LeaseAttributes,
    ) -> Result<Granted, AcquireError> {
        let node = || self.own.name.clone();
        let found = self.read_own().await?.ok_or_else(|| AcquireError::NoNode(node()))?;
        let subnets = found.subnets().map_err(|detail| self.unusable(&detail))?;
        let subnets = subnets.ok_or_else(|| AcquireError::Unassigned(node()))?;
        let wanted = subnets.of_families(networks).unwrap_or(subnets);
        if networks.v6().is_some() && subnets.v6().is_none() {
            return Err(self.unusable(&format!(
                "its pod cidr {subnets} is of IPv4 alone: give the cluster an IPv6 --cluster-cidr \
                 as well, or set EnableIPv6 to false in the net config"
            )));
        }
        if wanted.within(networks) != Some(wanted) {
            // The first words are flannel's.
            return Err(AcquireError::Unusable(format!(
                "subnet \"{networks}\" specified in the flannel net config doesn't contain \
                 \"{wanted}\" PodCIDR of the {:?} node: correct Network in the net config, or the \
                 cluster's --cluster-cidr",
                self.own.name
            )));
        }
        Ok(self.publish(wanted, attributes).await?)
    }

    fn unusable(&self, detail: &str) -> AcquireError {
        AcquireError::Unusable(format!("node {:?}: {detail}", self.own.name))
    }

    /// Publishes `subnets` and `attributes` in the own Node from now on.
    pub(in crate::control) async fn publish(
        &self,
        subnets: Prefixes,
        attributes: &LeaseAttributes,
    ) -> StoreResult<Granted> {
        self.own.hold(subnets, attributes);
        let why = match self.write_step().await? {
            Step::Rest | Step::Annotate { .. } | Step::TellUp(_) => {
                let lease = self.lease(subnets, attributes.clone());
                return Ok(Granted { lease, expires: None });
            }
            Step::Await(why) => why.to_owned(),
            Step::Refuse(detail, _) => detail,
        };
        Err(StoreError::unavailable(WRITING, format!("node {:?}: {why}", self.own.name)))
    }

    pub(in crate::control) fn network_is_up(&self) {
        if self.connection.options.clear_network_unavailable {
            self.own.state().is_up = true;
            self.own.changed.notify_one();
        }
    }

    /// Writes what is due next, and returns what it was.
    async fn write_step(&self) -> StoreResult<Step> {
        let step = self.own.next_step(&self.prefix);
        let patch = match &step {
            Step::Annotate { patch, overwrite, .. } => {
                if let Some(overwrite) = overwrite {
                    let name = format!("{}{PUBLIC_IP_OVERWRITE}", self.prefix);
                    info!("Overriding public ip with '{overwrite}' from node annotation '{name}'");
                }
                patch.clone()
            }
            Step::TellUp(_) => condition_patch(clock::unix_seconds()),
            Step::Rest | Step::Await(_) | Step::Refuse(..) => return Ok(step),
        };
        let request = Request::patch(format!("/api/v1/nodes/{}/status", self.own.name))
            .header(CONTENT_TYPE, "application/strategic-merge-patch+json")
            .body(patch.into_bytes())
            .map_err(request::Error::BuildRequest);
        let bytes = self.connection.ask_whole(WRITING, request, ITEM_BYTES_MAX).await?;
        let node = Node::parse(&bytes, &self.prefix);
        self.own.note(node.map_err(|why| StoreError::unavailable(WRITING, why))?, false);
        if let Step::TellUp(uid) = &step {
            info!("Told the Node {:?} that its network is available", self.own.name);
            self.own.state().told_up = Some(uid.clone());
        }
        Ok(step)
    }

    /// Keeps the own Node up to date, for ever.
    pub(in crate::control) async fn keep(&self, status: &ControlStatus) -> Infallible {
        let mut backoff = Backoff::between(RETRY_PAUSE);
        let (mut told, mut failures) = (Step::Rest, LogOnce::default());
        let (mut overwrites, mut failed) = (LogOnce::default(), 0_u32);
        loop {
            if let Some(wrong) = self.own.wrong_overwrite() {
                overwrites.once(&wrong, |text| {
                    warn!(
                        "The annotation \"{}{PUBLIC_IP_OVERWRITE}\" of the Node {:?} is {text}: \
                         publishing the node's own address; correct the annotation or remove it",
                        self.prefix, self.own.name
                    );
                });
            }
            match self.write_step().await {
                // A pause, in case somebody keeps changing it back.
                Ok(Step::Annotate { .. } | Step::TellUp(_)) => {
                    failed = 0;
                    status.edit().refused_write = None;
                    sleep(backoff.next_wait()).await;
                }
                Ok(step) => {
                    failed = 0;
                    backoff = Backoff::between(RETRY_PAUSE);
                    self.tell(step, &mut told, status);
                    self.own.changed.notified().await;
                }
                Err(error) => {
                    failures.once(&with_causes(&error), |text| {
                        warn!("Cannot write the own Node, retrying: {text}");
                    });
                    failed = failed.saturating_add(1);
                    note_failure(&error, failed, status);
                    sleep(backoff.next_wait()).await;
                }
            }
        }
    }

    /// Notes in the status what became of the own Node, and logs it once.
    fn tell(&self, step: Step, told: &mut Step, status: &ControlStatus) {
        let Some((held, _)) = self.own.held() else { return };
        let node = &self.own.name;
        let refused = if let Step::Refuse(_, found) = &step { Some(*found) } else { None };
        let mut state = status.edit();
        (state.store.subnet_refused, state.store.refused_subnet) =
            (refused.is_some(), refused.flatten());
        let awaited = if let Step::Await(why) = &step { Some(why) } else { None };
        let no_way = |why| format!("the Node {node:?} {why}: other nodes may have no way here");
        state.refused_write = awaited.map(no_way);
        drop(state);
        if step == *told {
            return;
        }
        match &step {
            Step::Rest | Step::Annotate { .. } | Step::TellUp(_) => {
                info!("The Node {node:?} shows this node's subnet {held} again");
            }
            Step::Await(why) => warn!(
                "The Node {node:?} {why}: keeping the subnet {held} and all peers, and writing its \
                 annotations when it is back"
            ),
            Step::Refuse(detail, _) => error!(
                "Refusing the change of the Node {node:?}: {detail}, and this node's pods have \
                 addresses of {held}; going on with {held}, which other nodes may not route here. \
                 To use the new one, drain the node, restart weftd and then its pods"
            ),
        }
        *told = step;
    }
}

/// Notes in the status that the own Node cannot be written, as `failed` tries in a row say.
fn note_failure(error: &StoreError, failed: u32, status: &ControlStatus) {
    let mut state = status.edit();
    let is_refused = matches!(error, StoreError::Refused { .. });
    // An API that is away is no refusal, and whoever reads it says so.
    if is_refused || (failed >= FAILURES_TOLD && state.store.up) {
        state.refused_write = Some(error.to_string());
    }
}

fn check_network_config(file: &Path) -> Result<(), ConnectError> {
    let path = file.display();
    let bytes = read_network_config(file)
        .map_err(|error| ConnectError(format!("failed to read net conf: {path}: {error}")))?;
    NetworkConfig::parse(&bytes).map(drop).map_err(|error| {
        let why = with_causes(&error);
        ConnectError(format!("error parsing subnet config: {path}: {why}"))
    })
}

fn read_network_config(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than is allowed, which the parser refuses.
    let file = std::fs::File::open(file)?;
    file.take(CONFIG_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Asks the pod on which Node it runs.
async fn node_of_pod(
    connection: &Connection,
    namespace: &str,
    name: &str,
    sync_timeout: Duration,
) -> Result<String, ConnectError> {
    let failed = |detail: String| {
        ConnectError(format!("error retrieving pod spec for '{namespace}/{name}': {detail}"))
    };
    let pods = Api::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let patience = |error: &StoreError| {
        let is_refused = matches!(error, StoreError::Refused { .. });
        if is_refused { REFUSED_MAX.min(sync_timeout) } else { sync_timeout }
    };
    let read = || {
        let request = pods.get(name, &GetParams::default());
        connection.ask_whole("reading the own pod", request, ITEM_BYTES_MAX)
    };
    let answer = retried("Cannot find this pod's Node yet", |_| {}, patience, read).await;
    let bytes = answer.map_err(|error| failed(with_causes(&error)))?;
    let pod: Value = serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?;
    let node = pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty());
    let node = node.ok_or_else(|| failed("node name not present in pod spec".to_owned()))?;
    Ok(node.to_owned())
}

/// Repeats `request` until it succeeds, or fails after the time that its error is worth, and logs
/// `what` meanwhile; each error goes to `hindered` as well.
async fn retried<T, F: Future<Output = StoreResult<T>>>(
    what: &str,
    hindered: impl Fn(&str),
    patience: impl Fn(&StoreError) -> Duration,
    request: impl Fn() -> F,
) -> StoreResult<T> {
    let (began, mut told) = (Instant::now(), LogOnce::default());
    let mut backoff = Backoff::between(RETRY_PAUSE);
    loop {
        match request().await {
            Err(error) if began.elapsed() < patience(&error) => {
                let error = with_causes(&error);
                hindered(&error);
                told.once(&error, |text| warn!("{what}, retrying: {text}"));
            }
            answer => return answer,
        }
        sleep(backoff.next_wait()).await;
    }
}

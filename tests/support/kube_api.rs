//! As much of a Kubernetes API server as a node's network needs: Nodes and pods over real HTTP,
//! lists in pages, watches with bookmarks, strategic merge patches of a Node's status, and the
//! errors of the real one on demand.
//!
//! It runs on a thread of its own, so that it may serve daemons in namespaces and tasks of the
//! test alike.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_rustls::TlsAcceptor;

/// The version of a server that begins, and of one that was restored from a backup.
const FIRST: u64 = 1000;
const RESTORED: u64 = 10;
/// Events that a watch can be continued from.
const HISTORY_MAX: usize = 20_000;

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A running server. Dropping it closes everything.
pub struct KubeApi {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Counts changes, for watches to wake up.
    changes: watch::Sender<u64>,
    /// Counts the orders to end all watches.
    ends: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    revision: u64,
    nodes: BTreeMap<String, Bytes>,
    pods: BTreeMap<String, Value>,
    events: VecDeque<(u64, Bytes)>,
    /// Watches from before this are told that it is gone.
    floor: u64,
    faults: VecDeque<(What, Fault)>,
    seen: Vec<Seen>,
    watches: usize,
    token: Option<String>,
}

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    List,
    NextPage,
    Own,
    Watch,
    Patch,
    Pod,
}

/// What goes wrong with the next request of a kind.
#[derive(Debug, Clone)]
pub enum Fault {
    /// An error, with the seconds of a `Retry-After`.
    Status(u16, Option<u64>),
    /// The connection breaks in the middle of the answer.
    Cut,
    /// A list without items.
    Empty,
    /// A watch that begins, and says 410 in its stream.
    GoneInStream,
    /// No answer for so long.
    Slow(Duration),
}

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub what: What,
    pub at: std::time::Instant,
    pub path: String,
    pub content_type: String,
    pub body: String,
}

impl KubeApi {
    /// Serves plain HTTP on `listener`.
    pub fn serve(listener: TcpListener) -> Self {
        Self::start(listener, None)
    }

    /// Serves on a free port of the loopback.
    pub fn local() -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// Serves HTTPS, to whoever has the bearer token.
    pub fn secure(listener: TcpListener, tls: TlsAcceptor, token: &str) -> Self {
        let api = Self::start(listener, Some(tls));
        api.state().token = Some(token.to_owned());
        api
    }

    fn start(listener: TcpListener, tls: Option<TlsAcceptor>) -> Self {
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            state: Mutex::new(State { revision: FIRST, ..State::default() }),
            changes: watch::Sender::new(0),
            ends: watch::Sender::new(0),
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let serving = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap();
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, tls, serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// Creates or replaces a Node.
    pub fn put_node(&self, node: &Value) {
        let name = node["metadata"]["name"].as_str().unwrap().to_owned();
        self.shared.put(&name, node.clone());
    }

    /// Changes a Node.
    pub fn edit(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut node = self.node(name);
        edit(&mut node);
        self.shared.put(name, node);
    }

    /// A Node as it is.
    pub fn node(&self, name: &str) -> Value {
        let state = self.state();
        let json = state.nodes.get(name).unwrap_or_else(|| panic!("there is no Node {name}"));
        serde_json::from_slice(json).unwrap()
    }

    /// The annotations of a Node.
    pub fn annotations(&self, name: &str) -> BTreeMap<String, String> {
        serde_json::from_value(self.node(name)["metadata"]["annotations"].clone())
            .unwrap_or_default()
    }

    /// A kubelet's heartbeat: the Node's version changes, and nothing that matters.
    pub fn heartbeat(&self, name: &str) {
        let mut state = self.state();
        state.revision += 1;
        let json = state.nodes[name].clone();
        let node = with_version(&json, state.revision);
        state.changed("MODIFIED", name, Some(node));
        drop(state);
        self.shared.changes.send_modify(|count| *count += 1);
    }

    pub fn delete_node(&self, name: &str) {
        let mut state = self.state();
        state.revision += 1;
        let json = state.nodes.remove(name).unwrap();
        let node = with_version(&json, state.revision);
        state.changed("DELETED", name, None);
        let event = event("DELETED", &node);
        let revision = state.revision;
        state.remember(revision, event);
        drop(state);
        self.shared.changes.send_modify(|count| *count += 1);
    }

    /// Takes Nodes away without an event, as if watches had lost it.
    pub fn lose_silently(&self, name: &str) {
        let mut state = self.state();
        state.revision += 1;
        state.nodes.remove(name);
    }

    pub fn put_pod(&self, namespace: &str, name: &str, node: &str) {
        let pod = json!({
            "kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": "7"},
            "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "weft"}]},
        });
        self.state().pods.insert(format!("{namespace}/{name}"), pod);
    }

    /// Tells all watches how far they are.
    pub fn bookmark(&self) {
        let mut state = self.state();
        state.revision += 1;
        let revision = state.revision;
        let object = json!({
            "kind": "Node", "apiVersion": "v1",
            "metadata": {"resourceVersion": revision.to_string(), "creationTimestamp": null},
            "spec": {}, "status": {"daemonEndpoints": {}, "nodeInfo": {}},
        });
        state.remember(revision, event("BOOKMARK", object.to_string().as_bytes()));
        drop(state);
        self.shared.changes.send_modify(|count| *count += 1);
    }

    /// Forgets all changes: watches from before are gone.
    pub fn compact(&self) {
        let mut state = self.state();
        state.events.clear();
        state.floor = state.revision;
    }

    /// Goes back to `nodes` and forgets all since, as when etcd is restored from a backup. Watches
    /// end, because the server is stopped for it.
    pub fn restore(&self, nodes: &[Value]) {
        let mut state = self.state();
        state.nodes.clear();
        state.events.clear();
        (state.revision, state.floor) = (RESTORED, RESTORED);
        drop(state);
        for node in nodes {
            self.put_node(node);
        }
        self.end_watches();
    }

    /// Ends all watches, as a server does that stops.
    pub fn end_watches(&self) {
        self.shared.ends.send_modify(|count| *count += 1);
    }

    /// The next request of this kind goes wrong in this way.
    pub fn fail(&self, what: What, fault: Fault) {
        self.state().faults.push_back((what, fault));
    }

    /// All requests of a kind so far.
    pub fn seen(&self, what: What) -> Vec<Seen> {
        self.state().seen.iter().filter(|seen| seen.what == what).cloned().collect()
    }

    /// Watches that are open.
    pub fn watches(&self) -> usize {
        self.state().watches
    }
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, name: &str, mut node: Value) -> Bytes {
        let mut state = self.lock();
        state.revision += 1;
        node["metadata"]["resourceVersion"] = state.revision.to_string().into();
        let kind = if state.nodes.contains_key(name) { "MODIFIED" } else { "ADDED" };
        if kind == "ADDED" {
            // Whoever is made again is somebody else.
            node["metadata"]["uid"] = format!("uid-{}-of-{name}", state.revision).into();
        }
        let json = Bytes::from(node.to_string());
        state.changed(kind, name, Some(json.clone()));
        drop(state);
        self.changes.send_modify(|count| *count += 1);
        json
    }
}

impl State {
    fn changed(&mut self, kind: &str, name: &str, json: Option<Bytes>) {
        if let Some(json) = json {
            let revision = self.revision;
            self.remember(revision, event(kind, &json));
            self.nodes.insert(name.to_owned(), json);
        }
    }

    fn remember(&mut self, revision: u64, event: Bytes) {
        self.events.push_back((revision, event));
        if self.events.len() > HISTORY_MAX {
            self.floor = self.events.pop_front().unwrap().0;
        }
    }

    fn fault(&mut self, what: What) -> Option<Fault> {
        let index = self.faults.iter().position(|(of, _)| *of == what)?;
        self.faults.remove(index).map(|(_, fault)| fault)
    }
}

fn event(kind: &str, object: &[u8]) -> Bytes {
    let head = format!(r#"{{"type":"{kind}","object":"#);
    [head.as_bytes(), object, b"}\n"].concat().into()
}

/// The object with another version, without reading all of it.
fn with_version(json: &[u8], revision: u64) -> Bytes {
    const KEY: &str = r#""resourceVersion":""#;
    let text = std::str::from_utf8(json).unwrap();
    let (before, rest) = text.split_once(KEY).unwrap();
    let (_, after) = rest.split_once('"').unwrap();
    Bytes::from(format!("{before}{KEY}{revision}\"{after}"))
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        stream.set_nodelay(true).ok();
        let (tls, shared) = (tls.clone(), Arc::clone(&shared));
        let service = service_fn(move |request| answer(request, Arc::clone(&shared)));
        let http = hyper::server::conn::http1::Builder::new();
        tokio::spawn(async move {
            match tls {
                None => http.serve_connection(TokioIo::new(stream), service).await.ok(),
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => http.serve_connection(TokioIo::new(stream), service).await.ok(),
                    Err(_) => None,
                },
            }
        });
    }
}

fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn status(code: u16, message: &str, retry_after: Option<u64>) -> Response<Body> {
    let mut text = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "code": code,
    });
    let mut response = Response::builder().status(code).header("content-type", "application/json");
    if let Some(seconds) = retry_after {
        text["details"] = json!({"retryAfterSeconds": seconds});
        response = response.header("retry-after", seconds);
    }
    response.body(whole(text.to_string())).unwrap()
}

fn crowded(retry_after: u64) -> Response<Body> {
    let response = Response::builder().status(429).header("content-type", "text/plain");
    let response = response.header("retry-after", retry_after);
    response.body(whole("Too many requests, please try again later.\n")).unwrap()
}

fn json_of(bytes: impl Into<Bytes>) -> Response<Body> {
    let response = Response::builder().header("content-type", "application/json");
    response.body(whole(bytes)).unwrap()
}

/// An answer that breaks off.
fn cut(begin: &'static str) -> Response<Body> {
    let frames = vec![
        Ok(Frame::data(Bytes::from_static(begin.as_bytes()))),
        Err(std::io::Error::other("cut")),
    ];
    Response::new(BodyExt::boxed_unsync(StreamBody::new(futures_util::stream::iter(frames))))
}

fn query<'q>(query: &'q str, name: &str) -> Option<&'q str> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
}

async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<Body>, std::io::Error> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let asked = parts.uri.query().unwrap_or_default().to_owned();
    let what = match (&parts.method, path.as_str()) {
        (&Method::GET, "/api/v1/nodes") if query(&asked, "watch").is_some() => What::Watch,
        (&Method::GET, "/api/v1/nodes") if query(&asked, "fieldSelector").is_some() => What::Own,
        (&Method::GET, "/api/v1/nodes") if query(&asked, "continue").is_some() => What::NextPage,
        (&Method::GET, "/api/v1/nodes") => What::List,
        (&Method::GET, path) if path.starts_with("/api/v1/namespaces/") => What::Pod,
        (&Method::PATCH, _) => What::Patch,
        _ => return Ok(status(404, "the server could not find the requested resource", None)),
    };
    let header = |name| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let content_type = header("content-type").unwrap_or_default().to_owned();
    let authorization = header("authorization").map(str::to_owned);
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    let uri = parts.uri.to_string();
    let at = std::time::Instant::now();
    let (fault, token) = {
        let mut state = shared.lock();
        state.seen.push(Seen { what, at, path: uri, content_type, body: text.clone() });
        (state.fault(what), state.token.clone())
    };
    if token.is_some_and(|token| authorization != Some(format!("Bearer {token}"))) {
        return Ok(status(401, "Unauthorized", None));
    }
    match fault {
        None | Some(Fault::Empty | Fault::GoneInStream) => {}
        // The limit of requests stands before all that writes JSON.
        Some(Fault::Status(429, Some(seconds))) => return Ok(crowded(seconds)),
        Some(Fault::Status(code, retry_after)) => {
            return Ok(status(code, "as the test ordered", retry_after));
        }
        Some(Fault::Cut) => return Ok(cut(r#"{"kind":"NodeList","items":[{"metadata":{"#)),
        Some(Fault::Slow(time)) => sleep(time).await,
    }
    Ok(match what {
        What::List | What::NextPage => {
            let is_empty = matches!(fault, Some(Fault::Empty));
            list(&shared.lock(), &asked, is_empty)
        }
        What::Own => own(&shared.lock(), &asked),
        What::Watch => watch_nodes(&shared, &asked, matches!(fault, Some(Fault::GoneInStream))),
        What::Patch => patch(&shared, &path, &text),
        What::Pod => pod(&shared.lock(), &path),
    })
}

fn node_list<'n>(
    revision: u64,
    nodes: impl Iterator<Item = &'n Bytes>,
    next: Option<String>,
) -> Response<Body> {
    let metadata = match next {
        None => json!({"resourceVersion": revision.to_string()}),
        Some(next) => json!({"resourceVersion": revision.to_string(), "continue": next}),
    };
    let mut text =
        format!(r#"{{"kind":"NodeList","apiVersion":"v1","metadata":{metadata},"items":["#)
            .into_bytes();
    for (index, node) in nodes.enumerate() {
        if index > 0 {
            text.push(b',');
        }
        text.extend_from_slice(node);
    }
    text.extend_from_slice(b"]}\n");
    json_of(text)
}

fn list(state: &State, asked: &str, is_empty: bool) -> Response<Body> {
    if is_empty {
        return node_list(state.revision, std::iter::empty(), None);
    }
    let limit = query(asked, "limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    // A token of this server is the version of the list and the last name of the page before.
    let (revision, after) = match query(asked, "continue").and_then(|text| text.split_once('_')) {
        Some((revision, after)) => (revision.parse().unwrap(), after.to_owned()),
        None => (state.revision, String::new()),
    };
    if revision < state.floor {
        return status(410, "The provided continue parameter is too old", None);
    }
    let mut page: Vec<_> =
        state.nodes.iter().filter(|(name, _)| **name > after).take(limit + 1).collect();
    let has_more = page.len() > limit;
    page.truncate(limit);
    let next = has_more.then(|| format!("{revision}_{}", page.last().unwrap().0));
    node_list(revision, page.into_iter().map(|(_, node)| node), next)
}

fn own(state: &State, asked: &str) -> Response<Body> {
    let selector = query(asked, "fieldSelector").unwrap();
    let name = selector.strip_prefix("metadata.name%3D").expect("nothing else is selected by");
    node_list(state.revision, state.nodes.get(name).into_iter(), None)
}

fn pod(state: &State, path: &str) -> Response<Body> {
    let parts: Vec<&str> = path.split('/').collect();
    let [_, _, _, _, namespace, _, name] = parts[..] else { return status(404, "no pod", None) };
    match state.pods.get(&format!("{namespace}/{name}")) {
        Some(pod) => json_of(pod.to_string()),
        None => status(404, &format!("pods {name:?} not found"), None),
    }
}

/// A strategic merge patch of the parts that flannel patches.
fn patch(shared: &Shared, path: &str, text: &str) -> Response<Body> {
    let name = path.strip_prefix("/api/v1/nodes/").and_then(|rest| rest.strip_suffix("/status"));
    let Some(name) = name else { return status(404, "only the status is patched", None) };
    let Some(json) = shared.lock().nodes.get(name).cloned() else {
        return status(404, &format!("nodes {name:?} not found"), None);
    };
    let Ok(patch) = serde_json::from_str::<Value>(text) else {
        return status(400, "the patch is no JSON", None);
    };
    let mut node: Value = serde_json::from_slice(&json).unwrap();
    for (key, value) in patch["metadata"]["annotations"].as_object().into_iter().flatten() {
        match node["metadata"]["annotations"].as_object_mut() {
            Some(annotations) if value.is_null() => drop(annotations.remove(key)),
            _ => node["metadata"]["annotations"][key] = value.clone(),
        }
    }
    for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
        if node["status"]["conditions"].is_null() {
            node["status"]["conditions"] = json!([]);
        }
        let all = node["status"]["conditions"].as_array_mut().unwrap();
        match all.iter_mut().find(|other| other["type"] == condition["type"]) {
            // In its place, and what the patch does not name stays.
            Some(other) => {
                let (other, new) = (other.as_object_mut().unwrap(), condition.as_object().unwrap());
                other.extend(new.clone());
            }
            None => all.push(condition.clone()),
        }
    }
    json_of(shared.put(name, node))
}

struct Watching {
    shared: Arc<Shared>,
    revision: u64,
    changes: watch::Receiver<u64>,
    ends: watch::Receiver<u64>,
    until: Instant,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.shared.lock().watches -= 1;
    }
}

fn watch_nodes(shared: &Arc<Shared>, asked: &str, is_gone: bool) -> Response<Body> {
    let revision: u64 = query(asked, "resourceVersion").unwrap().parse().unwrap();
    let seconds: u64 = query(asked, "timeoutSeconds").unwrap().parse().unwrap();
    let mut state = shared.lock();
    if revision < state.floor || is_gone {
        let gone = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": format!("too old resource version: {revision}"), "reason": "Expired",
            "code": 410,
        });
        return json_of(event("ERROR", gone.to_string().as_bytes()));
    }
    // Before it is counted: from then on it may be ended.
    let (changes, ends) = (shared.changes.subscribe(), shared.ends.subscribe());
    state.watches += 1;
    drop(state);
    let watching = Watching {
        shared: Arc::clone(shared),
        revision,
        changes,
        ends,
        until: Instant::now() + Duration::from_secs(seconds),
    };
    let frames = futures_util::stream::unfold(watching, |mut watching| async move {
        let bytes = next_events(&mut watching).await?;
        Some((Ok(Frame::data(bytes)), watching))
    });
    Response::builder()
        .status(StatusCode::OK)
        .header("content-type", "application/json")
        .body(BodyExt::boxed_unsync(StreamBody::new(Box::pin(frames) as Frames)))
        .unwrap()
}

type Frames = std::pin::Pin<
    Box<dyn futures_util::Stream<Item = Result<Frame<Bytes>, std::io::Error>> + Send>,
>;

/// What happened since; `None` when the watch is over.
async fn next_events(watching: &mut Watching) -> Option<Bytes> {
    loop {
        let due: Vec<u8> = {
            let state = watching.shared.lock();
            let from = state.events.partition_point(|(revision, _)| *revision <= watching.revision);
            let due: Vec<_> = state.events.range(from..).collect();
            if let Some((revision, _)) = due.last() {
                watching.revision = *revision;
            }
            due.iter().flat_map(|(_, event)| event.iter().copied()).collect()
        };
        if !due.is_empty() {
            return Some(due.into());
        }
        tokio::select! {
            changed = watching.changes.changed() => changed.ok()?,
            _ = watching.ends.changed() => return None,
            () = sleep_until(watching.until) => return None,
        }
    }
}

/// A Node as a kubelet registers it, of the size that Nodes have.
pub fn node(name: &str, pod_cidr: Option<&str>) -> Value {
    let images: Vec<Value> = (0..50)
        .map(|image| {
            let digest = format!("{image:064x}");
            json!({
                "names": [format!("registry.example/apps/image-{image}@sha256:{digest}"),
                    format!("registry.example/apps/image-{image}:v1.{image}.0")],
                "sizeBytes": 10_000_000 + image,
            })
        })
        .collect();
    let condition = |kind: &str, reason: &str| {
        json!({
            "type": kind, "status": "False", "lastHeartbeatTime": "2026-11-21T08:00:00Z",
            "lastTransitionTime": "2026-11-20T08:00:00Z", "reason": reason,
            "message": "kubelet has no objection",
        })
    };
    let mut node = json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": format!("uid-of-{name}"), "resourceVersion": "1",
            "creationTimestamp": "2026-11-20T08:00:00Z",
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
            "annotations": {
                "node.alpha.kubernetes.io/ttl": "0",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
            "managedFields": [{"manager": "kubelet", "operation": "Update", "apiVersion": "v1",
                "time": "2026-11-20T08:00:00Z", "fieldsType": "FieldsV1",
                "fieldsV1": {"f:metadata": {"f:annotations": {".": {}}}}}],
        },
        "spec": {},
        "status": {
            "capacity": {"cpu": "8", "memory": "32780284Ki", "pods": "110"},
            "conditions": [
                condition("MemoryPressure", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "KubeletHasNoDiskPressure"),
                condition("Ready", "KubeletReady"),
            ],
            "addresses": [{"type": "Hostname", "address": name}],
            "images": images,
        },
    });
    if let Some(pod_cidr) = pod_cidr {
        node["spec"] = json!({"podCIDR": pod_cidr, "podCIDRs": [pod_cidr]});
    }
    node
}

/// The prefix of flannel's annotations.
pub const PREFIX: &str = "flannel.alpha.coreos.com/";

/// The same, of a node that runs flannel with the udp backend.
pub fn flannel_node(name: &str, pod_cidr: &str, public_ip: &str) -> Value {
    let mut node = node(name, Some(pod_cidr));
    for (key, value) in [
        ("kube-subnet-manager", "true"),
        ("backend-type", ""),
        ("backend-data", "null"),
        ("public-ip", public_ip),
    ] {
        node["metadata"]["annotations"][format!("{PREFIX}{key}")] = value.into();
    }
    node
}

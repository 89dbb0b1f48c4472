//! The connection to an etcd cluster: which endpoint to talk to, TLS, and what its errors mean.
//!
//! The client's own balancer would send every other request to a dead endpoint. Instead, each
//! connection has one endpoint: all are asked at once, the first that answers a quorum read is
//! used until it fails, and then all are asked again. flannel's default list, whose first entry
//! is closed on every host of this decade, costs one refused connection that way.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error as EtcdError, GetOptions, KeyValue,
    ResponseHeader, Txn, TxnOp, TxnOpResponse,
};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::debug;

use super::calls::Calls;
use super::etcd_tls::{advice, tls_options};
use crate::config::options::{Credentials, EtcdOptions};
use crate::control::error::{ConnectError, StoreError, StoreResult};
use crate::failure::{described, with_causes};

/// Longest time for one request. A quorum write takes milliseconds, a leader election up to a
/// few seconds; what takes longer is better tried elsewhere.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for a TCP connection; half the request's, so that the rest remains for it.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);
/// HTTP/2 pings while a stream is open: a dead peer is noticed within 13 s. etcd refuses clients
/// that ping more often than every 5 s.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(3));

/// etcd's words for a user without the permission.
pub(super) const NO_PERMISSION: &str = "permission denied";
/// etcd's words for a request whose login is missing, wrong, over, or not known any more.
const LOGIN_REFUSALS: [&str; 3] =
    ["authentication failed", "user name is empty", "invalid auth token"];
/// etcd's words where there are no users.
const NO_AUTHENTICATION: &str = "authentication is not enabled";
/// What helps an etcd that takes no writes for lack of space.
pub(super) const SPACE_ADVICE: &str = "its space quota is used up: compact and defragment it, or \
    raise its --quota-backend-bytes, then run `etcdctl alarm disarm`";

/// The connection in use, made on demand.
pub(super) struct Connection {
    options: EtcdOptions,
    pub(super) calls: Calls,
    session: Mutex<Option<Session>>,
    /// The cluster that was last connected to; 0 before the first.
    pub(super) cluster: AtomicU64,
}

#[derive(Clone)]
struct Session {
    client: Client,
    /// Whether it is logged in.
    is_user: bool,
    /// Tells a session from its successor when a late failure comes in.
    number: u64,
    /// How often this host had moved before.
    moves: u64,
}

impl Connection {
    /// Checks what can be checked without the cluster.
    pub(super) fn new(options: EtcdOptions) -> Result<Self, ConnectError> {
        for endpoint in &options.endpoints {
            connect_options(&options, endpoint)?;
        }
        let (session, cluster) = (Mutex::new(None), AtomicU64::new(0));
        Ok(Self { options, calls: Calls::default(), session, cluster })
    }

    /// The key below the prefix.
    pub(super) fn path(&self, key: impl Display) -> String {
        format!("{}/{key}", self.options.prefix)
    }

    /// Runs one request, bounded in time. A failed transport is dropped, so that the next request
    /// looks for a healthy endpoint.
    pub(super) async fn call<T, F: Future<Output = Result<T, EtcdError>>>(
        &self,
        operation: &'static str,
        request: impl FnOnce(Client) -> F,
    ) -> StoreResult<T> {
        // On the heap: the layers below are large, and so would be every future above.
        let request = Box::pin(async {
            let Session { client, is_user, number, moves: _ } = self.session(operation).await?;
            let result = bounded(operation, request(client)).await;
            // Without a user any refusal may mean that there are users now.
            let is_nobody = !is_user && self.options.credentials.is_some();
            let drops = |error: &StoreError| {
                wants_connection(error) || is_nobody && matches!(error, StoreError::Refused { .. })
            };
            if result.as_ref().is_err_and(drops) {
                // Not its successor: the failure may be late.
                let mut session = self.session.lock().await;
                session.take_if(|session| session.number == number);
            }
            result
        });
        self.calls.unless_moved(operation, request).await
    }

    /// As `call`, once more on another connection if the first was of no use. For reads only: a
    /// write that got no answer may have happened.
    pub(super) async fn read<T, F: Future<Output = Result<T, EtcdError>>>(
        &self,
        operation: &'static str,
        request: impl Fn(Client) -> F,
    ) -> StoreResult<T> {
        let connected = self.session.lock().await.is_some();
        match self.call(operation, &request).await {
            Err(_) if connected && self.session.lock().await.is_none() => {
                self.call(operation, &request).await
            }
            result => result,
        }
    }

    /// The entry at `path`, if there is one.
    pub(super) async fn get(
        &self,
        operation: &'static str,
        path: &str,
    ) -> StoreResult<Option<KeyValue>> {
        let get = |mut client: Client| async move { client.get(path, None).await };
        Ok(self.read(operation, get).await?.kvs().first().cloned())
    }

    /// Does the `writes` if the entry at `path` is as of `revision`, 0 for none, and the
    /// `conditions` hold. Gives the store's revision after that; else what is there.
    pub(super) async fn compare_and_swap(
        &self,
        operation: &'static str,
        path: &str,
        revision: i64,
        conditions: impl IntoIterator<Item = Compare>,
        writes: impl IntoIterator<Item = TxnOp>,
    ) -> StoreResult<Result<i64, Option<KeyValue>>> {
        let unchanged = Compare::mod_revision(path, CompareOp::Equal, revision);
        let conditions: Vec<_> = std::iter::once(unchanged).chain(conditions).collect();
        let look = TxnOp::get(path, None);
        let writes: Vec<_> = writes.into_iter().collect();
        let transaction = Txn::new().when(conditions).and_then(writes).or_else([look]);
        let commit = |mut client: Client| async move { client.txn(transaction).await };
        let done = self.call(operation, commit).await?;
        if done.succeeded() {
            return Ok(Ok(done.header().map_or(0, ResponseHeader::revision)));
        }
        match done.op_responses().first() {
            Some(TxnOpResponse::Get(found)) => Ok(Err(found.kvs().first().cloned())),
            _ => Ok(Err(None)),
        }
    }

    /// Forgets the connection: its endpoint misbehaves in a way that only a stream showed.
    pub(super) async fn reset(&self) {
        *self.session.lock().await = None;
    }

    async fn session(&self, operation: &'static str) -> StoreResult<Session> {
        // Held while connecting: a second caller waits for the same connection.
        let mut slot = self.session.lock().await;
        let moves = self.calls.moves();
        if let Some(session) = slot.as_ref().filter(|session| session.moves == moves) {
            return Ok(session.clone());
        }
        let (client, is_user) = self.first_that_answers(operation).await?;
        let session = Session { client, is_user, number: fastrand::u64(..), moves };
        *slot = Some(session.clone());
        Ok(session)
    }

    /// Also whether it is logged in.
    async fn first_that_answers(&self, operation: &'static str) -> StoreResult<(Client, bool)> {
        let probe = async |(place, endpoint): (usize, &String)| {
            self.probe(operation, endpoint).await.map_err(|error| (place, error))
        };
        let mut probes: FuturesUnordered<_> =
            self.options.endpoints.iter().enumerate().map(probe).collect();
        let mut failures = Vec::new();
        while let Some(result) = probes.next().await {
            match result {
                Ok(found) => return Ok(found),
                Err(failure) => failures.push(failure),
            }
        }
        Err(sum_up(operation, failures))
    }

    async fn probe(&self, operation: &'static str, endpoint: &str) -> StoreResult<(Client, bool)> {
        let unavailable = |detail: String| {
            let advice = advice(&detail).map(|advice| advice + ": ").unwrap_or_default();
            StoreError::unavailable(operation, format!("{endpoint}: {advice}{detail}"))
        };
        // Read anew for each connection: certificates are rotated on disk.
        let options = connect_options(&self.options, endpoint)
            .map_err(|error| unavailable(with_causes(&error)))?;
        let attempt = async {
            let (mut client, is_user) = self.log_in(endpoint, options).await?;
            // A read that needs the quorum: an endpoint cut off from its cluster must not win.
            let count = GetOptions::new().with_count_only();
            match client.get(self.path("config"), Some(count)).await {
                Ok(found) => {
                    let cluster = found.header().map_or(0, ResponseHeader::cluster_id);
                    self.cluster.store(cluster, Ordering::Relaxed);
                }
                // The endpoint is well. Whoever needs the key hears the same; to connect anew,
                // and so to log in each time, would change nothing.
                Err(EtcdError::GRpcStatus(status)) if status.message().contains(NO_PERMISSION) => {}
                Err(error) => return Err(error),
            }
            Ok::<_, EtcdError>((client, is_user))
        };
        match bounded(operation, attempt).await {
            Err(StoreError::Unavailable { detail, .. }) => Err(unavailable(detail)),
            answered => answered.inspect(|_| debug!("Using etcd endpoint {endpoint}")),
        }
    }

    /// Connects, logged in if there are credentials, and returns whether it is. Like flanneld's
    /// client it goes on without a user where etcd's authentication is off.
    async fn log_in(
        &self,
        endpoint: &str,
        options: ConnectOptions,
    ) -> Result<(Client, bool), EtcdError> {
        let Some(Credentials { username, password }) = &self.options.credentials else {
            return Ok((Client::connect([endpoint], Some(options)).await?, false));
        };
        let as_user = options
            .clone()
            .with_user(username, &password.0)
            // Only after a token that is not valid any more.
            .with_auto_token_refresh(true);
        match Client::connect([endpoint], Some(as_user)).await {
            Err(EtcdError::GRpcStatus(status)) if status.message().contains(NO_AUTHENTICATION) => {
                debug!("{endpoint} has its authentication off; going on without a user");
                Ok((Client::connect([endpoint], Some(options)).await?, false))
            }
            result => Ok((result?, true)),
        }
    }
}

/// Whether another connection, and with it another login, may help after `error`. What a user may
/// not do, or a store that is full, is the same on each.
pub(super) fn wants_connection(error: &StoreError) -> bool {
    if let StoreError::Refused { detail, .. } = error {
        return LOGIN_REFUSALS.iter().any(|refusal| detail.contains(refusal));
    }
    !error.store_answered()
}

/// One error for all endpoints, whose places come with what they failed of. In the order of the
/// endpoints, not of their answers: one that is repeated must look the same, to be suppressed.
fn sum_up(operation: &'static str, mut failures: Vec<(usize, StoreError)>) -> StoreError {
    failures.sort_by_key(|(place, _)| *place);
    let mut details = Vec::new();
    for (_, failure) in failures {
        let StoreError::Unavailable { detail, .. } = failure else {
            // An endpoint with a reason is worth more than one without an answer.
            return failure;
        };
        details.push(detail);
    }
    StoreError::unavailable(operation, details.join("; "))
}

async fn bounded<T>(
    operation: &'static str,
    request: impl Future<Output = Result<T, EtcdError>>,
) -> StoreResult<T> {
    let no_answer = || format!("no answer within {REQUEST_TIMEOUT:?}");
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(answer) => answer.map_err(|error| classify(operation, &error)),
        Err(_elapsed) => Err(StoreError::unavailable(operation, no_answer())),
    }
}

/// Separates what may be retried from what an operator has to change.
pub(super) fn classify(operation: &'static str, error: &EtcdError) -> StoreError {
    let EtcdError::GRpcStatus(status) = error else {
        return StoreError::unavailable(operation, with_causes(error));
    };
    let said = |marker: &str| status.message().contains(marker);
    if said("required revision has been compacted") {
        return StoreError::HistoryLost;
    }
    // Not its Display, which shows the cause in Rust's debug notation.
    let detail = described(status.message().to_owned(), std::error::Error::source(status));
    told(operation, detail)
}

/// The failure that etcd told in the words of `detail`: with what an operator has to do about it,
/// if it is a refusal.
pub(super) fn told(operation: &'static str, detail: String) -> StoreError {
    match refusal_advice(&detail) {
        Some(advice) => StoreError::Refused { operation, detail: format!("{detail}; {advice}") },
        None => StoreError::unavailable(operation, detail),
    }
}

fn refusal_advice(message: &str) -> Option<&'static str> {
    if message.contains(NO_PERMISSION) {
        return Some("give the user's role read and write permission on --etcd-prefix");
    }
    if message.contains("database space exceeded") {
        return Some(SPACE_ADVICE);
    }
    let is_login = LOGIN_REFUSALS.iter().any(|refusal| message.contains(refusal));
    is_login.then_some("check --etcd-username and --etcd-password")
}

fn connect_options(options: &EtcdOptions, endpoint: &str) -> Result<ConnectOptions, ConnectError> {
    // The watch is a stream that is always open, so pings never stop while they matter; etcd
    // cuts clients that ping without a stream.
    let connect = ConnectOptions::new()
        .with_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1)
        .with_keep_alive_while_idle(false)
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_require_leader(true);
    // The options have nothing but http and https.
    if endpoint.starts_with("https:") {
        return Ok(connect.with_tls(tls_options(options)?));
    }
    Ok(connect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do_whatever_words_are_around_it() {
        for reason in ["etcdserver: permission denied", "rpc error: desc = invalid auth token"] {
            let error = told("watching leases", format!("the server cancelled it: {reason}"));
            let advice = refusal_advice(reason).expect("it is a refusal");
            assert!(
                matches!(&error, StoreError::Refused { detail, .. } if detail.ends_with(advice)),
                "an operator is not told what to change: {error}"
            );
        }
        let other = told("watching leases", "the server cancelled it: no leader".to_owned());
        assert!(!other.store_answered(), "{other}: the next endpoint is not tried");
    }

    #[test]
    fn failures_are_listed_in_endpoint_order() {
        let operation = "listing leases";
        let down = |place: usize| {
            let detail = format!("endpoint {place}: no answer");
            (place, StoreError::Unavailable { operation, detail })
        };
        let text = sum_up(operation, vec![down(2), down(0), down(1)]).to_string();
        assert_eq!(text, sum_up(operation, vec![down(1), down(2), down(0)]).to_string());
        assert!(
            text.ends_with("endpoint 0: no answer; endpoint 1: no answer; endpoint 2: no answer")
        );
        let refused =
            (1, StoreError::Refused { operation, detail: "permission denied".to_owned() });
        let error = sum_up(operation, vec![down(2), refused, down(0)]);
        assert!(matches!(error, StoreError::Refused { .. }), "{error}");
    }
}

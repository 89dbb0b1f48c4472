//! Requests to the Kubernetes API: server, credentials, timeouts, and when to retry. The store
//! interprets the answers.

use std::error::Error;
use std::sync::Mutex;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::header::{HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, Client, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{Request as Api, Status, request};
use kube::{Config, Error as KubeError};
use tokio::time::{Instant, sleep_until, timeout};
use tower::{BoxError, ServiceBuilder};

use super::calls::Calls;
use crate::config::kube::KubeOptions;
use crate::control::error::{ConnectError, StoreError, StoreResult};
use crate::control::own_thread::Resolver;
use crate::failure::{lock, with_causes};

/// Largest single object. etcd takes requests of 1.5 MiB, which JSON spells longer.
pub(super) const ITEM_BYTES_MAX: usize = 4 * 1024 * 1024;
/// How long an answer may take, from the connection to the last byte: a page of a list in a large
/// cluster takes a server in trouble some seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection may take: three tries of TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP keepalive of an idle connection: a watch notices within 20 s that
/// its server is gone.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(3), 3);
/// Longest that a server can make this node wait; a longer one is a mistake.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);
/// Longest addition to the wait, as a share of it: all nodes got the same answer.
const RETRY_AFTER_SPREAD: f64 = 0.5;
/// Longest error that is read.
const ERROR_BYTES_MAX: usize = 64 * 1024;
/// Longest part of it that is shown.
const SHOWN_CHARACTERS_MAX: usize = 300;

/// A way to the API.
pub(super) struct Connection {
    /// Names the files that say who the server is and who we are.
    pub(super) options: KubeOptions,
    /// Host and port of the server, for who has to find out why it does not answer.
    pub(super) server: String,
    pub(super) calls: Calls,
    /// Built from these files when they were last read, and how often this host had moved then.
    client: Mutex<(Client, u64)>,
    /// The server asked not to be asked before.
    not_before: Mutex<Option<Instant>>,
}

/// A request as kube builds it.
pub(super) type Built = Result<Request<Vec<u8>>, request::Error>;

/// Builds requests about Nodes.
pub(super) fn nodes() -> Api {
    Api::new("/api/v1/nodes")
}

impl Connection {
    /// Reads who the server is and who we are. It need not be reachable yet.
    pub(super) async fn open(options: &KubeOptions) -> Result<Self, ConnectError> {
        let client = Mutex::new((new_client(options).await?, 0));
        let url = config(options).await?.cluster_url;
        let port = url.port_u16().map_or_else(String::new, |port| format!(":{port}"));
        let server = url.host().unwrap_or_default().to_owned() + &port;
        let (options, calls) = (options.clone(), Calls::default());
        Ok(Self { options, server, calls, client, not_before: Mutex::default() })
    }

    /// `detail` of a failure that files may be the cause of, after they were read again: a token or
    /// an authority that is replaced is used with the next request. kube's client looks at a
    /// token's file once a minute, by the wall clock, and never again at an authority's.
    async fn renewed(&self, detail: String) -> String {
        let moves = self.calls.moves();
        match new_client(&self.options).await {
            Ok(client) => {
                *lock(&self.client) = (client, moves);
                detail
            }
            Err(error) => format!("{detail}; and {}", with_causes(&error)),
        }
    }

    /// Asks, and waits for an answer that is no error.
    pub(super) async fn ask(
        &self,
        operation: &'static str,
        request: Built,
    ) -> StoreResult<Response<Body>> {
        let unavailable = |detail: String| StoreError::unavailable(operation, detail);
        let asked = async {
            let request = request.map_err(|error| unavailable(with_causes(&error)))?;
            let wait = *lock(&self.not_before);
            if let Some(wait) = wait {
                sleep_until(wait).await;
            }
            let client = || lock(&self.client).clone();
            if client().1 != self.calls.moves() {
                self.renewed(String::new()).await;
            }
            let client = client().0;
            let answer = match bounded(operation, client.send(request.map(Body::from))).await? {
                Ok(answer) if answer.status().is_success() => return Ok(answer),
                Ok(answer) => answer,
                Err(error) => return Err(unavailable(self.renewed(with_causes(&error)).await)),
            };
            let (parts, body) = answer.into_parts();
            let text = read(operation, body, ERROR_BYTES_MAX).await.unwrap_or_default();
            let mut status = status(&text);
            if parts.status == StatusCode::UNAUTHORIZED {
                status.message = self.renewed(status.message).await;
            }
            Err(self.refusal(operation, parts.status, &parts.headers, &status))
        };
        self.calls.unless_moved(operation, asked).await
    }

    /// As `ask`, for an answer that is read as a whole.
    pub(super) async fn ask_whole(
        &self,
        operation: &'static str,
        request: Built,
        bytes_max: usize,
    ) -> StoreResult<Vec<u8>> {
        let body = self.ask(operation, request).await?.into_body();
        self.calls.unless_moved(operation, read(operation, body, bytes_max)).await
    }

    /// What an error of the API means, which came as a `code` or in a watch.
    pub(super) fn refusal(
        &self,
        operation: &'static str,
        code: StatusCode,
        headers: &HeaderMap,
        status: &Status,
    ) -> StoreError {
        let message: String = status.message.chars().take(SHOWN_CHARACTERS_MAX).collect();
        let detail = format!("{code}: {message}");
        match code {
            StatusCode::GONE => return StoreError::HistoryLost,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let detail = format!("{detail}; check the account's token and its role");
                return StoreError::Refused { operation, detail };
            }
            StatusCode::NOT_FOUND => {}
            _ => self.note_retry_after(headers, status),
        }
        StoreError::unavailable(operation, detail)
    }

    fn note_retry_after(&self, headers: &HeaderMap, status: &Status) {
        let header = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let body = status.details.as_ref().map(|details| details.retry_after_seconds.into());
        let Some(seconds) = header.or(body).filter(|seconds: &u64| *seconds > 0) else { return };
        let wait = Duration::from_secs(seconds).min(RETRY_AFTER_MAX);
        let wait = wait.mul_f64(1.0 + RETRY_AFTER_SPREAD * fastrand::f64());
        let until = Instant::now() + wait;
        *lock(&self.not_before) = Some(until);
    }
}

async fn bounded<T>(operation: &'static str, answer: impl Future<Output = T>) -> StoreResult<T> {
    let no_answer = || format!("no answer within {REQUEST_TIMEOUT:?}");
    let answer = timeout(REQUEST_TIMEOUT, answer).await;
    answer.map_err(|_elapsed| StoreError::unavailable(operation, no_answer()))
}

async fn read(operation: &'static str, body: Body, bytes_max: usize) -> StoreResult<Vec<u8>> {
    let whole = bounded(operation, Limited::new(body, bytes_max).collect()).await?;
    let failed = |error: BoxError| {
        let why = with_causes(error.as_ref());
        let detail = format!("the answer, of at most {bytes_max} bytes: {why}");
        StoreError::unavailable(operation, detail)
    };
    Ok(whole.map_err(failed)?.to_bytes().to_vec())
}

/// Reads an error's body. What stands before the API's own handlers, such as its limit of requests,
/// writes plain text.
fn status(text: &[u8]) -> Status {
    serde_json::from_slice(text).unwrap_or_else(|_not_json| Status {
        message: String::from_utf8_lossy(text).trim().to_owned(),
        ..Status::default()
    })
}

/// flannel's order: the file and the URL, which wins over the file's; else the service account.
async fn config(options: &KubeOptions) -> Result<Config, ConnectError> {
    let parse = |text: &String| {
        text.parse::<Uri>().map_err(|error| wrong(format!("--kube-api-url {text:?}: {error}")))
    };
    let url = options.api_url.as_ref().map(parse).transpose()?;
    match (&options.kubeconfig, url) {
        (None, None) => Config::incluster().map_err(|error| {
            let why = with_causes(&error);
            wrong(format!("{why}; outside of a pod, give --kubeconfig-file or --kube-api-url"))
        }),
        (None, Some(url)) => Ok(Config::new(url)),
        (Some(path), url) => {
            let bad = |why: &str| wrong(format!("{}: {why}", path.display()));
            let unusable = |error: KubeconfigError| {
                // Not the file's own text, of which a part may be a secret.
                let is_text = matches!(error, KubeconfigError::Parse(_));
                let not_yaml = || "it is not the YAML of a kubeconfig".to_owned();
                bad(&if is_text { not_yaml() } else { with_causes(&error) })
            };
            let file = Kubeconfig::read_from(path).map_err(unusable)?;
            let of_context = KubeConfigOptions::default();
            let config = Config::from_custom_kubeconfig(file, &of_context).await;
            let mut config = config.map_err(unusable)?;
            if config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some() {
                return Err(bad(
                    "its user logs in by running a program, which weftd never does: give that \
                     user a token, a token file or a client certificate",
                ));
            }
            if config.proxy_url.is_some() {
                return Err(bad("a proxy-url is not built into this weftd"));
            }
            config.cluster_url = url.unwrap_or(config.cluster_url);
            Ok(config)
        }
    }
}

fn wrong(detail: String) -> ConnectError {
    ConnectError(format!("fail to create kubernetes config: {detail}"))
}

async fn new_client(options: &KubeOptions) -> Result<Client, ConnectError> {
    let mut config = config(options).await?;
    let us = HeaderValue::from_static(concat!("weftd/", env!("CARGO_PKG_VERSION")));
    config.headers.push((USER_AGENT, us));
    client(&config).map_err(|error| wrong(with_causes(error.as_ref())))
}

fn client(config: &Config) -> Result<Client, Box<KubeError>> {
    let mut connector = HttpConnector::new_with_resolver(Resolver);
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let (idle, interval, retries) = KEEPALIVE;
    connector.set_keepalive(Some(idle));
    connector.set_keepalive_interval(Some(interval));
    connector.set_keepalive_retries(Some(retries));
    let connector = config.rustls_https_connector_with_connector(connector)?;
    let client = HttpClient::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(|error| -> BoxError { Box::<dyn Error + Send + Sync>::from(error) })
        .service(client);
    Ok(Client::new(service, config.default_namespace.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_errors_are_parsed() {
        let gone = status(
            br#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",
                "message":"too old: 3 (9)","reason":"Expired","code":410}"#,
        );
        assert_eq!((gone.code, gone.message.as_str()), (410, "too old: 3 (9)"));
        let busy = status(br#"{"message":"","details":{"retryAfterSeconds":4},"code":429}"#);
        assert_eq!(busy.details.unwrap().retry_after_seconds, 4);
        let crowded = status(b"Slow down.\n");
        assert_eq!(crowded.message, "Slow down.");
    }
}

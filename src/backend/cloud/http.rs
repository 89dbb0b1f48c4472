//! Requests to a cloud's metadata service and to its API: bounded in time and size, each once.
//! What an answer means is for the provider's file.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::USER_AGENT;
use hyper::http::request::Builder;
use hyper::{Method, Request, StatusCode};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::TokioExecutor;
use tokio::time::timeout;

use super::error::CloudError;
use super::provider::filled;
use crate::backend_kind::BackendKind;
use crate::control::own_thread::Resolver;
use crate::failure::with_causes;

/// How long an answer may take. Waiting for longer than AWS's own tools do is of no use: the next
/// try comes in any case.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The same of the metadata service, which is on the same host and answers in milliseconds.
const METADATA_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a connection may take: three tries of TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest answer that is read. A route of a table has some 500 bytes of XML, and the largest
/// table of any provider 1,000 routes; room for several such tables.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// An answer, whatever its status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// The client. One is made for each round of requests, so that authorities are read anew and no
/// connection stays open for the minutes between two rounds.
pub(super) struct Http(Box<dyn Fn(Request<Full<Bytes>>) -> ResponseFuture + Send + Sync>);

impl Http {
    pub(super) fn new() -> Result<Self, CloudError> {
        let mut connector = HttpConnector::new_with_resolver(Resolver);
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let roots = HttpsConnectorBuilder::new().with_native_roots().map_err(|error| {
            CloudError::Unusable(format!(
                "this host has no certificates of authorities, without which no cloud can be \
                 trusted: install ca-certificates ({})",
                with_causes(&error)
            ))
        })?;
        let connector = roots.https_or_http().enable_http1().wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self(Box::new(move |request| client.request(request))))
    }

    /// Asks for `operation`. `url` must hold no secret: it is shown.
    pub(super) async fn ask(
        &self,
        operation: &str,
        request: Builder,
        body: String,
    ) -> Result<Answer, CloudError> {
        self.send(operation, request, body, ANSWER_TIMEOUT).await
    }

    /// What the metadata service has at `url`; `None` if it has nothing there.
    pub(super) async fn metadata(
        &self,
        method: Method,
        url: &str,
        header: Option<(&str, &str)>,
    ) -> Result<Option<String>, CloudError> {
        let mut request = Request::builder().method(method).uri(url);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let path = url.split('/').skip(3).collect::<Vec<_>>().join("/");
        let operation = format!("the metadata service's {path}");
        let answer = self.send(&operation, request, String::new(), METADATA_TIMEOUT).await?;
        match answer.status {
            StatusCode::OK => Ok(Some(answer.text())),
            status if status.is_client_error() => Ok(None),
            status => {
                let of = (operation.as_str(), "");
                Err(CloudError::refused(of, status.as_u16(), "", "the service is in trouble"))
            }
        }
    }

    /// The same of what every instance of the cloud with this backend has.
    pub(super) async fn own(
        &self,
        kind: BackendKind,
        url: &str,
        header: Option<(&str, &str)>,
    ) -> Result<String, CloudError> {
        filled(self.metadata(Method::GET, url, header).await?).ok_or_else(|| {
            let path = url.split('/').skip(3).collect::<Vec<_>>().join("/");
            let text = format!("the metadata service has no {path}: {kind} runs in its cloud only");
            CloudError::Unusable(text)
        })
    }

    async fn send(
        &self,
        operation: &str,
        request: Builder,
        body: String,
        patience: Duration,
    ) -> Result<Answer, CloudError> {
        let us = concat!("weftd/", env!("CARGO_PKG_VERSION"));
        let request = request.header(USER_AGENT, us).body(Full::from(body));
        let request = request.map_err(|error| {
            CloudError::Unusable(format!("{operation}: no request can be made of it: {error}"))
        })?;
        let host = request.uri().authority().map_or_else(String::new, ToString::to_string);
        let no_answer = |why: String| CloudError::NoAnswer {
            operation: operation.to_owned(),
            host: host.clone(),
            why,
        };
        let answered = async {
            let (head, body) = (self.0)(request)
                .await
                .map_err(|error| no_answer(with_causes(&error)))?
                .into_parts();
            let whole = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let whole = whole.map_err(|error| no_answer(with_causes(error.as_ref())))?;
            Ok(Answer { status: head.status, body: whole.to_bytes() })
        };
        match timeout(patience, answered).await {
            Ok(answered) => answered,
            Err(_elapsed) => Err(no_answer(format!("nothing within {} s", patience.as_secs()))),
        }
    }
}

/// What an environment variable says, if it says anything.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Where an API is, unless the environment names another place, such as a private endpoint.
pub(super) fn endpoint(otherwise: &str) -> String {
    let given = variable("WEFTD_CLOUD_ENDPOINT").unwrap_or_else(|| otherwise.to_owned());
    given.trim_end_matches('/').to_owned()
}

/// The same of the metadata service.
pub(super) fn metadata_base(otherwise: &str) -> String {
    let given = variable("WEFTD_CLOUD_METADATA").unwrap_or_else(|| otherwise.to_owned());
    given.trim_end_matches('/').to_owned()
}

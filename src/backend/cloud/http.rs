//! Requests to a cloud's metadata service and to its API: bounded in time and size, each once.
//! What an answer means is for the provider's file.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::header::{DATE, HeaderMap, HeaderName, LOCATION, USER_AGENT};
use hyper::http::request::Builder;
use hyper::{Method, Request, StatusCode, Uri};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::TokioExecutor;
use jiff::Timestamp;
use tokio::time::timeout;

use super::error::{CloudError, is_throttling, visible};
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

/// An answer, whatever its status. It may have secrets, so it can't be shown.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    date: Option<String>,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The text of what `whom` has done; an error if the answer is not of its making.
    pub(super) fn done(
        &self,
        operation: &str,
        whom: &str,
        is_its: bool,
    ) -> Result<String, CloudError> {
        let text = self.text();
        match is_its {
            true => Ok(text),
            false => Err(CloudError::of_stranger(operation, whom, self.status.as_u16(), &text)),
        }
    }

    /// That `whom` refuses this operation with this permission, by the code and message in the
    /// answer; if there are none, `whom` has not answered.
    pub(super) fn refused(
        &self,
        (operation, permission): (&str, &str),
        whom: &str,
        (code, message): (&str, &str),
    ) -> CloudError {
        let (status, text) = (self.status.as_u16(), self.text());
        let is_readable = !(code.is_empty() && message.is_empty());
        if !is_readable && !text.trim().is_empty() && !is_throttling(status) {
            return CloudError::of_stranger(operation, whom, status, &text);
        }
        CloudError::refused((operation, permission), status, code, message)
            .by_date(self.date.as_deref(), Timestamp::now())
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

    /// Asks an API. Errors show the `operation`, and of the address the host alone.
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
        let operation = format!("the metadata service's {}", path(url));
        self.metadata_named(&operation, method, url, header).await
    }

    /// The same, called so in errors: the path of a container's credentials is a secret.
    pub(super) async fn metadata_named(
        &self,
        operation: &str,
        method: Method,
        url: &str,
        header: Option<(&str, &str)>,
    ) -> Result<Option<String>, CloudError> {
        let is_for_token = method == Method::PUT;
        let mut request = Request::builder().method(method).uri(url);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let answer = self.send(operation, request, String::new(), METADATA_TIMEOUT).await?;
        match answer.status {
            StatusCode::OK if answer.text().trim_start().starts_with('<') => {
                let (whom, text) = ("the metadata service", answer.text());
                Err(CloudError::of_stranger(operation, whom, answer.status.as_u16(), &text))
            }
            StatusCode::OK => Ok(Some(answer.text())),
            status if is_absent(is_for_token, status) => Ok(None),
            status => Err(CloudError::of_metadata(operation, status.as_u16())),
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
            CloudError::Unusable(format!(
                "the metadata service has no {}: {kind} runs in its cloud only",
                path(url)
            ))
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
        let host = shown_host(request.uri());
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
            let header = |name| visible_header(&head.headers, name);
            if head.status.is_redirection() {
                return Err(CloudError::Unusable(format!(
                    "{operation}: {host} answers that {} has it (HTTP {}), which weftd does not \
                     follow: is there a proxy, or a page to log in at, on the way?",
                    header(LOCATION).unwrap_or_else(|| "another place".to_owned()),
                    head.status.as_u16()
                )));
            }
            let whole = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let whole = whole.map_err(|error| match error.is::<LengthLimitError>() {
                true => CloudError::Unusable(format!(
                    "{operation}: {host} answers with more than {ANSWER_BYTES_MAX} bytes, which \
                     no cloud does: weftd has not read it"
                )),
                false => no_answer(with_causes(error.as_ref())),
            })?;
            Ok(Answer { status: head.status, body: whole.to_bytes(), date: header(DATE) })
        };
        match timeout(patience, answered).await {
            Ok(answered) => answered,
            Err(_elapsed) => Err(no_answer(format!("nothing within {} s", patience.as_secs()))),
        }
    }
}

/// What a header says, without what a terminal would obey.
fn visible_header(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    let value = headers.get(name)?;
    Some(visible(&String::from_utf8_lossy(value.as_bytes())))
}

/// What of a URL follows its host.
fn path(url: &str) -> String {
    url.split('/').skip(3).collect::<Vec<_>>().join("/")
}

/// Whether the metadata service has nothing there; where it gives no tokens, it says so in several
/// ways.
fn is_absent(is_for_token: bool, status: StatusCode) -> bool {
    match status.as_u16() {
        404 => true,
        400 | 403 | 405 => is_for_token,
        _ => false,
    }
}

/// Host and port, without the name and password that an endpoint may be given with.
fn shown_host(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |it| it.as_str());
    authority.rsplit('@').next().unwrap_or_default().to_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_of_an_endpoint_is_not_shown() {
        let of = |url: &str| shown_host(&url.parse().unwrap());
        assert_eq!(of("https://user:s3cret@ec2.example.org:8443/"), "ec2.example.org:8443");
        assert_eq!(of("http://[fd00::1]:80/x"), "[fd00::1]:80");
    }

    #[test]
    fn only_what_is_not_there_is_absent() {
        for status in [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::BAD_REQUEST] {
            assert!(!is_absent(false, status), "{status}: something else is wrong");
        }
        assert!(is_absent(false, StatusCode::NOT_FOUND));
        assert!(is_absent(true, StatusCode::FORBIDDEN), "version 1 is not asked");
        assert!(!is_absent(true, StatusCode::SERVICE_UNAVAILABLE));
    }
}

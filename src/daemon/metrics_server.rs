//! `/metrics` on an address of its own, for a Prometheus that is elsewhere.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::daemon::http::{self, Handler};

/// Of Prometheus' text format.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Before an address that is taken is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Answers with `metrics` for ever; drop the future to stop. An address that can't be had is tried
/// again: nobody's packets depend on it.
pub(super) async fn serve(
    address: SocketAddr,
    metrics: impl Fn() -> String + Send + Sync + 'static,
) -> Infallible {
    let listener = listen(address).await;
    info!("Metrics on http://{address}/metrics");
    let handler: Handler = Arc::new(move |request| match request.uri().path() {
        "/metrics" => http::reply(StatusCode::OK, CONTENT_TYPE, metrics()),
        _ => http::not_found(),
    });
    http::serve(async || Ok(listener.accept().await?.0), handler).await
}

async fn listen(address: SocketAddr) -> TcpListener {
    let mut is_told = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) if !is_told => {
                warn!("cannot listen on {address} for metrics: {error}: see --metrics-address");
                is_told = true;
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}

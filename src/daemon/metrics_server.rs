//! `/metrics` on an address of its own, for a Prometheus that is elsewhere.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::daemon::http::{self, Handler};
use crate::failure::LogOnce;

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
        "/metrics" => http::metrics(metrics()),
        _ => http::not_found(),
    });
    http::serve(async || Ok(listener.accept().await?.0), handler).await
}

async fn listen(address: SocketAddr) -> TcpListener {
    let mut told = LogOnce::default();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => told.once(&error.to_string(), |error| {
                warn!("cannot listen on {address} for metrics: {error}: see --metrics-address");
            }),
        }
        sleep(RETRY).await;
    }
}

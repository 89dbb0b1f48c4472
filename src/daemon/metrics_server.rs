//! `/metrics` on an address of its own, for a Prometheus that is elsewhere.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use tracing::info;

use crate::daemon::http::{self, Handler};

/// Answers with `metrics` for ever; drop the future to stop. An address that can't be had is tried
/// again: nobody's packets depend on it.
pub(super) async fn serve(
    address: SocketAddr,
    metrics: impl Fn() -> String + Send + Sync + 'static,
) -> Infallible {
    let listen = async || http::listen(address, "metrics", "--metrics-address").await;
    let listener = http::patiently(listen).await;
    info!("Metrics on http://{address}/metrics");
    let handler: Handler = Arc::new(move |request| match request.uri().path() {
        "/metrics" => http::metrics(metrics()),
        _ => http::not_found(),
    });
    http::serve(async || Ok(listener.accept().await?.0), handler).await
}

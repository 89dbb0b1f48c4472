//! `/healthz` and `/readyz`, as load balancers and kubelets ask flanneld for them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hyper::StatusCode;
use tokio::net::TcpListener;

use crate::daemon::http::{self, Handler, Reply};

/// Whether subnet.env is written and the backend runs. Clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Sets what `/readyz` answers from now on.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Relaxed);
    }

    /// What `/readyz` answers.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why there are no health checks.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for health checks: see --healthz-ip and --healthz-port")]
pub struct HealthError {
    /// Where.
    address: SocketAddr,
    /// Why.
    #[source]
    source: io::Error,
}

/// The health server, listening.
#[derive(Debug)]
pub struct HealthServer {
    listener: TcpListener,
}

impl HealthServer {
    /// Listens on `address`.
    pub async fn bind(address: SocketAddr) -> Result<Self, HealthError> {
        let listener = TcpListener::bind(address).await;
        listener.map(|listener| Self { listener }).map_err(|source| HealthError { address, source })
    }

    /// Answers for ever; drop the future to stop. `/healthz` is green as soon as this runs.
    pub async fn serve(self, readiness: Readiness) -> Infallible {
        let handler: Handler = Arc::new(move |_method, path| answer(path, readiness.is_ready()));
        http::serve(self.listener, handler).await
    }
}

fn answer(path: &str, ready: bool) -> Reply {
    match (path, ready) {
        ("/healthz", _) => Reply::text(StatusCode::OK, "flanneld is running"),
        ("/readyz", true) => Reply::text(StatusCode::OK, "flanneld is ready"),
        ("/readyz", false) => {
            Reply::text(StatusCode::SERVICE_UNAVAILABLE, "flanneld is not ready yet")
        }
        _ => Reply::not_found(),
    }
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;

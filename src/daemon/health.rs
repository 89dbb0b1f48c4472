//! `/healthz` and `/readyz`, as load balancers and kubelets ask flanneld for them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context;
use hyper::StatusCode;
use tokio::net::TcpListener;

use crate::control::clock::unix_seconds;
use crate::daemon::http::{self, Handler, Reply};

/// Whether subnet.env is written and the backend runs. Clones share the state.
#[derive(Debug, Clone)]
pub(super) struct Readiness(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    is_ready: AtomicBool,
    since_unix: AtomicU64,
}

impl Default for Readiness {
    fn default() -> Self {
        let since_unix = AtomicU64::new(unix_seconds());
        Self(Arc::new(Shared { is_ready: AtomicBool::new(false), since_unix }))
    }
}

impl Readiness {
    /// Sets what `/readyz` answers from now on.
    pub(super) fn set(&self, ready: bool) {
        if self.0.is_ready.swap(ready, Ordering::Relaxed) != ready {
            self.0.since_unix.store(unix_seconds(), Ordering::Relaxed);
        }
    }

    /// What `/readyz` answers.
    pub(super) fn is_ready(&self) -> bool {
        self.0.is_ready.load(Ordering::Relaxed)
    }

    /// Since when it answers that, in seconds since 1970.
    pub(super) fn since_unix(&self) -> u64 {
        self.0.since_unix.load(Ordering::Relaxed)
    }
}

/// The health server, listening.
#[derive(Debug)]
pub(super) struct HealthServer {
    listener: TcpListener,
}

impl HealthServer {
    /// Listens on `address`.
    pub(super) async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!(
                "cannot listen on {address} for health checks: see --healthz-ip and --healthz-port"
            )
        })?;
        Ok(Self { listener })
    }

    /// Answers for ever; drop the future to stop. `/healthz` is green as soon as this runs.
    pub(super) async fn serve(self, readiness: Readiness) -> Infallible {
        let handler: Handler =
            { Arc::new(move |request| answer(request.uri().path(), readiness.is_ready())) };
        http::serve(async || Ok(self.listener.accept().await?.0), handler).await
    }
}

fn answer(path: &str, ready: bool) -> Reply {
    match (path, ready) {
        ("/healthz", _) => http::text(StatusCode::OK, "flanneld is running"),
        ("/readyz", true) => http::text(StatusCode::OK, "flanneld is ready"),
        ("/readyz", false) => {
            http::text(StatusCode::SERVICE_UNAVAILABLE, "flanneld is not ready yet")
        }
        _ => http::not_found(),
    }
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;

//! `/healthz` and `/readyz`, as load balancers and kubelets ask flanneld for them.

use std::convert::Infallible;
use std::net::SocketAddr;

use hyper::StatusCode;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::control::clock::unix_seconds;
use crate::daemon::http::{self, Reply};

/// Whether subnet.env is written and the backend runs, and since when, in seconds since 1970.
/// Clones share the state.
#[derive(Debug, Clone)]
pub(super) struct Readiness(watch::Sender<(bool, u64)>);

impl Default for Readiness {
    fn default() -> Self {
        Self(watch::Sender::new((false, unix_seconds())))
    }
}

impl Readiness {
    /// Sets what `/readyz` answers from now on.
    pub(super) fn set(&self, ready: bool) {
        if self.is_ready() != ready {
            self.0.send_replace((ready, unix_seconds()));
        }
    }

    /// What `/readyz` answers.
    pub(super) fn is_ready(&self) -> bool {
        self.0.borrow().0
    }

    /// Since when it answers that, in seconds since 1970.
    pub(super) fn since_unix(&self) -> u64 {
        self.0.borrow().1
    }
}

/// Listens on `address` for health checks.
pub(super) async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    http::listen(address, "health checks", "--healthz-ip and --healthz-port").await
}

/// Answers for ever at `listener`, or if there is none at `address`, as soon as that can be had;
/// drop the future to stop. `/healthz` is green as soon as this answers.
pub(super) async fn serve(
    address: SocketAddr,
    listener: Option<TcpListener>,
    readiness: Readiness,
) -> Infallible {
    let listener = match listener {
        Some(listener) => listener,
        None => http::patiently(async || listen(address).await).await,
    };
    let page = move |_: &_, path: &str| answer(path, readiness.is_ready());
    http::serve(async || Ok(listener.accept().await?.0), page).await
}

fn answer(path: &str, ready: bool) -> Option<Reply> {
    let (status, text) = match (path, ready) {
        ("/healthz", _) => (StatusCode::OK, "flanneld is running"),
        ("/readyz", true) => (StatusCode::OK, "flanneld is ready"),
        ("/readyz", false) => (StatusCode::SERVICE_UNAVAILABLE, "flanneld is not ready yet"),
        _ => return None,
    };
    Some(http::text(status, text))
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;

//! What is measured: durations, and etcd's counters.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::members::Members;

/// Durations of the same thing.
#[derive(Debug, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    /// In milliseconds.
    pub(crate) fn report(&self) -> Value {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = |percent: usize| {
            let last = sorted.len().saturating_sub(1);
            sorted.get((sorted.len() * percent / 100).min(last)).map(|it| milliseconds(*it))
        };
        json!({ "p50": at(50), "p99": at(99), "most": at(100) })
    }
}

pub(crate) fn milliseconds(took: Duration) -> f64 {
    round(took.as_secs_f64() * 1000.0)
}

pub(crate) fn kib(bytes: f64) -> f64 {
    round(bytes / 1024.0)
}

/// To a hundredth.
pub(crate) fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Sums over etcd's members.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) writes: f64,
    pub(crate) keep_alives: f64,
    pub(crate) requests: f64,
    pub(crate) received_bytes: f64,
    pub(crate) sent_bytes: f64,
}

impl Counters {
    pub(crate) fn read(members: &Members) -> Self {
        let text = members.metrics();
        let sum = |name: &str| {
            let values = text.lines().filter(|line| line.starts_with(name));
            values.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
        };
        // Each member counts what it applies.
        let applied = |name: &str| sum(name) / members.running() as f64;
        Self {
            writes: applied("etcd_mvcc_put_total"),
            keep_alives: sum("etcd_debugging_lease_renewed_total"),
            requests: sum("grpc_server_started_total"),
            received_bytes: sum("etcd_network_client_grpc_received_bytes_total"),
            sent_bytes: sum("etcd_network_client_grpc_sent_bytes_total"),
        }
    }

    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            writes: self.writes - before.writes,
            keep_alives: self.keep_alives - before.keep_alives,
            requests: self.requests - before.requests,
            received_bytes: self.received_bytes - before.received_bytes,
            sent_bytes: self.sent_bytes - before.sent_bytes,
        }
    }
}

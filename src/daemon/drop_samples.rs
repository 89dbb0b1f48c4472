//! Samples of dropped packets for `weft drops`: whoever asks wants more for two seconds.

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::backend::status::Carrier;
use crate::daemon::report::Running;
use crate::daemon::status::SCHEMA;
use crate::engine;
use crate::stats::{Sample, WorkerStats};

/// How long workers go on sampling after somebody has asked.
const WANTED_NS: u64 = 2_000_000_000;

/// Most samples in one answer, the newest: a hundred workers must not keep the control plane busy.
const SAMPLES_MAX: usize = 256;

/// Samples beyond those that `seen` has: a number for each direction of each worker, between
/// commas, as `next` gave them. If it is empty, none: what somebody else has wanted is old.
pub(super) fn json(running: Option<&Running>, seen: &str) -> Value {
    let Some(running) = running else {
        return json!({ "schema": SCHEMA, "error": "the dataplane does not run yet" });
    };
    let Carrier::Workers { stats, .. } = &running.carrier else {
        let error = format!(
            "with the backend {} the kernel carries the packets, and weftd sees none of them: \
             `ip -statistics link`, and `perf trace -e skb:kfree_skb` for single packets",
            running.kind
        );
        return json!({ "schema": SCHEMA, "error": error });
    };
    let is_first = seen.is_empty();
    let mut seen = seen.split(',').map(|number| number.parse().unwrap_or(0));
    let now_ns = engine::monotonic_ns();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_boot_ns = (since_1970.as_nanos() as u64).saturating_sub(now_ns);
    let (mut samples, mut next) = (Vec::new(), Vec::new());
    for (index, worker) in stats.iter().enumerate() {
        for (name, direction) in [("egress", &worker.egress), ("ingress", &worker.ingress)] {
            let first = if is_first { u64::MAX } else { seen.next().unwrap_or(0) };
            let (found, following) = direction.samples.read(first, now_ns + WANTED_NS);
            next.push(following.to_string());
            samples.extend(found.into_iter().map(|sample| (index, name, sample)));
        }
    }
    samples.sort_by_key(|(_, _, sample)| sample.at_ns);
    let older = samples.len().saturating_sub(SAMPLES_MAX);
    let samples = samples.iter().skip(older).map(|(worker, direction, sample)| {
        let mut json = sample_json(sample, since_boot_ns);
        (json["worker"], json["direction"]) = ((*worker).into(), (*direction).into());
        json
    });
    json!({
        "schema": SCHEMA,
        "next": next.join(","),
        "dropped": dropped(stats),
        "samples": samples.collect::<Value>(),
    })
}

fn sample_json(sample: &Sample, since_boot_ns: u64) -> Value {
    let Sample { at_ns, reason, packets, peer, length_bytes, bytes } = sample;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "at_unix_nanoseconds": since_boot_ns + at_ns,
        "reason": reason.id(),
        "packets": packets,
        "peer": peer.as_ref().map(SocketAddrV4::to_string),
        "length_bytes": length_bytes,
        "bytes": hex,
    })
}

/// All that workers dropped so far.
fn dropped(stats: &[Arc<WorkerStats>]) -> u64 {
    stats.iter().map(|worker| worker.egress.drops_total() + worker.ingress.drops_total()).sum()
}

//! Samples of dropped packets for `weft drops`: whoever asks wants more for two seconds.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::daemon::running::Running;
use crate::engine;
use crate::status::{Drops, SCHEMA, Sample, Way};
use crate::wireguard::sessions::number_of;

/// How long workers go on sampling after somebody has asked.
const WANTED_NS: u64 = 2_000_000_000;

/// Most samples in one answer, the newest: a hundred workers must not keep the control plane busy.
const SAMPLES_MAX: usize = 256;

/// Samples beyond those that `seen` has: a number for each direction of each worker, between
/// commas, as `next` gave them. If it is empty, none: what somebody else has wanted is old.
pub(super) fn read(running: Option<&Running>, seen: &str) -> Drops {
    let mut drops = Drops { schema: SCHEMA, ..Drops::default() };
    let Some(running) = running else {
        drops.error = Some("the dataplane does not run yet".to_owned());
        return drops;
    };
    let stats = &running.view.workers;
    if stats.is_empty() {
        drops.error = Some(format!(
            "with the backend {} the kernel carries the packets, and weftd sees none of them: \
             `ip -statistics link`, and `perf trace -e skb:kfree_skb` for single packets",
            running.kind
        ));
        return drops;
    }
    let is_first = seen.is_empty();
    let mut seen = seen.split(',').map(|number| number.parse().unwrap_or(0));
    let now_ns = engine::monotonic_ns();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_boot_ns = (since_1970.as_nanos() as u64).saturating_sub(now_ns);
    let mut next = Vec::new();
    for (index, worker) in stats.iter().enumerate() {
        for (way, direction) in [(Way::Egress, &worker.egress), (Way::Ingress, &worker.ingress)] {
            let first = if is_first { u64::MAX } else { seen.next().unwrap_or(0) };
            let (found, following) = direction.samples.read(first, now_ns + WANTED_NS);
            next.push(following.to_string());
            drops.dropped += direction.drops_total();
            drops.samples.extend(found.into_iter().map(|sample| Sample {
                at_unix_nanoseconds: since_boot_ns + sample.at_ns,
                direction: way,
                worker: index,
                reason: sample.reason.id().to_owned(),
                packets: sample.packets,
                // With WireGuard a peer has no address here, only what stands for it.
                peer: sample.peer.filter(|peer| number_of(*peer).is_none()),
                length_bytes: sample.length_bytes.try_into().unwrap_or(u32::MAX),
                bytes: sample.bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
            }));
        }
    }
    drops.samples.sort_by_key(|sample| sample.at_unix_nanoseconds);
    let older = drops.samples.len().saturating_sub(SAMPLES_MAX);
    drops.samples.drain(..older);
    drops.next = next.join(",");
    drops
}

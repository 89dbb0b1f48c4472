//! A status as Prometheus text.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use crate::control::rejected::RejectReason;
use crate::stats::DropReason;
use crate::status::{Backend, Direction, FastPath, Kept, Peer, Status, Store, Worker};

/// Peers that have a metric of their own, those with the most failed sends. Their number bounds
/// what a scrape costs; all failed sends are in `flannel_drops_total`.
const PEERS_MEASURED_MAX: usize = 100;

/// All that a status has, as metrics.
pub(super) fn text(status: &Status) -> String {
    let mut out = Metrics(String::new());
    out.process(status);
    out.control(status);
    out.store(&status.store);
    if let (Some(egress), Some(ingress)) = (&status.egress, &status.ingress) {
        out.workers(status);
        out.fast_path(status.fast_path.as_ref());
        out.directions([("egress", egress), ("ingress", ingress)]);
        out.failed_sends(&status.routes);
    }
    if let Some(backend) = &status.backend {
        out.plane(status, backend);
    }
    out.kept(status);
    out.0
}

/// The text under construction.
struct Metrics(String);

impl Metrics {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").ok();
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        writeln!(self.0, "{name}{labels} {value}").ok();
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl TryInto<u64>) {
        self.family(name, "gauge", help);
        self.sample(name, "", value.try_into().unwrap_or(u64::MAX));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    /// A family with one label.
    fn each<V: Display>(
        &mut self,
        [name, kind, help, label]: [&str; 4],
        samples: impl IntoIterator<Item = (impl Display, V)>,
    ) {
        self.family(name, kind, help);
        for (what, value) in samples {
            self.sample(name, &format!("{{{label}=\"{what}\"}}"), value);
        }
    }

    fn process(&mut self, status: &Status) {
        self.family("flannel_build_info", "gauge", "What runs, in labels.");
        self.sample("flannel_build_info", &format!("{{version=\"{}\"}}", status.version), 1);
        let help = "Log messages, those that were held back as well.";
        let family = ["flannel_log_messages_total", "counter", help, "level"];
        self.each(family, &status.log_messages);
        let help = "Errors in weftd's own code, which the log shows.";
        self.counter("flannel_internal_errors_total", help, status.internal_errors);
        // By the names that Prometheus' own libraries give to this.
        let Some(process) = &status.process else { return };
        let name = "process_cpu_seconds_total";
        self.family(name, "counter", "Processor time of weftd, in seconds.");
        self.sample(name, "", process.processor_seconds);
        let help = "Resident memory, in bytes.";
        self.gauge("process_resident_memory_bytes", help, process.resident_bytes);
        self.gauge("process_open_fds", "Open file descriptors.", process.open_files);
        self.gauge("process_start_time_seconds", "When weftd started.", process.start_unix);
    }

    fn control(&mut self, status: &Status) {
        self.gauge("flannel_ready", "Whether weftd is ready.", status.ready);
        let help = "Whether lease and peers are from the cache.";
        self.gauge("flannel_stale", help, status.stale);
        let help = "Whether the store has another network.";
        self.gauge("flannel_restart_needed", help, status.restart_needed);
        let help = "Times that the cache was written.";
        self.counter("flannel_cache_writes_total", help, status.cache.writes);
        let help = "Times that writing it failed.";
        self.counter("flannel_cache_failures_total", help, status.cache.failures);
        self.gauge("flannel_peers", "Nodes with a lease, this one aside.", status.peers);
        let help = "Peers kept though their leases vanished.";
        self.gauge("flannel_peers_held", help, status.peers_held);
    }

    fn store(&mut self, store: &Store) {
        self.gauge("flannel_store_up", "Whether the last store exchange succeeded.", store.up);
        let help = "Whether the store refuses a request.";
        self.gauge("flannel_store_refused", help, store.refused.is_some());
        if let Some(seconds) = store.answered_unix {
            let help = "When the store last answered.";
            self.gauge("flannel_store_last_answer_timestamp_seconds", help, seconds);
        }
        let help = "Whether the cluster assigned another subnet.";
        self.gauge("flannel_subnet_refused", help, store.subnet_refused);
        if let Some(seconds) = store.lease_expires_unix {
            let help = "When the own lease ends, unless it is renewed.";
            self.gauge("flannel_lease_expiry_timestamp_seconds", help, seconds);
        }
        self.counter("flannel_lease_renewals_total", "Renewals of the lease.", store.renewals);
        let help = "Exchanges with the store that failed.";
        self.counter("flannel_store_failures_total", help, store.failures);
        let help = "Times that somebody else wrote the own lease with this node's PublicIP.";
        self.counter("flannel_lease_written_by_others_total", help, store.written_by_others);
        let is_duplicate = store.duplicate_public_ip.is_some();
        self.gauge("flannel_duplicate_public_ip", "Whether another node has it.", is_duplicate);
        let help = "Tries that found no free subnet.";
        self.counter("flannel_subnets_exhausted_total", help, store.subnets_exhausted);
        let of = |counts: &BTreeMap<String, u64>| {
            RejectReason::NAMES.map(|(_, why)| (why, counts.get(why).copied().unwrap_or(0)))
        };
        let help = "Store entries that are not used now.";
        self.each(["flannel_store_entries_unused", "gauge", help, "why"], of(&store.unused));
        let help = "Store entries that were ignored.";
        self.each(["flannel_store_rejected_total", "counter", help, "why"], of(&store.rejected));
        let Some(requests) = &store.requests else { return };
        let name = "flannel_store_request_duration_seconds";
        self.family(name, "histogram", "How long the store took to answer, or not to.");
        let bucket = format!("{name}_bucket");
        for (seconds, count) in &requests.up_to_seconds {
            self.sample(&bucket, &format!("{{le=\"{seconds}\"}}"), count);
        }
        self.sample(&bucket, "{le=\"+Inf\"}", requests.count);
        self.sample(&format!("{name}_sum"), "", requests.seconds);
        self.sample(&format!("{name}_count"), "", requests.count);
    }

    fn workers(&mut self, status: &Status) {
        let seconds = |of: fn(&Worker) -> Option<f64>| {
            let each = status.workers.iter().map(|worker| (worker.index, of(worker)));
            each.filter_map(|(index, seconds)| Some((index, seconds?))).collect::<Vec<_>>()
        };
        let help = "Processor time of a worker.";
        let family = ["flannel_worker_cpu_seconds_total", "counter", help, "worker"];
        self.each(family, seconds(|worker| worker.ran_seconds));
        let help = "How long a worker had work and no processor.";
        let family = ["flannel_worker_wait_seconds_total", "counter", help, "worker"];
        self.each(family, seconds(|worker| worker.waited_seconds));
        let stalled = status.workers.iter().filter(|worker| worker.stalled_seconds.is_some());
        let help = "Workers that hang or get no processor.";
        self.gauge("flannel_workers_stalled", help, stalled.count());
        let help = "Subnets behind paths that are narrower than the overlay's MTU.";
        self.gauge("flannel_narrow_paths", help, status.narrow_paths);
        let Some(counts) = &status.worker else { return };
        for (name, help, count) in [
            ("flannel_receive_overflows_total", "Lost in the socket.", counts.receive_overflows),
            ("flannel_gso_fallbacks_total", "Batches sent one by one.", counts.gso_fallbacks),
            ("flannel_tun_fallbacks_total", "Super-packets cut again.", counts.tun_fallbacks),
            ("flannel_sleeps_total", "Times that a worker had nothing to do.", counts.sleeps),
            ("flannel_naps_total", "Short waits for more packets.", counts.naps),
        ] {
            self.counter(name, help, count);
        }
    }

    fn fast_path(&mut self, fast_path: Option<&FastPath>) {
        let Some(FastPath { on, why, taken, .. }) = fast_path else { return };
        self.gauge("flannel_fast_path", "Whether the kernel's programs carry packets.", *on);
        if let Some(why) = why {
            let help = "Why these programs carry none, while they don't.";
            self.each(["flannel_fast_path_off", "gauge", help, "why"], [(why, 1)]);
        }
        let help = "Packets that these programs took.";
        let family = ["flannel_fast_path_packets_total", "counter", help, "direction"];
        self.each(family, [("egress", taken.packets_sent), ("ingress", taken.packets_received)]);
        let help = "Bytes that these programs took.";
        let family = ["flannel_fast_path_bytes_total", "counter", help, "direction"];
        self.each(family, [("egress", taken.bytes_sent), ("ingress", taken.bytes_received)]);
    }

    fn directions(&mut self, directions: [(&str, &Direction); 2]) {
        type Read = fn(&Direction) -> u64;
        let families: [(&str, &str, Read); 8] = [
            ("flannel_packets_received_total", "Packets taken in.", |it| it.packets_received),
            ("flannel_packets_forwarded_total", "Packets forwarded.", |it| it.packets_forwarded),
            ("flannel_bytes_received_total", "Bytes taken in.", |it| it.bytes_received),
            ("flannel_bytes_forwarded_total", "Bytes forwarded.", |it| it.bytes_forwarded),
            ("flannel_reads_total", "Reads, super-packets and GSO batches as one.", |it| it.reads),
            ("flannel_writes_total", "Writes, super-packets and GSO batches as one.", |it| {
                it.writes
            }),
            ("flannel_icmp_sent_total", "ICMP errors sent.", |it| it.icmp_sent),
            (
                "flannel_icmp_limited_total",
                "ICMP errors not sent, for there were too many.",
                |it| it.icmp_limited,
            ),
        ];
        for (name, help, read) in families {
            let family = [name, "counter", help, "direction"];
            self.each(family, directions.map(|(direction, counts)| (direction, read(counts))));
        }
        self.family("flannel_drops_total", "counter", "Packets dropped, by reason.");
        for (direction, counts) in directions {
            for reason in DropReason::ALL {
                let labels = format!("{{direction=\"{direction}\",reason=\"{}\"}}", reason.id());
                self.sample("flannel_drops_total", &labels, counts.dropped(*reason));
            }
        }
    }

    /// The peers with the most failed sends have a series each.
    fn failed_sends(&mut self, peers: &[Peer]) {
        let failed = peers.iter().map(|peer| (peer.via.host(), peer.failed_sends.unwrap_or(0)));
        // Counted by the address, which several leases may have.
        let each: BTreeMap<_, _> = failed.filter(|(_, packets)| *packets > 0).collect();
        let mut each: Vec<_> = each.into_iter().collect();
        each.sort_by_key(|(_, packets)| Reverse(*packets));
        each.truncate(PEERS_MEASURED_MAX);
        let help = "Packets that could not be sent to this peer.";
        self.each(["flannel_peer_failed_sends_total", "counter", help, "peer"], each);
    }

    /// The overlay's device, what is beneath it, and the peers.
    fn plane(&mut self, status: &Status, Backend { kind, done }: &Backend) {
        self.family("flannel_dataplane_info", "gauge", "What carries packets, in labels.");
        let labels = format!(
            "{{backend=\"{}\",engine=\"{}\",interface=\"{}\",device=\"{}\"}}",
            kind.map_or("", |kind| kind.name()),
            status.workers.first().map_or("", |worker| &worker.engine),
            status.interface.as_deref().unwrap_or_default(),
            status.device.as_deref().unwrap_or_default(),
        );
        self.sample("flannel_dataplane_info", &labels, 1);
        let is_up = status.dataplane_is_up == Some(true);
        self.gauge("flannel_dataplane_up", "Whether packets can flow.", is_up);
        let mtu_bytes = status.lease.as_ref().map_or(0, |lease| lease.mtu_bytes);
        self.gauge("flannel_mtu_bytes", "The overlay's MTU.", mtu_bytes);
        let help = "Peers by what is known of them.";
        self.each(["flannel_peers_by_state", "gauge", help, "state"], &status.peer_states);
        let Some(done) = done else { return };
        self.gauge("flannel_backend_peers_programmed", "Peers set up.", done.peers_programmed);
        self.gauge("flannel_backend_peers_failed", "Peers not set up.", done.peers_failed);
        let help = "Leases of other backends.";
        self.gauge("flannel_backend_leases_ignored", help, done.leases_ignored);
        self.gauge("flannel_backend_leases_unusable", "Leases without data.", done.leases_unusable);
        let help = "Edits and commands that failed.";
        self.counter("flannel_backend_failures_total", help, done.failures);
        self.counter("flannel_backend_repairs_total", "Things put back.", done.repairs);
    }

    /// What is kept on this host beside the dataplane.
    fn kept(&mut self, status: &Status) {
        if !status.device_drops.is_empty() {
            let name = "flannel_device_drops_total";
            self.family(name, "counter", "Packets that the kernel dropped at a device.");
            for (device, drops) in &status.device_drops {
                for (way, count) in [("egress", drops.egress), ("ingress", drops.ingress)] {
                    self.sample(
                        name,
                        &format!("{{device=\"{device}\",direction=\"{way}\"}}"),
                        count,
                    );
                }
            }
        }
        if let Some(file) = &status.subnet_file {
            let help = "Times that writing the subnet file failed.";
            self.counter("flannel_subnet_file_failures_total", help, file.failures);
        }
        if let Some(rules) = &status.rules {
            let Kept { in_place, checks, repairs, failures, .. } = rules.kept;
            let help = "Whether the last look found the rules.";
            self.gauge("flannel_rules_in_place", help, in_place);
            let help = "Looks at the rules that succeeded.";
            self.counter("flannel_rules_checks_total", help, checks);
            let help = "Looks that found rules missing.";
            self.counter("flannel_rules_repairs_total", help, repairs);
            let help = "Looks or repairs that failed.";
            self.counter("flannel_rules_failures_total", help, failures);
        }
        let Some(guard) = &status.guard else { return };
        let help = "Whether the last look found the guard of the tunnel's port.";
        self.gauge("flannel_guard_in_place", help, guard.kept.in_place);
        self.gauge("flannel_guard_peers", "Addresses that the guard lets in.", guard.peers);
        let help = "Looks that found the guard changed.";
        self.counter("flannel_guard_repairs_total", help, guard.kept.repairs);
        let help = "Looks at the guard, or repairs of it, that failed.";
        self.counter("flannel_guard_failures_total", help, guard.kept.failures);
        let help = "Packets that the guard dropped, as of the last look.";
        let family = ["flannel_guard_dropped_packets_total", "counter", help, "from"];
        let (strangers, pods) = (guard.dropped_from_strangers, guard.dropped_from_pods);
        self.each(family, [("stranger", strangers), ("pod", pods)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{PeerState, Via};

    #[test]
    fn failed_send_metrics_are_bounded_to_worst_peers() {
        let peer = |number: u8| {
            let subnet = format!("10.5.{number}.0/24").parse().unwrap();
            let via = Via::Host([192, 0, 2, number].into());
            let peer = Peer::new(subnet, None, via, PeerState::Ok);
            Peer { failed_sends: Some(number.into()), ..peer }
        };
        let peers: Vec<_> = (0..2 * PEERS_MEASURED_MAX as u8).map(peer).collect();
        let mut out = Metrics(String::new());
        out.failed_sends(&peers);
        let samples: Vec<_> = out.0.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples.len(), PEERS_MEASURED_MAX);
        assert_eq!(samples[0], "flannel_peer_failed_sends_total{peer=\"192.0.2.199\"} 199");
    }
}

//! A status as Prometheus text.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use crate::control::rejected::RejectReason;
use crate::stats::DropReason;
use crate::status::{
    Backend, Direction, FastPath, Handshakes, Kept, Peer, Status, Store, WireguardPeer, Worker,
};

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
        status.handshakes.iter().for_each(|handshakes| out.handshakes(handshakes));
        out.fast_path(status.fast_path.as_ref());
        out.directions([("egress", egress), ("ingress", ingress)]);
        out.failed_sends(&status.routes);
    }
    if let Some(backend) = &status.backend {
        out.plane(status, backend);
        out.wireguard(&status.routes);
    }
    out.kept(status);
    out.0
}

/// The text under construction.
struct Metrics(String);

impl Metrics {
    /// A family, and a sample of it for each of `samples`, which are labels and values.
    fn family<V: Display>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (String, V)>,
    ) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").ok();
        for (labels, value) in samples {
            writeln!(self.0, "{name}{labels} {value}").ok();
        }
    }

    /// A family with the one label `label`.
    fn each<V: Display>(
        &mut self,
        name: &str,
        label: &str,
        help: &str,
        samples: impl IntoIterator<Item = (impl Display, V)>,
    ) {
        let samples = samples.into_iter();
        let labelled = samples.map(|(what, value)| (format!("{{{label}=\"{what}\"}}"), value));
        self.family(name, help, labelled);
    }

    /// A family without labels.
    fn row(&mut self, name: &str, value: impl Into<u64>, help: &str) {
        self.family(name, help, [(String::new(), value.into())]);
    }

    fn process(&mut self, status: &Status) {
        self.each("flannel_build_info", "version", "What runs.", [(&status.version, 1)]);
        let help = "Log messages, those that were held back as well.";
        self.each("flannel_log_messages_total", "level", help, &status.log_messages);
        // By the names that Prometheus' own libraries give to this.
        let Some(it) = &status.process else { return };
        let seconds = [(String::new(), it.processor_seconds)];
        self.family("process_cpu_seconds_total", "Processor time of weftd, in seconds.", seconds);
        self.row("process_resident_memory_bytes", it.resident_bytes, "Resident memory, in bytes.");
        self.row("process_open_fds", it.open_files, "Open file descriptors.");
        self.row("process_start_time_seconds", it.start_unix, "When weftd started.");
    }

    fn control(&mut self, status: &Status) {
        let Status { ready, stale, restart_needed, cache, peers, peers_held, .. } = status;
        let (peers, held) = (*peers as u64, *peers_held as u64);
        let help = "Errors in weftd's own code; see the log.";
        self.row("flannel_internal_errors_total", status.internal_errors, help);
        self.row("flannel_ready", *ready, "Whether weftd is ready.");
        self.row("flannel_stale", *stale, "Whether lease and peers are from before this start.");
        self.row("flannel_restart_needed", *restart_needed, "Whether the network is another.");
        self.row("flannel_cache_writes_total", cache.writes, "Times that the cache was written.");
        self.row("flannel_cache_failures_total", cache.failures, "Times that writing it failed.");
        self.row("flannel_peers", peers, "Nodes with a lease, this one aside.");
        self.row("flannel_peers_held", held, "Peers kept though their leases vanished.");
    }

    fn store(&mut self, store: &Store) {
        let (is_refused, is_other) = (store.refused.is_some(), store.subnet_refused);
        let is_duplicate = store.duplicate_public_ip.is_some();
        let exhausted = store.subnets_exhausted;
        self.row("flannel_store_up", store.up, "Whether the last store exchange succeeded.");
        self.row("flannel_store_refused", is_refused, "Whether the store refuses a request.");
        self.row("flannel_subnet_refused", is_other, "Whether another subnet was assigned.");
        self.row("flannel_lease_renewals_total", store.renewals, "Renewals of the lease.");
        self.row("flannel_store_failures_total", store.failures, "Exchanges that failed.");
        let help = "Foreign writes of the lease.";
        self.row("flannel_lease_written_by_others_total", store.written_by_others, help);
        self.row("flannel_duplicate_public_ip", is_duplicate, "Whether another node has it.");
        self.row("flannel_subnets_exhausted_total", exhausted, "Tries that found no free subnet.");
        if let Some(at) = store.answered_unix {
            self.row("flannel_store_last_answer_timestamp_seconds", at, "When the store answered.");
        }
        if let Some(at) = store.lease_expires_unix {
            let help = "When the lease ends, unrenewed.";
            self.row("flannel_lease_expiry_timestamp_seconds", at, help);
        }
        fn of(counts: &BTreeMap<String, u64>) -> impl Iterator<Item = (RejectReason, u64)> {
            let reasons = RejectReason::ALL.iter();
            reasons.map(|why| (*why, counts.get(why.name()).copied().unwrap_or(0)))
        }
        let help = "Store entries that are not used now.";
        self.each("flannel_store_entries_unused", "why", help, of(&store.unused));
        let help = "Store entries that were ignored.";
        self.each("flannel_store_rejected_total", "why", help, of(&store.rejected));
    }

    fn workers(&mut self, status: &Status) {
        let seconds = |of: fn(&Worker) -> Option<f64>| {
            status.workers.iter().filter_map(move |worker| Some((worker.index, of(worker)?)))
        };
        let help = "Processor time of a worker.";
        let ran = seconds(|worker| worker.ran_seconds);
        self.each("flannel_worker_cpu_seconds_total", "worker", help, ran);
        let help = "How long a worker had work and no processor.";
        let waited = seconds(|worker| worker.waited_seconds);
        self.each("flannel_worker_wait_seconds_total", "worker", help, waited);
        let hang = status.workers.iter().filter(|worker| worker.stalled_seconds.is_some());
        let (hang, narrow) = (hang.count() as u64, status.narrow_paths as u64);
        let it = status.worker.unwrap_or_default();
        self.row("flannel_workers_stalled", hang, "Workers that hang or get no processor.");
        self.row("flannel_narrow_paths", narrow, "Subnets behind paths narrower than the MTU.");
        self.row("flannel_receive_overflows_total", it.receive_overflows, "Lost in the socket.");
        self.row("flannel_gso_fallbacks_total", it.gso_fallbacks, "Batches sent one by one.");
        self.row("flannel_tun_fallbacks_total", it.tun_fallbacks, "Super-packets cut again.");
        self.row("flannel_sleeps_total", it.sleeps, "Times that a worker had nothing to do.");
        self.row("flannel_naps_total", it.naps, "Short waits for more packets.");
    }

    fn handshakes(&mut self, handshakes: &Handshakes) {
        let Handshakes { completed, refused, replayed, cookies, limited, shed, expired_packets } =
            *handshakes;
        let outcomes = [
            ("completed", completed),
            ("refused", refused),
            ("replayed", replayed),
            ("cookie", cookies),
            ("limited", limited),
            ("shed", shed),
        ];
        let help = "Messages of WireGuard's handshakes, by what became of them.";
        self.each("flannel_wireguard_handshakes_total", "outcome", help, outcomes);
        let help = "Packets that have waited for a session in vain.";
        self.row("flannel_wireguard_expired_packets_total", expired_packets, help);
    }

    fn fast_path(&mut self, fast_path: Option<&FastPath>) {
        let Some(FastPath { on, why, taken, .. }) = fast_path else { return };
        self.row("flannel_fast_path", *on, "Whether the kernel's programs run.");
        if let Some(why) = why {
            let help = "Why these programs carry none, while they don't.";
            self.each("flannel_fast_path_off", "why", help, [(why, 1)]);
        }
        let packets = [("egress", taken.packets_sent), ("ingress", taken.packets_received)];
        let help = "Packets that these programs took.";
        self.each("flannel_fast_path_packets_total", "direction", help, packets);
        let bytes = [("egress", taken.bytes_sent), ("ingress", taken.bytes_received)];
        let help = "Bytes that these programs took.";
        self.each("flannel_fast_path_bytes_total", "direction", help, bytes);
    }

    fn directions(&mut self, directions: [(&str, &Direction); 2]) {
        type Count = (&'static str, fn(&Direction) -> u64, &'static str);
        let counts: [Count; 8] = [
            ("flannel_packets_received_total", |it| it.packets_received, "Packets taken in."),
            ("flannel_packets_forwarded_total", |it| it.packets_forwarded, "Packets forwarded."),
            ("flannel_bytes_received_total", |it| it.bytes_received, "Bytes taken in."),
            ("flannel_bytes_forwarded_total", |it| it.bytes_forwarded, "Bytes forwarded."),
            ("flannel_reads_total", |it| it.reads, "Reads, GRO batches and the like as one."),
            ("flannel_writes_total", |it| it.writes, "Writes, GSO batches and the like as one."),
            ("flannel_icmp_sent_total", |it| it.icmp_sent, "ICMP errors sent."),
            ("flannel_icmp_limited_total", |it| it.icmp_limited, "ICMP errors held back."),
        ];
        for (name, read, help) in counts {
            let samples = directions.map(|(direction, counts)| (direction, read(counts)));
            self.each(name, "direction", help, samples);
        }
        let drops = directions.into_iter().flat_map(|(direction, counts)| {
            DropReason::ALL.iter().map(move |reason| {
                let labels = format!("{{direction=\"{direction}\",reason=\"{}\"}}", reason.id());
                (labels, counts.dropped(*reason))
            })
        });
        self.family("flannel_drops_total", "Packets dropped, by reason.", drops);
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
        self.each("flannel_peer_failed_sends_total", "peer", help, each);
    }

    /// What WireGuard knows: sums, and of the peers whose handshake is oldest when that was.
    fn wireguard(&mut self, peers: &[Peer]) {
        let known =
            peers.iter().filter_map(|peer| Some((peer.via.host(), peer.wireguard.as_ref()?)));
        let known: Vec<_> = known.collect();
        if known.is_empty() {
            return;
        }
        let sum = |bytes: fn(&WireguardPeer) -> u64| known.iter().map(|(_, it)| bytes(it)).sum();
        let (received, sent): (u64, u64) = (sum(|it| it.received_bytes), sum(|it| it.sent_bytes));
        let help = "Bytes of datagrams from the peers of now.";
        self.row("flannel_wireguard_received_bytes_total", received, help);
        let help = "Bytes of datagrams to the peers of now.";
        self.row("flannel_wireguard_sent_bytes_total", sent, help);
        // Of a host with several leases the last one.
        let mut latest = BTreeMap::new();
        for (host, it) in &known {
            let at: &mut u64 = latest.entry(*host).or_default();
            *at = it.last_handshake_unix.unwrap_or(0).max(*at);
        }
        let mut each: Vec<_> = latest.into_iter().collect();
        each.sort_by_key(|(_, at)| *at);
        each.truncate(PEERS_MEASURED_MAX);
        let help = "When keys were last agreed on with this peer; 0 if never.";
        self.each("flannel_wireguard_last_handshake_seconds", "peer", help, each);
    }

    /// The overlay's device, what is beneath it, and the peers.
    fn plane(&mut self, status: &Status, Backend { kind, done }: &Backend) {
        let labels = format!(
            "{{backend=\"{}\",engine=\"{}\",interface=\"{}\",device=\"{}\"}}",
            kind.map_or("", |kind| kind.name()),
            status.workers.first().map_or("", |worker| &worker.engine),
            status.interface.as_deref().unwrap_or_default(),
            status.device.as_deref().unwrap_or_default(),
        );
        let help = "What carries packets, in labels.";
        self.family("flannel_dataplane_info", help, [(labels, 1)]);
        let is_up = status.dataplane_is_up == Some(true);
        let mtu_bytes = status.lease.as_ref().map_or(0, |lease| lease.mtu_bytes);
        self.row("flannel_dataplane_up", is_up, "Whether packets can flow.");
        let is_hindered = status.dataplane_wrong.is_some();
        self.row("flannel_dataplane_hindered", is_hindered, "Whether something is wrong with it.");
        self.row("flannel_mtu_bytes", mtu_bytes, "The overlay's MTU.");
        let help = "Peers by what is known of them.";
        self.each("flannel_peers_by_state", "state", help, &status.peer_states);
        let Some(it) = done else { return };
        self.row("flannel_backend_peers_programmed", it.peers_programmed, "Peers set up.");
        self.row("flannel_backend_peers_failed", it.peers_failed, "Peers not set up.");
        self.row("flannel_backend_leases_ignored", it.leases_ignored, "Leases of other backends.");
        self.row("flannel_backend_leases_unusable", it.leases_unusable, "Leases without data.");
        self.row("flannel_backend_failures_total", it.failures, "Edits and commands that failed.");
        self.row("flannel_backend_repairs_total", it.repairs, "Things put back.");
    }

    /// What is kept on this host beside the dataplane.
    fn kept(&mut self, status: &Status) {
        if !status.device_drops.is_empty() {
            let drops = status.device_drops.iter().flat_map(|(device, drops)| {
                [("egress", drops.egress), ("ingress", drops.ingress)].map(|(way, count)| {
                    (format!("{{device=\"{device}\",direction=\"{way}\"}}"), count)
                })
            });
            let help = "Packets that the kernel dropped at a device.";
            self.family("flannel_device_drops_total", help, drops);
        }
        if let Some(file) = &status.subnet_file {
            let help = "Times that writing the subnet file failed.";
            self.row("flannel_subnet_file_failures_total", file.failures, help);
        }
        if let Some(rules) = &status.rules {
            let Kept { in_place, checks, repairs, failures, .. } = rules.kept;
            self.row("flannel_rules_in_place", in_place, "Whether the last look found them.");
            self.row("flannel_rules_checks_total", checks, "Looks at the rules that succeeded.");
            self.row("flannel_rules_repairs_total", repairs, "Looks that found rules missing.");
            self.row("flannel_rules_failures_total", failures, "Looks or repairs that failed.");
        }
        let Some(guard) = &status.guard else { return };
        let Kept { in_place, repairs, failures, .. } = guard.kept;
        let peers = guard.peers as u64;
        self.row("flannel_guard_in_place", in_place, "Whether the last look found the guard.");
        self.row("flannel_guard_peers", peers, "Addresses that the guard lets in.");
        self.row("flannel_guard_repairs_total", repairs, "Looks that found the guard changed.");
        self.row("flannel_guard_failures_total", failures, "Looks at it or repairs that failed.");
        let help = "Packets that the guard dropped, as of the last look.";
        let (strangers, pods) = (guard.dropped_from_strangers, guard.dropped_from_pods);
        let dropped = [("stranger", strangers), ("pod", pods)];
        self.each("flannel_guard_dropped_packets_total", "from", help, dropped);
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

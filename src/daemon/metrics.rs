//! The counters as Prometheus text.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::backend::status::{Counters, KernelState, PlaneState};
use crate::backend_kind::BackendKind;
use crate::control::rejected::RejectReason;
use crate::control::request_times::{BOUNDS, Histogram};
use crate::control::status::ControlState;
use crate::daemon::log;
use crate::daemon::process::{Process, WorkerTime};
use crate::daemon::report::Running;
use crate::fast_path::PeerCounts;
use crate::host::device_drops::DeviceDrops;
use crate::netfilter::guard_keeper::GuardState;
use crate::stats::{DirectionStats, DropReason, WorkerStats};

/// Peers that have a metric of their own, those with the most failed sends. Their number bounds
/// what a scrape costs; all failed sends are in `flannel_drops_total`.
const PEERS_MEASURED_MAX: usize = 100;

/// The text under construction.
pub(super) struct Metrics(pub(super) String);

impl Metrics {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").ok();
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        writeln!(self.0, "{name}{labels} {value}").ok();
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: impl TryInto<u64>) {
        self.family(name, "gauge", help);
        self.sample(name, "", value.try_into().unwrap_or(u64::MAX));
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, "", value);
    }

    pub(super) fn store_requests(&mut self, times: &Histogram) {
        let name = "flannel_store_request_duration_seconds";
        self.family(name, "histogram", "How long the store took to answer, or not to.");
        let bucket = format!("{name}_bucket");
        for (bound, count) in BOUNDS.iter().zip(times.up_to) {
            self.sample(&bucket, &format!("{{le=\"{}\"}}", bound.as_secs_f64()), count);
        }
        self.sample(&bucket, "{le=\"+Inf\"}", times.count);
        writeln!(self.0, "{name}_sum {}", times.sum.as_secs_f64()).ok();
        self.sample(&format!("{name}_count"), "", times.count);
    }

    pub(super) fn control(&mut self, is_ready: bool, control: &ControlState) {
        self.gauge("flannel_ready", "Whether weftd is ready.", is_ready);
        let (up, refused) = (control.store_is_up, control.refused().is_some());
        self.gauge("flannel_store_up", "Whether the last store exchange succeeded.", up);
        self.gauge("flannel_store_refused", "Whether the store refuses a request.", refused);
        if let Some(seconds) = control.store_answered_unix {
            let help = "When the store last answered.";
            self.gauge("flannel_store_last_answer_timestamp_seconds", help, seconds);
        }
        let stale = control.cached_as_of_unix.is_some();
        self.gauge("flannel_stale", "Whether lease and peers are from the cache.", stale);
        let help = "Whether the cluster assigned another subnet.";
        self.gauge("flannel_subnet_refused", help, control.subnet_is_refused);
        let help = "Whether the store has another network.";
        self.gauge("flannel_restart_needed", help, control.restart_needed);
        let help = "Times that the cache was written.";
        self.counter("flannel_cache_writes_total", help, control.cache_writes);
        let help = "Times that writing it failed.";
        self.counter("flannel_cache_failures_total", help, control.cache_failures);
        self.gauge("flannel_peers", "Nodes with a lease, this one aside.", control.peers);
        let help = "Peers kept though their leases vanished.";
        self.gauge("flannel_peers_held", help, control.held_peers);
        if let Some(seconds) = control.lease_expires_unix {
            let help = "When the own lease ends, unless it is renewed.";
            self.gauge("flannel_lease_expiry_timestamp_seconds", help, seconds);
        }
        self.counter("flannel_lease_renewals_total", "Renewals of the lease.", control.renewals);
        let help = "Exchanges with the store that failed.";
        self.counter("flannel_store_failures_total", help, control.store_failures);
        let help = "Times that somebody else wrote the own lease with this node's PublicIP.";
        self.counter("flannel_lease_written_by_others_total", help, control.written_by_others);
        let is_duplicate = control.duplicate_public_ip.is_some();
        self.gauge("flannel_duplicate_public_ip", "Whether another node has it.", is_duplicate);
        let help = "Tries that found no free subnet.";
        self.counter("flannel_subnets_exhausted_total", help, control.subnets_exhausted);
        let name = "flannel_store_entries_unused";
        self.family(name, "gauge", "Store entries that are not used now.");
        for (reason, why) in RejectReason::NAMES {
            self.sample(name, &format!("{{why=\"{why}\"}}"), control.unused().count(reason));
        }
        let name = "flannel_store_rejected_total";
        self.family(name, "counter", "Store entries that were ignored.");
        for (reason, why) in RejectReason::NAMES {
            let label = format!("{{why=\"{why}\"}}");
            self.sample(name, &label, control.rejected(reason));
        }
    }

    pub(super) fn subnet_file(&mut self, failures: u64) {
        let help = "Times that writing the subnet file failed.";
        self.counter("flannel_subnet_file_failures_total", help, failures);
    }

    pub(super) fn guard(&mut self, running: &Running) {
        let Some(state) = &running.guard else { return };
        let GuardState { rules, peers, dropped, .. } = *state.borrow();
        let help = "Whether the last look found the guard of the tunnel's port.";
        self.gauge("flannel_guard_in_place", help, rules.is_in_place);
        self.gauge("flannel_guard_peers", "Addresses that the guard lets in.", peers);
        let help = "Looks that found the guard changed.";
        self.counter("flannel_guard_repairs_total", help, rules.repairs);
        let help = "Looks at the guard, or repairs of it, that failed.";
        self.counter("flannel_guard_failures_total", help, rules.failures);
        let name = "flannel_guard_dropped_packets_total";
        self.family(name, "counter", "Packets that the guard dropped, as of the last look.");
        self.sample(name, "{from=\"stranger\"}", dropped.from_strangers);
        self.sample(name, "{from=\"pod\"}", dropped.from_pods);
    }

    pub(super) fn rules(&mut self, running: &Running) {
        let Some((_, state)) = &running.rules else { return };
        let state = *state.borrow();
        let help = "Whether the last look found the rules.";
        self.gauge("flannel_rules_in_place", help, state.is_in_place);
        let help = "Looks at the rules that succeeded.";
        self.counter("flannel_rules_checks_total", help, state.checks);
        let help = "Looks that found rules missing.";
        self.counter("flannel_rules_repairs_total", help, state.repairs);
        self.counter(
            "flannel_rules_failures_total",
            "Looks or repairs that failed.",
            state.failures,
        );
    }

    pub(super) fn backend(&mut self, counters: &Counters) {
        self.gauge("flannel_backend_peers_programmed", "Peers set up.", counters.programmed.get());
        self.gauge("flannel_backend_peers_failed", "Peers not set up.", counters.failed.get());
        let help = "Leases of other backends.";
        self.gauge("flannel_backend_leases_ignored", help, counters.ignored.get());
        self.gauge(
            "flannel_backend_leases_unusable",
            "Leases without data.",
            counters.unusable.get(),
        );
        let help = "Edits and commands that failed.";
        self.counter("flannel_backend_failures_total", help, counters.failures.get());
        self.counter("flannel_backend_repairs_total", "Things put back.", counters.repairs.get());
    }

    pub(super) fn fast_path(&mut self, state: &KernelState, taken: &PeerCounts) {
        let is_on = matches!(state, KernelState::On { .. });
        self.gauge("flannel_fast_path", "Whether the kernel's programs carry packets.", is_on);
        if let KernelState::Off(off) = state {
            let name = "flannel_fast_path_off";
            self.family(name, "gauge", "Why these programs carry none, while they don't.");
            self.sample(name, &format!("{{why=\"{}\"}}", off.why), 1);
        }
        let packets = [taken.packets_sent, taken.packets_received];
        let bytes = [taken.bytes_sent, taken.bytes_received];
        for (name, help, [egress, ingress]) in [
            ("flannel_fast_path_packets_total", "Packets that these programs took.", packets),
            ("flannel_fast_path_bytes_total", "Bytes that these programs took.", bytes),
        ] {
            self.family(name, "counter", help);
            self.sample(name, "{direction=\"egress\"}", egress);
            self.sample(name, "{direction=\"ingress\"}", ingress);
        }
    }

    pub(super) fn device_drops(&mut self, drops: &[DeviceDrops]) {
        let name = "flannel_device_drops_total";
        self.family(name, "counter", "Packets that the kernel dropped at a device.");
        for DeviceDrops { device, received, sent } in drops {
            for (direction, count) in [("egress", sent), ("ingress", received)] {
                let labels = format!("{{device=\"{device}\",direction=\"{direction}\"}}");
                self.sample(name, &labels, *count);
            }
        }
    }

    pub(super) fn dataplane(&mut self, stats: &WorkerStats) {
        let directions = [("egress", &stats.egress), ("ingress", &stats.ingress)];
        type Read = fn(&DirectionStats) -> u64;
        let families: [(&str, &str, Read); 8] = [
            ("flannel_packets_received_total", "Packets taken in.", |d| d.packets_received.get()),
            ("flannel_packets_forwarded_total", "Packets forwarded.", |d| {
                d.packets_forwarded.get()
            }),
            ("flannel_bytes_received_total", "Bytes taken in.", |d| d.bytes_received.get()),
            ("flannel_bytes_forwarded_total", "Bytes forwarded.", |d| d.bytes_forwarded.get()),
            ("flannel_reads_total", "Reads, super-packets and GSO batches as one.", |d| {
                d.reads.get()
            }),
            ("flannel_writes_total", "Writes, super-packets and GSO batches as one.", |d| {
                d.writes.get()
            }),
            ("flannel_icmp_sent_total", "ICMP errors sent.", |d| d.icmp_sent.get()),
            ("flannel_icmp_limited_total", "ICMP errors not sent, for there were too many.", |d| {
                d.icmp_limited.get()
            }),
        ];
        for (name, help, read) in families {
            self.family(name, "counter", help);
            for (direction, stats) in directions {
                self.sample(name, &format!("{{direction=\"{direction}\"}}"), read(stats));
            }
        }
        self.family("flannel_drops_total", "counter", "Packets dropped, by reason.");
        for (direction, stats) in directions {
            for reason in DropReason::ALL {
                let labels = format!("{{direction=\"{direction}\",reason=\"{}\"}}", reason.id());
                self.sample("flannel_drops_total", &labels, stats.drops(*reason));
            }
        }
        for (name, help, count) in [
            ("flannel_receive_overflows_total", "Lost in the socket.", &stats.receive_overflows),
            ("flannel_gso_fallbacks_total", "Batches sent one by one.", &stats.gso_fallbacks),
            ("flannel_tun_fallbacks_total", "Super-packets cut again.", &stats.tun_fallbacks),
            ("flannel_sleeps_total", "Times that a worker had nothing to do.", &stats.sleeps),
            ("flannel_naps_total", "Short waits for more packets.", &stats.naps),
        ] {
            self.counter(name, help, count.get());
        }
    }

    /// What runs: labels, and the value 1.
    pub(super) fn build(&mut self) {
        self.family("flannel_build_info", "gauge", "What runs, in labels.");
        let version = env!("CARGO_PKG_VERSION");
        self.sample("flannel_build_info", &format!("{{version=\"{version}\"}}"), 1);
        let name = "flannel_log_messages_total";
        self.family(name, "counter", "Log messages, those that were held back as well.");
        for (level, count) in log::messages() {
            self.sample(name, &format!("{{level=\"{level}\"}}"), count);
        }
    }

    /// The process, by the names that Prometheus' own libraries give to this.
    pub(super) fn process(&mut self, process: &Process) {
        let Process { processor_time, resident_bytes, open_files, start_unix, .. } = process;
        let name = "process_cpu_seconds_total";
        self.family(name, "counter", "Processor time of weftd, in seconds.");
        writeln!(self.0, "{name} {}", processor_time.as_secs_f64()).ok();
        let help = "Resident memory, in bytes.";
        self.gauge("process_resident_memory_bytes", help, *resident_bytes);
        self.gauge("process_open_fds", "Open file descriptors.", *open_files);
        let help = "When weftd started.";
        self.gauge("process_start_time_seconds", help, *start_unix);
    }

    /// What the kernel's scheduler says of the workers.
    pub(super) fn stalled(&mut self, workers: usize) {
        self.gauge("flannel_workers_stalled", "Workers that hang or get no processor.", workers);
    }

    pub(super) fn workers(&mut self, process: &Process) {
        type Read = fn(&WorkerTime) -> Duration;
        let families: [(&str, &str, Read); 2] = [
            ("flannel_worker_cpu_seconds_total", "Processor time of a worker.", |time| time.ran),
            (
                "flannel_worker_wait_seconds_total",
                "How long a worker had work and no processor.",
                |time| time.waited,
            ),
        ];
        for (name, help, read) in families {
            self.family(name, "counter", help);
            for (number, time) in process.workers.iter().enumerate() {
                let seconds = read(time).as_secs_f64();
                writeln!(self.0, "{name}{{worker=\"{number}\"}} {seconds}").ok();
            }
        }
    }

    /// The overlay's device and what is beneath it.
    pub(super) fn plane(&mut self, kind: BackendKind, plane: &PlaneState) {
        self.family("flannel_dataplane_info", "gauge", "What carries packets, in labels.");
        let engine = plane.workers.first().map(|worker| worker.engine.to_string());
        let labels = format!(
            "{{backend=\"{kind}\",engine=\"{}\",interface=\"{}\",device=\"{}\"}}",
            engine.unwrap_or_default(),
            plane.interface,
            plane.device.as_deref().unwrap_or_default(),
        );
        self.sample("flannel_dataplane_info", &labels, 1);
        self.gauge("flannel_dataplane_up", "Whether packets can flow.", plane.is_up);
        self.gauge("flannel_mtu_bytes", "The overlay's MTU.", plane.mtu_bytes);
    }

    /// Paths that are narrower than the overlay's MTU.
    pub(super) fn narrow_paths(&mut self, paths: usize) {
        let help = "Subnets behind paths that are narrower than the overlay's MTU.";
        self.gauge("flannel_narrow_paths", help, paths);
    }

    /// The peers with the most failed sends have a series each.
    pub(super) fn failed_sends(&mut self, each: impl Iterator<Item = (Ipv4Addr, u64)>) {
        let name = "flannel_peer_failed_sends_total";
        self.family(name, "counter", "Packets that could not be sent to this peer.");
        let mut peers: Vec<_> = each.filter(|(_, packets)| *packets > 0).collect();
        peers.sort_unstable_by_key(|(peer, packets)| (Reverse(*packets), *peer));
        for (peer, packets) in peers.into_iter().take(PEERS_MEASURED_MAX) {
            self.sample(name, &format!("{{peer=\"{peer}\"}}"), packets);
        }
    }

    /// How many peers are in which state.
    pub(super) fn peer_states(&mut self, counts: &BTreeMap<&'static str, usize>) {
        let name = "flannel_peers_by_state";
        self.family(name, "gauge", "Peers by what is known of them.");
        for (state, count) in counts {
            self.sample(name, &format!("{{state=\"{state}\"}}"), *count as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_send_metrics_are_bounded_to_worst_peers() {
        let mut out = Metrics(String::new());
        let peer = |number| (Ipv4Addr::new(192, 0, 2, number), u64::from(number));
        out.failed_sends((0..2 * PEERS_MEASURED_MAX as u8).map(peer));
        let samples: Vec<_> = out.0.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples.len(), PEERS_MEASURED_MAX);
        assert_eq!(samples[0], "flannel_peer_failed_sends_total{peer=\"192.0.2.199\"} 199");
    }
}

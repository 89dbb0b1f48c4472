//! The checks, in the order in which they are reported.

mod daemon;
mod kernel;
mod network;
mod process;
mod stores;
mod ways;

use super::facts::Facts;
use super::finding::Checked;

/// A question about the host.
pub(super) struct Check {
    /// For scripts; it never changes.
    pub(super) id: &'static str,
    /// What is well if it is well.
    pub(super) about: &'static str,
    pub(super) judge: fn(&Facts) -> Checked,
}

macro_rules! check {
    ($id:literal, $judge:path, $about:literal) => {
        Check { id: $id, about: $about, judge: $judge }
    };
}

/// All of them.
pub(super) const CHECKS: &[Check] = &[
    check!(
        "daemon-answers",
        daemon::answers,
        "weftd answers on its status socket, or never ran here"
    ),
    check!("daemon-state", daemon::state, "`weft status` names no cause"),
    check!("other-daemon", daemon::others, "no other weftd or flanneld has the same subnet file"),
    check!("tunnel-port", daemon::tunnel_port, "no other program has the UDP port"),
    check!("subnet-file", daemon::subnet_file, "`subnet.env` says what weftd says"),
    check!("subnet-directory", daemon::directory, "`subnet.env` can be written"),
    check!("etcd-endpoints", stores::etcd, "the given endpoints answer within 2 s"),
    check!("lease-time", stores::lease_time, "the lease has not ended by this clock"),
    check!("tun-device", process::tun, "`/dev/net/tun` can be opened"),
    check!("cap-net-admin", process::net_admin, "CAP_NET_ADMIN is there"),
    check!("cap-net-raw", process::net_raw, "CAP_NET_RAW is there: path MTU, pings"),
    check!("cap-bpf", process::bpf, "CAP_BPF is there: fast path, flows kept on one worker"),
    check!("io-uring", process::io_uring, "io_uring can be used; else the engine is `mmsg`"),
    check!("open-files", process::open_files, "enough files may be opened"),
    check!("external-interface", network::external, "it can be chosen, and has an address"),
    check!("external-link", network::external_link, "it is up, with something at the other end"),
    check!("overlay-mtu", network::overlay_mtu, "its MTU leaves room for the tunnel's headers"),
    check!("bridge-mtu", network::bridge_mtu, "the pods' bridge has no larger MTU"),
    check!("pod-bridge", network::pod_bridge, "it is up, has an address and the route, forwards"),
    check!("foreign-routes", network::foreign_routes, "no other route takes a part of the network"),
    check!("address-overlap", network::overlap, "no other interface has an address in the network"),
    check!("stale-devices", network::stale_devices, "no device is left of another backend"),
    check!("other-networks", network::other_networks, "no devices of Calico, Cilium or Weave"),
    check!("ip-forward", kernel::ip_forward, "the host forwards packets"),
    check!("device-forwarding", kernel::device_forwarding, "the overlay's device forwards"),
    check!("rp-filter", kernel::rp_filter, "no strict filter where routes are asymmetric"),
    check!("bridge-netfilter", kernel::bridge_netfilter, "Kubernetes: iptables sees bridges"),
    check!("conntrack-table", kernel::conntrack, "the table of connections is not full"),
    check!("ipsec-policies", kernel::ipsec, "none takes what is sent to a peer in alarm"),
    check!("way-to-peers", ways::to_peers, "this host's routes and rules lead to every peer"),
    check!("way-from-peers", ways::from_peers, "its source check, rp_filter, lets every peer in"),
    check!("address-conflicts", ways::addresses, "no other machine answers for an address"),
    check!("neighbours", ways::neighbours, "no permanent entry of a peer in alarm is wrong"),
    check!("egress-filters", ways::filters, "no tc filter of others takes what is sent"),
    check!("firewall-output", kernel::firewall_output, "no rule drops what the tunnel sends"),
    check!("firewall-input", kernel::firewall_input, "no rule drops the tunnel's UDP port"),
    check!("firewall-forward", kernel::firewall_forward, "no rule drops what pods get"),
];

#[cfg(test)]
mod tests;

//! The checks, in the order in which they are reported.

mod daemon;
mod kernel;
mod network;
mod process;
mod routes;
mod ways;

use super::facts::Facts;
use super::finding::Checked;

/// A question about the host: its id, for scripts, which never changes; who answers it; and what is
/// well if it is well.
pub(super) type Check = (&'static str, fn(&Facts) -> Checked, &'static str);

/// The one that repeats what weftd says of itself.
pub(super) const DAEMON_STATE: &str = "daemon-state";

/// All of them.
pub(super) const CHECKS: &[Check] = &[
    ("daemon-answers", daemon::answers, "weftd answers on its status socket, or never ran here"),
    (DAEMON_STATE, daemon::state, "`weft status` names no cause"),
    ("other-daemon", daemon::others, "no other weftd or flanneld has the same subnet file"),
    ("tunnel-port", daemon::tunnel_port, "no other program has the UDP port"),
    ("subnet-file", daemon::subnet_file, "`subnet.env` says what weftd says"),
    ("subnet-directory", daemon::directory, "`subnet.env` can be written"),
    ("etcd-endpoints", daemon::etcd, "the given endpoints answer within 2 s"),
    ("lease-time", daemon::lease_time, "the lease has not ended by this clock"),
    ("tun-device", process::tun, "`/dev/net/tun` can be opened"),
    ("cap-net-admin", process::net_admin, "CAP_NET_ADMIN is there"),
    ("cap-net-raw", process::net_raw, "CAP_NET_RAW is there: path MTU, pings"),
    ("cap-bpf", process::bpf, "CAP_BPF is there: fast path, flows kept on one worker"),
    ("io-uring", process::io_uring, "io_uring can be used; else the engine is `mmsg`"),
    ("open-files", process::open_files, "enough files may be opened"),
    ("external-interface", network::external, "it can be chosen, and has an address"),
    ("external-link", network::external_link, "it is up, with something at the other end"),
    ("overlay-mtu", network::overlay_mtu, "its MTU leaves room for the tunnel's headers"),
    ("bridge-mtu", network::bridge_mtu, "the pods' bridge and its ports have no larger MTU"),
    ("pod-bridge", network::pod_bridge, "it is up, has an address and the route, forwards"),
    ("foreign-routes", routes::foreign_routes, "no other route takes a part of the network"),
    (
        "address-overlap",
        network::overlap,
        "no other interface has an address in the network, none a pod's",
    ),
    ("stale-devices", network::stale_devices, "no device is left of another backend"),
    ("other-networks", network::other_networks, "no devices of Calico, Cilium or Weave"),
    ("ip-forward", kernel::ip_forward, "the host forwards packets"),
    ("device-forwarding", kernel::device_forwarding, "the overlay's device forwards"),
    ("rp-filter", kernel::rp_filter, "no strict filter where routes are asymmetric"),
    ("bridge-netfilter", kernel::bridge_netfilter, "Kubernetes: iptables sees bridges"),
    ("conntrack-table", kernel::conntrack, "the table of connections is not full"),
    ("ipsec-policies", kernel::ipsec, "none takes what is sent to a peer in alarm"),
    ("way-to-peers", ways::to_peers, "this host's routes and rules lead to every peer"),
    (
        "way-from-peers",
        ways::from_peers,
        "its source check, rules and routes let in every peer, and its pods",
    ),
    (
        "address-conflicts",
        ways::addresses,
        "no other machine has an address of this host, or of a peer with an alarm",
    ),
    ("neighbours", ways::neighbours, "no permanent entry of a peer in alarm is wrong"),
    (
        "egress-filters",
        ways::filters,
        "no tc filter, shaper or XDP program of others may take packets",
    ),
    ("firewall-output", kernel::firewall_output, "no rule drops what this host sends to others"),
    ("firewall-input", kernel::firewall_input, "no rule drops what others send this host"),
    (
        "firewall-forward",
        kernel::firewall_forward,
        "no rule drops what pods get, or send to other hosts",
    ),
];

#[cfg(test)]
mod tests;

//! The one table of weftd's flags: name, type, default, help. Holds no parsing; `go_flags` reads
//! and prints by it, `build` turns the result into options.

use std::collections::BTreeMap;

use crate::config::options::Secret;
use crate::config::value::{List, Number, Place, Switch, Text};

/// One flag.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flag {
    /// Name without dashes.
    pub(super) name: &'static str,
    /// Where its value is.
    pub(super) place: fn(&mut FlagValues) -> Place<'_>,
    /// Help; a word in backquotes names the value, as in Go.
    pub(super) help: &'static str,
}

/// Makes values, defaults and flags of rows: `field "name": type = default;`, each with its help as
/// comment.
macro_rules! flags {
    ($($(#[doc = $help:literal])+ $field:ident $name:literal: $type:ident = $default:expr;)*) => {
        /// The value of each flag, syntactically right but not yet checked for meaning.
        #[derive(Debug, Clone)]
        pub(super) struct FlagValues {
            $($(#[doc = $help])+ pub(super) $field: $type,)*
            /// The flags that were given, each as `--name` or the variable that stands for it.
            pub(super) given: BTreeMap<&'static str, String>,
        }

        impl Default for FlagValues {
            fn default() -> Self {
                Self { $($field: $default.into(),)* given: BTreeMap::new() }
            }
        }

        /// Every flag, in the order of Go's usage text (by name).
        pub(super) const FLAGS: &[Flag] = &[$(Flag {
            name: $name,
            place: |values| Place::$type(&mut values.$field),
            help: concat!($($help),+).trim_ascii(),
        },)*];
    };
}

flags! {
    /// packet `engine`: auto, io_uring or mmsg
    engine "engine": Text = "auto";
    /// PEM `file` of the authority that etcd's certificates are checked against
    etcd_cafile "etcd-cafile": Text = "";
    /// PEM `file` of the client certificate shown to etcd; needs etcd-keyfile
    etcd_certfile "etcd-certfile": Text = "";
    /// comma-separated `URLs` of the etcd cluster
    etcd_endpoints "etcd-endpoints": Text = "http://127.0.0.1:4001,http://127.0.0.1:2379";
    /// PEM `file` of the client certificate's private key; needs etcd-certfile
    etcd_keyfile "etcd-keyfile": Text = "";
    /// password of etcd-username; rather set FLANNELD_ETCD_PASSWORD
    etcd_password "etcd-password": Secret = Secret(String::new());
    /// `prefix` of the keys in etcd
    etcd_prefix "etcd-prefix": Text = "/coreos.com/network";
    /// `user` to authenticate to etcd as; needs etcd-password
    etcd_username "etcd-username": Text = "";
    /// whether the kernel carries what it can of the udp backend's packets: auto, on or off
    fast_path "fast-path": Text = "off";
    /// move the tunnel and the lease when the address of the external interface is replaced; false
    /// waits for a restart, as flanneld does
    follow_address "follow-address": Switch = true;
    /// keep everyone but the peers from the tunnel's UDP port, with nftables
    guard "guard": Switch = false;
    /// `address` on which /healthz and /readyz answer
    healthz_ip "healthz-ip": Text = "0.0.0.0";
    /// port on which /healthz and /readyz answer; 0 is off
    healthz_port "healthz-port": Number = 0;
    /// `interface` (name or address) for traffic between hosts; may be given several times, the
    /// first that matches wins
    iface "iface": List = [];
    /// use the interface over which this `address` is reached
    iface_can_reach "iface-can-reach": Text = "";
    /// regular `expression` on interface addresses, then names; may be given several times, tried
    /// after iface
    iface_regex "iface-regex": List = [];
    /// keep a blackhole route for the own subnet, behind any other route to it
    ip_blackhole_route "ip-blackhole-route": Switch = false;
    /// masquerade traffic that leaves the overlay
    ip_masq "ip-masq": Switch = false;
    /// masquerade without random source ports
    ip_masq_fully_random_disable "ip-masq-fully-random-disable": Switch = false;
    /// add accept rules for the overlay network to the FORWARD chain
    iptables_forward_rules "iptables-forward-rules": Switch = true;
    /// `seconds` between looks at the rules of iptables or nftables
    iptables_resync "iptables-resync": Number = 5;
    /// leave the udp backend's device and the kernel's programs in place when weftd ends, for the
    /// next weftd; weft cleanup removes them
    keep_tunnel "keep-tunnel": Switch = false;
    /// `prefix` of the node annotations
    kube_annotation_prefix "kube-annotation-prefix": Text = "flannel.alpha.coreos.com";
    /// `URL` of the Kubernetes API server; without it, of the kubeconfig or the pod
    kube_api_url "kube-api-url": Text = "";
    /// take the subnet of this Node from the Kubernetes API
    kube_subnet_mgr "kube-subnet-mgr": Switch = false;
    /// kubeconfig `file`; without it, the pod's service account
    kubeconfig_file "kubeconfig-file": Text = "";
    /// keep configuration and leases as files in this `directory` instead of etcd
    local_store "local-store": Text = "";
    /// `format` of the log lines: text (as klog writes) or json
    log_format "log-format": Text = "text";
    /// emit a stack trace when logging hits file:N (not built)
    log_backtrace_at "log_backtrace_at": Text = "";
    /// `address:port` on which /metrics answers, such as 127.0.0.1:8286; off without it
    metrics_address "metrics-address": Text = "";
    /// network configuration `file` with kube-subnet-mgr
    net_config_path "net-config-path": Text = "/etc/kube-flannel/net-conf.json";
    /// `offloads` the dataplane may use where the kernel has them: auto, none, or a comma-separated
    /// list of tso, uso, gso, gro
    offload "offload": Text = "auto";
    /// `check` of inner source addresses against the sending peer: loose, or strict, which peers
    /// behind address translation do not pass
    peer_check "peer-check": Text = "loose";
    /// IPv4 `address` under which the other hosts reach this one
    public_ip "public-ip": Text = "";
    /// IPv6 `address` under which the other hosts reach this one, if the network has IPv6
    public_ipv6 "public-ipv6": Text = "";
    /// clear the Node's NetworkUnavailable condition once the network works
    set_node_network_unavailable "set-node-network-unavailable": Switch = true;
    /// from which ports the udp backend's workers send: auto (each from its own, to peers that
    /// share them out among their workers, once that is seen to work) or one
    source_ports "source-ports": Text = "auto";
    /// grace period, a `duration` such as 15m, of peers whose leases vanished with most others at
    /// once, or with the store's data; 0 drops them at once
    stale_hold "stale-hold": Text = "15m";
    /// cache configuration and peers beside the subnet file, and use the cache when the store
    /// cannot be reached at the start
    start_from_cache "start-from-cache": Switch = true;
    /// unix socket `path` on which the weft tool asks for status (default weft.sock beside the
    /// subnet file)
    status_socket "status-socket": Text = "";
    /// `file` to which the subnet's environment variables are written
    subnet_file "subnet-file": Text = "/run/flannel/subnet.env";
    /// `minutes` before its expiry that the lease is renewed, 1 to 1439
    subnet_lease_renew_margin "subnet-lease-renew-margin": Number = 60;
    /// go on with the tunnel of the weftd that answers at -status-socket, which ends once this one
    /// carries packets
    take_over "take-over": Switch = false;
    /// `level` of detail of the log: 0 normal, 1 and above more, 5 and above everything
    v "v": Number = 0;
    /// print the version and exit
    version "version": Switch = false;
    /// comma-separated pattern=N settings of detail per file (not built)
    vmodule "vmodule": Text = "";
    /// who runs the devices of the wireguard backend: auto, kernel or userspace; auto is the kernel
    /// where it can
    wireguard "wireguard": Text = "auto";
    /// how packet workers get a processor that others keep busy: auto (real time while they sleep
    /// most of the time, where it may be had, else short slices) or ordinary
    worker_priority "worker-priority": Text = "auto";
    /// `number` of packet workers, each on a processor of its own if there are several: auto or 1
    /// to 256
    workers "workers": Text = "auto";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_sorted_by_name() {
        assert!(FLAGS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }
}

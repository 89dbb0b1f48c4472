//! The one table of weftd's flags: name, place, default, help and how far the feature is built.
//! Holds no parsing; `go_flags` reads and prints by it, `build` turns the result into options.
//!
//! Policy for flags of flanneld whose feature is not built ([`Support`]): a flag that asks for the
//! feature itself refuses to start, because running without it would change what the host does.
//! A flag that flanneld too ignores unless such a feature is on starts with one warning, because
//! flanneld with the same command line would behave the same.

use crate::config::options::Secret;

/// Where a value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Nothing was said.
    Default,
    /// `FLANNELD_*`.
    Environment,
    /// The command line, which wins.
    CommandLine,
}

/// One flag's value and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting<T> {
    /// The value, syntactically right but not yet checked for meaning.
    pub(super) value: T,
    /// Who gave it.
    pub(super) source: Source,
}

impl<T> Setting<T> {
    fn new(value: impl Into<T>) -> Self {
        Self { value: value.into(), source: Source::Default }
    }

    /// Takes a value; values given later win.
    pub(super) fn set(&mut self, value: T, source: Source) {
        self.value = value;
        self.source = source;
    }

    /// Whether anybody gave it.
    pub(super) fn is_given(&self) -> bool {
        self.source != Source::Default
    }
}

/// The place of a flag's value in [`Settings`], which is also its Go type.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slot {
    /// Any text.
    Text(fn(&mut Settings) -> &mut Setting<String>),
    /// Any text, never shown.
    Secret(fn(&mut Settings) -> &mut Setting<Secret>),
    /// Any text, accumulating in order.
    List(fn(&mut Settings) -> &mut Setting<Vec<String>>),
    /// A Go `bool`, which takes a value only with `=`.
    Bool(fn(&mut Settings) -> &mut Setting<bool>),
    /// A Go `int`.
    Int(fn(&mut Settings) -> &mut Setting<i64>),
}

/// How far a flag's feature is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Support {
    /// It works.
    Built,
    /// Asking for it refuses to start. Holds what is missing, as the start of a sentence.
    Missing(&'static str),
    /// It only modifies an unbuilt feature, so a value other than the default warns. Holds the
    /// flag or feature without which flanneld ignores it too.
    #[cfg_attr(feature = "kube", expect(dead_code, reason = "all such features are built"))]
    Idle(&'static str),
}

/// One flag.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flag {
    /// Name without dashes.
    pub(super) name: &'static str,
    /// Type and place.
    pub(super) slot: Slot,
    /// How far it is built.
    pub(super) support: Support,
    /// Help; a word in backquotes names the value, as in Go.
    pub(super) help: &'static str,
}

/// What was said, per flag.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) etcd_cafile: Setting<String>,
    pub(super) etcd_certfile: Setting<String>,
    pub(super) etcd_endpoints: Setting<String>,
    pub(super) etcd_keyfile: Setting<String>,
    pub(super) etcd_password: Setting<Secret>,
    pub(super) etcd_prefix: Setting<String>,
    pub(super) etcd_username: Setting<String>,
    pub(super) engine: Setting<String>,
    pub(super) follow_address: Setting<bool>,
    pub(super) healthz_ip: Setting<String>,
    pub(super) healthz_port: Setting<i64>,
    pub(super) iface: Setting<Vec<String>>,
    pub(super) iface_can_reach: Setting<String>,
    pub(super) iface_regex: Setting<Vec<String>>,
    pub(super) ip_blackhole_route: Setting<bool>,
    pub(super) ip_masq: Setting<bool>,
    pub(super) ip_masq_fully_random_disable: Setting<bool>,
    pub(super) iptables_forward_rules: Setting<bool>,
    pub(super) iptables_resync: Setting<i64>,
    pub(super) kube_annotation_prefix: Setting<String>,
    pub(super) kube_api_url: Setting<String>,
    pub(super) kube_subnet_mgr: Setting<bool>,
    pub(super) kubeconfig_file: Setting<String>,
    pub(super) local_store: Setting<String>,
    pub(super) log_backtrace_at: Setting<String>,
    pub(super) log_format: Setting<String>,
    pub(super) net_config_path: Setting<String>,
    pub(super) offload: Setting<String>,
    pub(super) peer_check: Setting<String>,
    pub(super) public_ip: Setting<String>,
    pub(super) public_ipv6: Setting<String>,
    pub(super) set_node_network_unavailable: Setting<bool>,
    pub(super) stale_hold: Setting<String>,
    pub(super) start_from_cache: Setting<bool>,
    pub(super) status_socket: Setting<String>,
    pub(super) subnet_file: Setting<String>,
    pub(super) subnet_lease_renew_margin: Setting<i64>,
    pub(super) v: Setting<i64>,
    pub(super) version: Setting<bool>,
    pub(super) vmodule: Setting<String>,
    pub(super) workers: Setting<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            etcd_cafile: Setting::new(""),
            etcd_certfile: Setting::new(""),
            etcd_endpoints: Setting::new("http://127.0.0.1:4001,http://127.0.0.1:2379"),
            etcd_keyfile: Setting::new(""),
            etcd_password: Setting::new(Secret(String::new())),
            etcd_prefix: Setting::new("/coreos.com/network"),
            etcd_username: Setting::new(""),
            engine: Setting::new("auto"),
            follow_address: Setting::new(true),
            healthz_ip: Setting::new("0.0.0.0"),
            healthz_port: Setting::new(0),
            iface: Setting::new([]),
            iface_can_reach: Setting::new(""),
            iface_regex: Setting::new([]),
            ip_blackhole_route: Setting::new(false),
            ip_masq: Setting::new(false),
            ip_masq_fully_random_disable: Setting::new(false),
            iptables_forward_rules: Setting::new(true),
            iptables_resync: Setting::new(5),
            kube_annotation_prefix: Setting::new("flannel.alpha.coreos.com"),
            kube_api_url: Setting::new(""),
            kube_subnet_mgr: Setting::new(false),
            kubeconfig_file: Setting::new(""),
            local_store: Setting::new(""),
            log_backtrace_at: Setting::new(""),
            log_format: Setting::new("text"),
            net_config_path: Setting::new("/etc/kube-flannel/net-conf.json"),
            offload: Setting::new("auto"),
            peer_check: Setting::new("loose"),
            public_ip: Setting::new(""),
            public_ipv6: Setting::new(""),
            set_node_network_unavailable: Setting::new(true),
            stale_hold: Setting::new("15m"),
            start_from_cache: Setting::new(true),
            status_socket: Setting::new(""),
            subnet_file: Setting::new("/run/flannel/subnet.env"),
            subnet_lease_renew_margin: Setting::new(60),
            v: Setting::new(0),
            version: Setting::new(false),
            vmodule: Setting::new(""),
            workers: Setting::new("auto"),
        }
    }
}

#[cfg(feature = "kube")]
const KUBE: (Support, Support) = (Support::Built, Support::Built);
#[cfg(not(feature = "kube"))]
const KUBE: (Support, Support) = (
    Support::Missing("The Kubernetes subnet manager (cargo feature kube)"),
    Support::Idle("--kube-subnet-mgr"),
);

/// Every flag, in the order of Go's usage text (by name).
pub(super) const FLAGS: &[Flag] = &[
    Flag {
        name: "engine",
        slot: Slot::Text(|s| &mut s.engine),
        support: Support::Built,
        help: "packet `engine`: auto, io_uring or mmsg",
    },
    Flag {
        name: "etcd-cafile",
        slot: Slot::Text(|s| &mut s.etcd_cafile),
        support: Support::Built,
        help: "PEM `file` of the authority that etcd's certificates are checked against",
    },
    Flag {
        name: "etcd-certfile",
        slot: Slot::Text(|s| &mut s.etcd_certfile),
        support: Support::Built,
        help: "PEM `file` of the client certificate shown to etcd; needs etcd-keyfile",
    },
    Flag {
        name: "etcd-endpoints",
        slot: Slot::Text(|s| &mut s.etcd_endpoints),
        support: Support::Built,
        help: "comma-separated `URLs` of the etcd cluster",
    },
    Flag {
        name: "etcd-keyfile",
        slot: Slot::Text(|s| &mut s.etcd_keyfile),
        support: Support::Built,
        help: "PEM `file` of the client certificate's private key; needs etcd-certfile",
    },
    Flag {
        name: "etcd-password",
        slot: Slot::Secret(|s| &mut s.etcd_password),
        support: Support::Built,
        help: "password of etcd-username; rather set FLANNELD_ETCD_PASSWORD",
    },
    Flag {
        name: "etcd-prefix",
        slot: Slot::Text(|s| &mut s.etcd_prefix),
        support: Support::Built,
        help: "`prefix` of the keys in etcd",
    },
    Flag {
        name: "etcd-username",
        slot: Slot::Text(|s| &mut s.etcd_username),
        support: Support::Built,
        help: "`user` to authenticate to etcd as; needs etcd-password",
    },
    Flag {
        name: "follow-address",
        slot: Slot::Bool(|s| &mut s.follow_address),
        support: Support::Built,
        help: "move the tunnel and the lease when the address of the external interface is \
               replaced; false waits for a restart, as flanneld does",
    },
    Flag {
        name: "healthz-ip",
        slot: Slot::Text(|s| &mut s.healthz_ip),
        support: Support::Built,
        help: "`address` on which /healthz and /readyz answer",
    },
    Flag {
        name: "healthz-port",
        slot: Slot::Int(|s| &mut s.healthz_port),
        support: Support::Built,
        help: "port on which /healthz and /readyz answer; 0 is off",
    },
    Flag {
        name: "iface",
        slot: Slot::List(|s| &mut s.iface),
        support: Support::Built,
        help: "`interface` (name or address) for traffic between hosts; may be given several \
               times, the first that matches wins",
    },
    Flag {
        name: "iface-can-reach",
        slot: Slot::Text(|s| &mut s.iface_can_reach),
        support: Support::Built,
        help: "use the interface over which this `address` is reached",
    },
    Flag {
        name: "iface-regex",
        slot: Slot::List(|s| &mut s.iface_regex),
        support: Support::Built,
        help: "regular `expression` on interface addresses, then names; may be given several \
               times, tried after iface",
    },
    Flag {
        name: "ip-blackhole-route",
        slot: Slot::Bool(|s| &mut s.ip_blackhole_route),
        support: Support::Built,
        help: "keep a blackhole route for the own subnet, behind any other route to it",
    },
    Flag {
        name: "ip-masq",
        slot: Slot::Bool(|s| &mut s.ip_masq),
        support: Support::Built,
        help: "masquerade traffic that leaves the overlay",
    },
    Flag {
        name: "ip-masq-fully-random-disable",
        slot: Slot::Bool(|s| &mut s.ip_masq_fully_random_disable),
        support: Support::Built,
        help: "masquerade without random source ports",
    },
    Flag {
        name: "iptables-forward-rules",
        slot: Slot::Bool(|s| &mut s.iptables_forward_rules),
        support: Support::Built,
        help: "add accept rules for the overlay network to the FORWARD chain",
    },
    Flag {
        name: "iptables-resync",
        slot: Slot::Int(|s| &mut s.iptables_resync),
        support: Support::Built,
        help: "`seconds` between looks at the rules of iptables or nftables",
    },
    Flag {
        name: "kube-annotation-prefix",
        slot: Slot::Text(|s| &mut s.kube_annotation_prefix),
        support: KUBE.1,
        help: "`prefix` of the node annotations",
    },
    Flag {
        name: "kube-api-url",
        slot: Slot::Text(|s| &mut s.kube_api_url),
        support: KUBE.1,
        help: "`URL` of the Kubernetes API server; without it, of the kubeconfig or the pod",
    },
    Flag {
        name: "kube-subnet-mgr",
        slot: Slot::Bool(|s| &mut s.kube_subnet_mgr),
        support: KUBE.0,
        help: "take the subnet of this Node from the Kubernetes API",
    },
    Flag {
        name: "kubeconfig-file",
        slot: Slot::Text(|s| &mut s.kubeconfig_file),
        support: KUBE.1,
        help: "kubeconfig `file`; without it, the pod's service account",
    },
    Flag {
        name: "local-store",
        slot: Slot::Text(|s| &mut s.local_store),
        support: Support::Built,
        help: "keep configuration and leases as files in this `directory` instead of etcd",
    },
    Flag {
        name: "log-format",
        slot: Slot::Text(|s| &mut s.log_format),
        support: Support::Built,
        help: "`form` of the log lines: text (as klog writes) or json",
    },
    Flag {
        name: "log_backtrace_at",
        slot: Slot::Text(|s| &mut s.log_backtrace_at),
        support: Support::Missing("A stack trace at a line of the log"),
        help: "emit a stack trace when logging hits file:N (not built)",
    },
    Flag {
        name: "net-config-path",
        slot: Slot::Text(|s| &mut s.net_config_path),
        support: KUBE.1,
        help: "network configuration `file` with kube-subnet-mgr",
    },
    Flag {
        name: "offload",
        slot: Slot::Text(|s| &mut s.offload),
        support: Support::Built,
        help: "`offloads` the dataplane may use where the kernel has them: auto, none, or a \
               comma-separated list of tso, uso, gso, gro",
    },
    Flag {
        name: "peer-check",
        slot: Slot::Text(|s| &mut s.peer_check),
        support: Support::Built,
        help: "how `strict` inner sources are held against the sending peer: loose",
    },
    Flag {
        name: "public-ip",
        slot: Slot::Text(|s| &mut s.public_ip),
        support: Support::Built,
        help: "IPv4 `address` under which the other hosts reach this one",
    },
    Flag {
        name: "public-ipv6",
        slot: Slot::Text(|s| &mut s.public_ipv6),
        support: Support::Missing("IPv6 between and inside the hosts"),
        help: "IPv6 address under which the other hosts reach this one (not built)",
    },
    Flag {
        name: "set-node-network-unavailable",
        slot: Slot::Bool(|s| &mut s.set_node_network_unavailable),
        support: KUBE.1,
        help: "clear the Node's NetworkUnavailable condition once the network works",
    },
    Flag {
        name: "stale-hold",
        slot: Slot::Text(|s| &mut s.stale_hold),
        support: Support::Built,
        help: "`duration` for which nodes stay peers whose leases vanished with most others at \
               once, or with the store's data, such as 15m; 0 to give them up at once",
    },
    Flag {
        name: "start-from-cache",
        slot: Slot::Bool(|s| &mut s.start_from_cache),
        support: Support::Built,
        help: "remember configuration and peers beside the subnet file, and carry traffic by them \
               when the store cannot be reached at the start",
    },
    Flag {
        name: "status-socket",
        slot: Slot::Text(|s| &mut s.status_socket),
        support: Support::Built,
        help: "unix socket `path` on which the weft tool asks for status (default weft.sock \
               beside the subnet file)",
    },
    Flag {
        name: "subnet-file",
        slot: Slot::Text(|s| &mut s.subnet_file),
        support: Support::Built,
        help: "`file` to which the subnet's environment variables are written",
    },
    Flag {
        name: "subnet-lease-renew-margin",
        slot: Slot::Int(|s| &mut s.subnet_lease_renew_margin),
        support: Support::Built,
        help: "`minutes` before its expiry that the lease is renewed, 1 to 1439",
    },
    Flag {
        name: "v",
        slot: Slot::Int(|s| &mut s.v),
        support: Support::Built,
        help: "`level` of detail of the log: 0 normal, 1 and above more, 5 and above everything",
    },
    Flag {
        name: "version",
        slot: Slot::Bool(|s| &mut s.version),
        support: Support::Built,
        help: "print the version and exit",
    },
    Flag {
        name: "vmodule",
        slot: Slot::Text(|s| &mut s.vmodule),
        support: Support::Missing("Detail of the log per source file"),
        help: "comma-separated pattern=N settings of detail per file (not built)",
    },
    Flag {
        name: "workers",
        slot: Slot::Text(|s| &mut s.workers),
        support: Support::Built,
        help: "`number` of packet workers, each on a processor of its own if there are several: \
               auto or 1 to 256",
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(FLAGS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }

    #[test]
    fn every_setting_has_exactly_one_flag() {
        let mut settings = Settings::default();
        let places: BTreeSet<usize> = FLAGS
            .iter()
            .map(|flag| match flag.slot {
                Slot::Text(at) => std::ptr::from_mut(at(&mut settings)) as usize,
                Slot::Secret(at) => std::ptr::from_mut(at(&mut settings)) as usize,
                Slot::List(at) => std::ptr::from_mut(at(&mut settings)) as usize,
                Slot::Bool(at) => std::ptr::from_mut(at(&mut settings)) as usize,
                Slot::Int(at) => std::ptr::from_mut(at(&mut settings)) as usize,
            })
            .collect();
        assert_eq!(places.len(), FLAGS.len(), "two flags write one setting");
        let fields = format!("{settings:?}").matches("Setting {").count();
        assert_eq!(fields, FLAGS.len(), "a setting that no flag writes");
    }
}

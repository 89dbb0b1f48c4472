//! The one table of weftd's flags: name, type, default, how far the feature is built, help. Holds
//! no parsing; `go_flags` reads and prints by it, `build` turns the result into options.
//!
//! Policy for flags of flanneld whose feature is not built ([`Support`]): a flag that asks for the
//! feature itself refuses to start, because running without it would change what the host does.
//! A flag that flanneld too ignores unless such a feature is on starts with one warning, because
//! flanneld with the same command line would behave the same.

use crate::config::options::Secret;
use crate::config::setting::{AnySetting, Setting, Source};

use Support::{Built, Missing};

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
    /// Its place in [`Settings`].
    pub(super) setting: fn(&mut Settings) -> &mut dyn AnySetting,
    /// How far it is built.
    pub(super) support: Support,
    /// Help; a word in backquotes names the value, as in Go.
    pub(super) help: &'static str,
}

impl Flag {
    /// The flag or variable as its user gave it; `None` if nobody did.
    pub(super) fn given(&self, settings: &mut Settings) -> Option<String> {
        match (self.setting)(settings).source() {
            Source::Default => None,
            Source::Environment => Some(self.variable()),
            Source::CommandLine => Some(format!("--{}", self.name)),
        }
    }

    /// The variable that stands for the flag.
    pub(super) fn variable(&self) -> String {
        format!("FLANNELD_{}", self.name.to_ascii_uppercase().replace('-', "_"))
    }
}

/// Makes settings, defaults and flags of rows: `field "name": type = default, support, help;`.
macro_rules! flags {
    ($($field:ident $name:literal: $type:ty = $default:expr, $support:expr, $help:literal;)*) => {
        /// The value of each flag.
        #[derive(Debug, Clone)]
        pub(super) struct Settings {
            $(pub(super) $field: Setting<$type>,)*
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: Setting::new($default),)* }
            }
        }

        /// Every flag, in the order of Go's usage text (by name).
        pub(super) const FLAGS: &[Flag] = &[$(Flag {
            name: $name,
            setting: |settings| &mut settings.$field,
            support: $support,
            help: $help,
        },)*];
    };
}

#[cfg(feature = "kube")]
const KUBE: (Support, Support) = (Built, Built);
#[cfg(not(feature = "kube"))]
const KUBE: (Support, Support) = (
    Missing("The Kubernetes subnet manager (cargo feature kube)"),
    Support::Idle("--kube-subnet-mgr"),
);

flags! {
    engine "engine": String = "auto", Built,
        "packet `engine`: auto, io_uring or mmsg";
    etcd_cafile "etcd-cafile": String = "", Built,
        "PEM `file` of the authority that etcd's certificates are checked against";
    etcd_certfile "etcd-certfile": String = "", Built,
        "PEM `file` of the client certificate shown to etcd; needs etcd-keyfile";
    etcd_endpoints "etcd-endpoints": String = "http://127.0.0.1:4001,http://127.0.0.1:2379", Built,
        "comma-separated `URLs` of the etcd cluster";
    etcd_keyfile "etcd-keyfile": String = "", Built,
        "PEM `file` of the client certificate's private key; needs etcd-certfile";
    etcd_password "etcd-password": Secret = Secret(String::new()), Built,
        "password of etcd-username; rather set FLANNELD_ETCD_PASSWORD";
    etcd_prefix "etcd-prefix": String = "/coreos.com/network", Built,
        "`prefix` of the keys in etcd";
    etcd_username "etcd-username": String = "", Built,
        "`user` to authenticate to etcd as; needs etcd-password";
    follow_address "follow-address": bool = true, Built,
        "move the tunnel and the lease when the address of the external interface is replaced; \
         false waits for a restart, as flanneld does";
    healthz_ip "healthz-ip": String = "0.0.0.0", Built,
        "`address` on which /healthz and /readyz answer";
    healthz_port "healthz-port": i64 = 0, Built,
        "port on which /healthz and /readyz answer; 0 is off";
    iface "iface": Vec<String> = [], Built,
        "`interface` (name or address) for traffic between hosts; may be given several times, \
         the first that matches wins";
    iface_can_reach "iface-can-reach": String = "", Built,
        "use the interface over which this `address` is reached";
    iface_regex "iface-regex": Vec<String> = [], Built,
        "regular `expression` on interface addresses, then names; may be given several times, \
         tried after iface";
    ip_blackhole_route "ip-blackhole-route": bool = false, Built,
        "keep a blackhole route for the own subnet, behind any other route to it";
    ip_masq "ip-masq": bool = false, Built,
        "masquerade traffic that leaves the overlay";
    ip_masq_fully_random_disable "ip-masq-fully-random-disable": bool = false, Built,
        "masquerade without random source ports";
    iptables_forward_rules "iptables-forward-rules": bool = true, Built,
        "add accept rules for the overlay network to the FORWARD chain";
    iptables_resync "iptables-resync": i64 = 5, Built,
        "`seconds` between looks at the rules of iptables or nftables";
    kube_annotation_prefix "kube-annotation-prefix": String = "flannel.alpha.coreos.com", KUBE.1,
        "`prefix` of the node annotations";
    kube_api_url "kube-api-url": String = "", KUBE.1,
        "`URL` of the Kubernetes API server; without it, of the kubeconfig or the pod";
    kube_subnet_mgr "kube-subnet-mgr": bool = false, KUBE.0,
        "take the subnet of this Node from the Kubernetes API";
    kubeconfig_file "kubeconfig-file": String = "", KUBE.1,
        "kubeconfig `file`; without it, the pod's service account";
    local_store "local-store": String = "", Built,
        "keep configuration and leases as files in this `directory` instead of etcd";
    log_format "log-format": String = "text", Built,
        "`form` of the log lines: text (as klog writes) or json";
    log_backtrace_at "log_backtrace_at": String = "", Missing("A stack trace at a line of the log"),
        "emit a stack trace when logging hits file:N (not built)";
    net_config_path "net-config-path": String = "/etc/kube-flannel/net-conf.json", KUBE.1,
        "network configuration `file` with kube-subnet-mgr";
    offload "offload": String = "auto", Built,
        "`offloads` the dataplane may use where the kernel has them: auto, none, or a \
         comma-separated list of tso, uso, gso, gro";
    peer_check "peer-check": String = "loose", Built,
        "how `strict` inner sources are held against the sending peer: loose";
    public_ip "public-ip": String = "", Built,
        "IPv4 `address` under which the other hosts reach this one";
    public_ipv6 "public-ipv6": String = "", Missing("IPv6 between and inside the hosts"),
        "IPv6 address under which the other hosts reach this one (not built)";
    set_node_network_unavailable "set-node-network-unavailable": bool = true, KUBE.1,
        "clear the Node's NetworkUnavailable condition once the network works";
    stale_hold "stale-hold": String = "15m", Built,
        "`duration` for which nodes stay peers whose leases vanished with most others at once, \
         or with the store's data, such as 15m; 0 to give them up at once";
    start_from_cache "start-from-cache": bool = true, Built,
        "remember configuration and peers beside the subnet file, and carry traffic by them \
         when the store cannot be reached at the start";
    status_socket "status-socket": String = "", Built,
        "unix socket `path` on which the weft tool asks for status (default weft.sock beside \
         the subnet file)";
    subnet_file "subnet-file": String = "/run/flannel/subnet.env", Built,
        "`file` to which the subnet's environment variables are written";
    subnet_lease_renew_margin "subnet-lease-renew-margin": i64 = 60, Built,
        "`minutes` before its expiry that the lease is renewed, 1 to 1439";
    v "v": i64 = 0, Built,
        "`level` of detail of the log: 0 normal, 1 and above more, 5 and above everything";
    version "version": bool = false, Built,
        "print the version and exit";
    vmodule "vmodule": String = "", Missing("Detail of the log per source file"),
        "comma-separated pattern=N settings of detail per file (not built)";
    workers "workers": String = "auto", Built,
        "`number` of packet workers, each on a processor of its own if there are several: auto \
         or 1 to 256";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_sorted_by_name() {
        assert!(FLAGS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }
}

//! Validates the flags and builds [`Options`]. Any invalid value ends here with
//! an error that names the flag; nothing downstream checks an option again.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::SignedDuration;
use regex::Regex;

use crate::config::checked::{
    OptionError, Result, Variable, is_host_address, optional, parsed, refused, url,
};
use crate::config::flag_table::{FLAGS, FlagValues};
use crate::config::kube::{AnnotationPrefix, KubeOptions, environment};
use crate::config::options::{
    ClientCertificate, Credentials, DataplaneOptions, EngineChoice, EtcdOptions, FastPathChoice,
    InterfaceOptions, NEXT_SOCKET_SUFFIX, OffloadChoice, Options, RuleOptions, StoreOptions,
    WORKERS_MAX, WireguardChoice,
};
use crate::route::Families;
use crate::status::Setting;

/// A lease lives 24 hours, so a margin of 1440 minutes would renew at once and for ever.
const RENEW_MARGIN_MINUTES_MAX: u64 = 24 * 60 - 1;

/// Longest path of the status socket: with what follows for the socket beside it, and a closing
/// zero, it has to fit into the 108 bytes of `sun_path` (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107 - NEXT_SOCKET_SUFFIX.len();

/// The subnet file's usual name; beside it the status socket is plainly `weft.sock`.
const SUBNET_FILE_NAME: &str = "subnet.env";

/// flannel's file of this host's WireGuard key.
const WIREGUARD_KEY_FILE: &str = "/run/flannel/wgkey";

/// Longest grace period: an instant that far ahead can still be computed.
const STALE_HOLD_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// Checks `flags` and builds the options. What can be ignored is added to `warnings`.
pub(super) fn options(
    flags: &FlagValues,
    variable: Variable<'_>,
    warnings: &mut Vec<String>,
) -> Result<Options> {
    refuse_unbuilt(flags)?;
    warn_of_other_stores(flags, warnings);
    let subnet_file = subnet_file(&flags.subnet_file)?;
    Ok(Options {
        stale_hold: stale_hold(&flags.stale_hold)?,
        // What the cache remembers is a lease of a store in which nodes choose.
        start_from_cache: flags.start_from_cache && !flags.kube_subnet_mgr,
        renew_margin: renew_margin(flags.subnet_lease_renew_margin)?,
        interface: interface(flags)?,
        follow_address: flags.follow_address,
        health: health(&flags.healthz_ip, flags.healthz_port)?,
        rules: rules(flags)?,
        dataplane: DataplaneOptions {
            engine: choice("--engine", &flags.engine, EngineChoice::ALL)?,
            workers: workers(&flags.workers)?,
            workers_are_ordinary: is_other(
                "--worker-priority",
                &flags.worker_priority,
                ["auto", "ordinary"],
            )?,
            has_one_source_port: is_other("--source-ports", &flags.source_ports, ["auto", "one"])?,
            fast_path: choice("--fast-path", &flags.fast_path, FastPathChoice::ALL)?,
            offload: offload(&flags.offload)?,
            keep_tunnel: flags.keep_tunnel,
            is_peer_check_strict: is_other("--peer-check", &flags.peer_check, ["loose", "strict"])?,
            wireguard: choice("--wireguard", &flags.wireguard, WireguardChoice::ALL)?,
        },
        wireguard_key_file: variable("WIREGUARD_KEY_FILE")
            .filter(|path| !path.is_empty())
            .map_or_else(|| WIREGUARD_KEY_FILE.into(), PathBuf::from),
        log_is_json: is_other("--log-format", &flags.log_format, ["text", "json"])?,
        verbosity: u8::try_from(flags.v.clamp(0, i64::from(u8::MAX))).unwrap_or(u8::MAX),
        status_socket: status_socket(&flags.status_socket, &subnet_file)?,
        metrics_address: metrics_address(&flags.metrics_address)?,
        subnet_file,
        take_over: flags.take_over,
        settings: shown(flags),
        store: store(flags, variable)?,
    })
}

/// flanneld reads the flags of one store and says nothing about the others.
fn warn_of_other_stores(flags: &FlagValues, warnings: &mut Vec<String>) {
    let with_kube = flags.kube_subnet_mgr;
    let word = if with_kube { "with" } else { "without" };
    for (flag, given) in &flags.given {
        let is_idle = match *flag {
            "subnet-lease-renew-margin" | "start-from-cache" => with_kube,
            "kube-annotation-prefix" | "kube-api-url" | "kubeconfig-file" | "net-config-path" => {
                !with_kube
            }
            "set-node-network-unavailable" => !with_kube && !flags.set_node_network_unavailable,
            name => with_kube && name.starts_with("etcd-"),
        };
        if is_idle {
            warnings.push(format!("{given} has no effect {word} --kube-subnet-mgr"));
        }
    }
}

/// All flags, to be shown.
fn shown(flags: &FlagValues) -> Vec<Setting> {
    // The table's accessors are for reading in.
    let mut values = flags.clone();
    let each = FLAGS.iter().map(|flag| Setting {
        name: flag.name.to_owned(),
        value: (flag.place)(&mut values).text(),
        given_by: flags.given.get(flag.name).cloned(),
    });
    each.collect()
}

/// To run without what these flags of flanneld ask for would change what the host does.
fn refuse_unbuilt(flags: &FlagValues) -> Result<()> {
    let unbuilt = [
        ("log_backtrace_at", &flags.log_backtrace_at, "A stack trace at a line of the log"),
        ("vmodule", &flags.vmodule, "Detail of the log per source file"),
    ];
    for (flag, text, missing) in unbuilt {
        if let Some(given) = flags.given.get(flag).filter(|_| !text.is_empty()) {
            return Err(OptionError(format!(
                "{missing} is not built into this weftd: remove {given} or run flanneld"
            )));
        }
    }
    Ok(())
}

/// The text begins with flanneld's phrase, which operators grep for.
fn renew_margin(minutes: i64) -> Result<Duration> {
    match u64::try_from(minutes) {
        Ok(valid @ 1..=RENEW_MARGIN_MINUTES_MAX) => Ok(Duration::from_secs(valid * 60)),
        _ => Err(OptionError(format!(
            "Invalid subnet-lease-renew-margin option {minutes}, it should be between 1 and 1439 \
             minutes"
        ))),
    }
}

fn stale_hold(text: &str) -> Result<Duration> {
    // As in Go, zero needs no unit.
    let with_unit = if text == "0" { "0s" } else { text };
    let hold: SignedDuration =
        parsed("--stale-hold", with_unit, "a duration such as 15m or 1h30m, or 0")?;
    let hold = Duration::try_from(hold).map_err(|_negative| {
        refused("--stale-hold", format!("{text:?} is less than nothing: use 0 or more"))
    })?;
    Ok(hold.min(STALE_HOLD_MAX))
}

fn interface(flags: &FlagValues) -> Result<InterfaceOptions> {
    let regexes = flags.iface_regex.iter().map(|text| {
        Regex::new(text).map_err(|error| {
            refused("--iface-regex", format!("{text:?} is not a regular expression: {error}"))
        })
    });
    let can_reach = optional(&flags.iface_can_reach)
        .map(|text| parsed("--iface-can-reach", text, "an IP address"));
    Ok(InterfaceOptions {
        interfaces: flags.iface.clone(),
        regexes: regexes.collect::<Result<_>>()?,
        can_reach: can_reach.transpose()?,
        public_ip: optional(&flags.public_ip).map(public_ip).transpose()?,
        public_ipv6: optional(&flags.public_ipv6).map(public_ipv6).transpose()?,
        families: Families::default(),
    })
}

/// The text begins with flanneld's phrase. Go's `ParseIP` also takes `::ffff:192.0.2.1` for an IPv4
/// address.
fn public_ip(text: &str) -> Result<Ipv4Addr> {
    match text.parse::<IpAddr>().map(|address| address.to_canonical()) {
        Ok(IpAddr::V4(address)) if is_host_address(address.into()) => Ok(address),
        _ => Err(OptionError(format!(
            "invalid public IP address: {text:?}: --public-ip takes the IPv4 address of one host"
        ))),
    }
}

/// The text begins with flanneld's phrase.
fn public_ipv6(text: &str) -> Result<Ipv6Addr> {
    let is_host = |address: &Ipv6Addr| is_host_address((*address).into());
    text.parse().ok().filter(is_host).ok_or_else(|| {
        OptionError(format!(
            "invalid public IPv6 address: {text:?}: --public-ipv6 takes the IPv6 address of a host"
        ))
    })
}

fn health(address: &str, port: i64) -> Result<Option<SocketAddr>> {
    // Go listens on every address when the host part is empty.
    let address = optional(address).unwrap_or("0.0.0.0");
    let address: IpAddr = parsed("--healthz-ip", address, "an IP address")?;
    let port = u16::try_from(port).map_err(|_out_of_range| {
        refused("--healthz-port", format!("{port} is not a port: use 1 to 65535, or 0 for none"))
    })?;
    Ok((port != 0).then(|| SocketAddr::new(address, port)))
}

fn rules(flags: &FlagValues) -> Result<RuleOptions> {
    let seconds = flags.iptables_resync;
    let resync = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).ok_or_else(|| {
        let problem = format!("{seconds} is not a valid period: use 1 second or more");
        refused("--iptables-resync", problem)
    })?;
    Ok(RuleOptions {
        masquerade: flags.ip_masq,
        random_ports: !flags.ip_masq_fully_random_disable,
        forward: flags.iptables_forward_rules,
        blackhole_route: flags.ip_blackhole_route,
        guard: flags.guard,
        resync: Duration::from_secs(resync),
    })
}

/// The one of `choices` that `text` names.
fn choice<T: Copy + Display>(flag: &str, text: &str, choices: &[T]) -> Result<T> {
    let names: Vec<_> = choices.iter().map(T::to_string).collect();
    let chosen = names.iter().position(|name| name == text).map(|at| choices[at]);
    let problem = || format!("{text:?} is unknown: use {}", names.join(" or "));
    chosen.ok_or_else(|| refused(flag, problem()))
}

/// Whether `text` names the second of `choices`.
fn is_other(flag: &str, text: &str, choices: [&str; 2]) -> Result<bool> {
    Ok(choice(flag, text, &choices)? == choices[1])
}

fn workers(text: &str) -> Result<Option<NonZeroU16>> {
    if text == "auto" {
        return Ok(None);
    }
    let count = text.parse().ok().filter(|count: &NonZeroU16| count.get() <= WORKERS_MAX);
    let problem = || format!("{text:?} is not a number of workers: use auto or 1 to {WORKERS_MAX}");
    count.map(Some).ok_or_else(|| refused("--workers", problem()))
}

fn offload(text: &str) -> Result<OffloadChoice> {
    const NAMES: [&str; 4] = ["tso", "uso", "gso", "gro"];
    let given = match text {
        "auto" => NAMES.to_vec(),
        "none" => Vec::new(),
        list => list.split(',').collect(),
    };
    if let Some(other) = given.iter().find(|name| !NAMES.contains(name)) {
        let problem = "is not an offload: use auto, none, or a list of tso, uso, gso, gro";
        return Err(refused("--offload", format!("{other:?} {problem}")));
    }
    let [tso, uso, gso, gro] = NAMES.map(|name| given.contains(&name));
    Ok(OffloadChoice { tso, uso, gso, gro, automatic: text == "auto" })
}

fn subnet_file(text: &str) -> Result<PathBuf> {
    let path = PathBuf::from(text);
    if path.file_name().is_none() || text.ends_with('/') || text.contains('\0') {
        return Err(refused("--subnet-file", format!("{text:?} names no file")));
    }
    Ok(path)
}

fn metrics_address(text: &str) -> Result<Option<SocketAddr>> {
    if text.is_empty() {
        return Ok(None);
    }
    let address = text.parse().ok().filter(|address: &SocketAddr| address.port() != 0);
    let problem = || format!("{text:?} is no address and port, such as 127.0.0.1:8286");
    address.map(Some).ok_or_else(|| refused("--metrics-address", problem()))
}

fn status_socket(text: &str, subnet_file: &Path) -> Result<PathBuf> {
    let path = match optional(text) {
        Some(text) => PathBuf::from(text),
        None if subnet_file.file_name().is_some_and(|name| name == SUBNET_FILE_NAME) => {
            subnet_file.with_file_name("weft.sock")
        }
        None => subnet_file.with_extension("weft.sock"),
    };
    let length_bytes = path.as_os_str().len();
    if length_bytes > SOCKET_PATH_BYTES_MAX || path.file_name().is_none() || text.contains('\0') {
        let problem = format!(
            "{} cannot be a socket's path ({length_bytes} bytes, {SOCKET_PATH_BYTES_MAX} at most): \
             give another path",
            path.display()
        );
        return Err(refused("--status-socket", problem));
    }
    Ok(path)
}

fn store(flags: &FlagValues, variable: Variable<'_>) -> Result<StoreOptions> {
    let is_local = flags.given.contains_key("local-store");
    let of_etcd = || flags.given.keys().copied().find(|flag| flag.starts_with("etcd-"));
    let other = flags.kube_subnet_mgr.then_some("kube-subnet-mgr").or_else(of_etcd);
    // Leases can live in one place only.
    if let Some(other) = other.filter(|_| is_local) {
        return Err(OptionError(format!(
            "--local-store and --{other} (flag or environment) exclude each other: keep one of them"
        )));
    }
    if flags.kube_subnet_mgr {
        return kube(flags, variable).map(StoreOptions::Kube);
    }
    if !is_local {
        return etcd(flags).map(StoreOptions::Etcd);
    }
    if flags.local_store.is_empty() {
        return Err(refused("--local-store", "an empty path names no directory"));
    }
    Ok(StoreOptions::Local(PathBuf::from(&flags.local_store)))
}

fn kube(flags: &FlagValues, variable: Variable<'_>) -> Result<KubeOptions> {
    let (node, wait_for_ever) = environment(variable)?;
    let api_url = optional(&flags.kube_api_url)
        .map(|text| url("--kube-api-url", text, true, "--kubeconfig-file"));
    Ok(KubeOptions {
        api_url: api_url.transpose()?,
        kubeconfig: optional(&flags.kubeconfig_file).map(PathBuf::from),
        annotations: AnnotationPrefix::parse(&flags.kube_annotation_prefix)?,
        network_config: PathBuf::from(&flags.net_config_path),
        clear_network_unavailable: flags.set_node_network_unavailable,
        node,
        wait_for_ever,
    })
}

fn etcd(flags: &FlagValues) -> Result<EtcdOptions> {
    let ca_file = optional(&flags.etcd_cafile).map(PathBuf::from);
    let client_certificate = both(
        ("--etcd-certfile", optional(&flags.etcd_certfile)),
        ("--etcd-keyfile", optional(&flags.etcd_keyfile)),
    )?;
    let client_certificate = client_certificate.map(|(certificate_file, key_file)| {
        ClientCertificate { certificate_file: certificate_file.into(), key_file: key_file.into() }
    });
    let by_certificate = client_certificate.as_ref().map(|_| "--etcd-certfile");
    let tls_flag = ca_file.as_ref().map(|_| "--etcd-cafile").or(by_certificate);
    let endpoints = flags.etcd_endpoints.split(',');
    let endpoints = endpoints.map(|text| endpoint(text, tls_flag)).collect::<Result<_>>()?;
    let prefix = clean_prefix(&flags.etcd_prefix)?;
    let credentials = both(
        ("--etcd-username", optional(&flags.etcd_username)),
        ("--etcd-password", optional(&flags.etcd_password.0)),
    )?;
    let credentials = credentials.map(|(username, _)| Credentials {
        username: username.to_owned(),
        password: flags.etcd_password.clone(),
    });
    Ok(EtcdOptions { endpoints, prefix, ca_file, client_certificate, credentials })
}

/// Reads one URL of an etcd server. Without a scheme it is plain http, as for etcd's own clients
/// without certificates.
fn endpoint(text: &str, tls_flag: Option<&str>) -> Result<String> {
    const FLAG: &str = "--etcd-endpoints";
    let user_flags = "--etcd-username and FLANNELD_ETCD_PASSWORD";
    let whole = url(FLAG, text, false, user_flags)?;
    match tls_flag {
        Some(flag) if whole.starts_with("http:") => {
            let problem = format!(
                "{text:?} is plain http, but {flag} is given: certificates need https:// endpoints"
            );
            Err(refused(FLAG, problem))
        }
        Some(_) | None => Ok(whole),
    }
}

/// The prefix as flanneld's keys have it, which Go's `path.Join` makes: no empty parts, no dots,
/// no slash at the end. The root is the empty prefix of keys such as `/config`.
fn clean_prefix(text: &str) -> Result<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let (rooted, joined) = (text.starts_with('/'), parts.join("/"));
    if joined.is_empty() && !rooted {
        let problem = format!("{text:?} is not a prefix: use one such as /coreos.com/network");
        return Err(refused("--etcd-prefix", problem));
    }
    Ok(if rooted && !joined.is_empty() { format!("/{joined}") } else { joined })
}

fn both<T>(
    first: (&'static str, Option<T>),
    second: (&'static str, Option<T>),
) -> Result<Option<(T, T)>> {
    match (first, second) {
        ((_, Some(first)), (_, Some(second))) => Ok(Some((first, second))),
        ((_, None), (_, None)) => Ok(None),
        ((given, Some(_)), (absent, None)) | ((absent, None), (given, Some(_))) => {
            Err(OptionError(format!("{given} needs {absent} as well")))
        }
    }
}

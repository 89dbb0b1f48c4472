//! Validates the flags and builds [`Options`]. Any invalid value ends here with
//! an error that names the flag; nothing downstream checks an option again.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::Uri;
use regex::Regex;

use crate::config::build_kube::{kube, warn_of_other_stores};
use crate::config::duration;
use crate::config::flag_table::{FLAGS, Settings, Support};
use crate::config::options::{
    ClientCertificate, Credentials, EngineChoice, EtcdOptions, InterfaceOptions, LogFormat,
    OffloadChoice, Options, RuleOptions, StoreOptions, WorkersChoice,
};

/// A lease lives 24 hours, so a margin of 1440 minutes would renew at once and for ever.
const RENEW_MARGIN_MINUTES_MAX: i64 = 24 * 60 - 1;

/// Longest path of a unix socket: `sun_path` holds 108 bytes with the closing zero (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The subnet file's usual name; beside it the status socket is plainly `weft.sock`.
const SUBNET_FILE_NAME: &str = "subnet.env";

/// Why the values of the flags stop a start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum OptionError {
    /// The feature is not built.
    #[error("{missing} is not built into this weftd: remove {given} or run flanneld")]
    NotBuilt {
        /// What is missing.
        missing: &'static str,
        /// The flag or variable that asks for it.
        given: String,
    },
    /// A value outside its meaning.
    #[error("{flag}: {problem}")]
    Value {
        /// The flag with its dashes.
        flag: &'static str,
        /// Which value, what is wrong, what would be right.
        problem: String,
    },
    /// flanneld's phrase, which operators grep for.
    #[error(
        "Invalid subnet-lease-renew-margin option {0}, it should be between 1 and 1439 minutes"
    )]
    RenewMargin(i64),
    /// flanneld's phrase.
    #[error("invalid public IP address: {0:?}: --public-ip takes the IPv4 address of one host")]
    PublicIp(String),
    /// Two flags that need each other.
    #[error("{given} needs {absent} as well")]
    Incomplete {
        /// The flag that was given.
        given: &'static str,
        /// The flag that is absent.
        absent: &'static str,
    },
    /// Leases can live in one place only.
    #[error("--local-store and {other} (flag or environment) exclude each other: keep one of them")]
    TwoStores {
        /// The other store's flag.
        other: String,
    },
    /// Flags and variables of Kubernetes.
    #[cfg(feature = "kube")]
    #[error(transparent)]
    Kube(#[from] crate::config::kube::KubeOptionError),
}

/// Checks `settings` and builds the options. What can be ignored is added to `warnings`.
pub(super) fn options(
    mut settings: Settings,
    variable: impl Fn(&str) -> Option<OsString>,
    warnings: &mut Vec<String>,
) -> Result<Options, OptionError> {
    refuse_unbuilt(&mut settings, warnings)?;
    warn_of_other_stores(&mut settings, warnings);
    check_peer_check(&settings.peer_check.value)?;
    let subnet_file = subnet_file(&settings.subnet_file.value)?;
    Ok(Options {
        stale_hold: stale_hold(&settings.stale_hold.value)?,
        // What the cache remembers is a lease of a store in which nodes choose.
        start_from_cache: settings.start_from_cache.value && !settings.kube_subnet_mgr.value,
        renew_margin: renew_margin(settings.subnet_lease_renew_margin.value)?,
        interface: interface(&settings)?,
        follow_address: settings.follow_address.value,
        health: health(&settings.healthz_ip.value, settings.healthz_port.value)?,
        rules: rules(&settings)?,
        engine: engine(&settings.engine.value)?,
        workers: workers(&settings.workers.value)?,
        offload: offload(&settings.offload.value)?,
        log_format: log_format(&settings.log_format.value)?,
        verbosity: u8::try_from(settings.v.value.clamp(0, i64::from(u8::MAX))).unwrap_or(u8::MAX),
        status_socket: status_socket(&settings.status_socket.value, &subnet_file)?,
        subnet_file,
        store: store(&mut settings, variable)?,
    })
}

/// Applies the table's policy on flags whose feature is not built.
fn refuse_unbuilt(settings: &mut Settings, warnings: &mut Vec<String>) -> Result<(), OptionError> {
    let mut defaults = Settings::default();
    for flag in FLAGS {
        let Some(given) = flag.given(settings) else { continue };
        let value = (flag.setting)(settings).shown();
        match flag.support {
            // A bool asks for its feature when true, even where true is the default.
            Support::Missing(missing) if !value.is_empty() => {
                return Err(OptionError::NotBuilt { missing, given });
            }
            Support::Idle(feature) if value != (flag.setting)(&mut defaults).shown() => {
                warnings.push(format!(
                    "{given} has no effect: it only matters with {feature}, not built into this \
                     weftd"
                ));
            }
            Support::Built | Support::Missing(_) | Support::Idle(_) => {}
        }
    }
    Ok(())
}

fn renew_margin(minutes: i64) -> Result<Duration, OptionError> {
    match u64::try_from(minutes) {
        Ok(valid @ 1..) if minutes <= RENEW_MARGIN_MINUTES_MAX => {
            Ok(Duration::from_secs(valid * 60))
        }
        _ => Err(OptionError::RenewMargin(minutes)),
    }
}

fn stale_hold(text: &str) -> Result<Duration, OptionError> {
    duration::parse(text).ok_or_else(|| {
        value("--stale-hold", format!("{text:?} is no duration such as 15m or 1h30m, or 0"))
    })
}

fn interface(settings: &Settings) -> Result<InterfaceOptions, OptionError> {
    let regexes = settings.iface_regex.value.iter().map(|text| {
        Regex::new(text).map_err(|error| {
            value("--iface-regex", format!("{text:?} is no regular expression: {error}"))
        })
    });
    let can_reach = optional(&settings.iface_can_reach.value).map(|text| {
        text.parse().map_err(|_not_an_address| {
            value("--iface-can-reach", format!("{text:?} is not an IP address"))
        })
    });
    Ok(InterfaceOptions {
        interfaces: settings.iface.value.clone(),
        regexes: regexes.collect::<Result<_, _>>()?,
        can_reach: can_reach.transpose()?,
        public_ip: optional(&settings.public_ip.value).map(public_ip).transpose()?,
    })
}

/// Go's `ParseIP` also takes `::ffff:192.0.2.1` for an IPv4 address.
fn public_ip(text: &str) -> Result<Ipv4Addr, OptionError> {
    match text.parse::<IpAddr>().map(|address| address.to_canonical()) {
        Ok(IpAddr::V4(address))
            if !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast() =>
        {
            Ok(address)
        }
        _ => Err(OptionError::PublicIp(text.to_owned())),
    }
}

fn health(address: &str, port: i64) -> Result<Option<SocketAddr>, OptionError> {
    // Go listens on every address when the host part is empty.
    let address = optional(address).unwrap_or("0.0.0.0");
    let address: IpAddr = address.parse().map_err(|_not_an_address| {
        value("--healthz-ip", format!("{address:?} is not an IP address"))
    })?;
    let port = u16::try_from(port).map_err(|_out_of_range| {
        value("--healthz-port", format!("{port} is no port: use 1 to 65535, or 0 for none"))
    })?;
    Ok((port != 0).then(|| SocketAddr::new(address, port)))
}

fn rules(settings: &Settings) -> Result<RuleOptions, OptionError> {
    let seconds = settings.iptables_resync.value;
    let resync = match u64::try_from(seconds) {
        Ok(valid @ 1..) => Duration::from_secs(valid),
        _ => {
            let problem = format!("{seconds} is no period: use 1 or more seconds");
            return Err(value("--iptables-resync", problem));
        }
    };
    Ok(RuleOptions {
        masquerade: settings.ip_masq.value,
        random_ports: !settings.ip_masq_fully_random_disable.value,
        forward: settings.iptables_forward_rules.value,
        blackhole_route: settings.ip_blackhole_route.value,
        resync,
    })
}

fn engine(text: &str) -> Result<EngineChoice, OptionError> {
    match text {
        "auto" => Ok(EngineChoice::Auto),
        "mmsg" => Ok(EngineChoice::Mmsg),
        "io_uring" => Ok(EngineChoice::IoUring),
        _ => Err(value("--engine", format!("{text:?} is no engine: use auto, io_uring or mmsg"))),
    }
}

fn workers(text: &str) -> Result<WorkersChoice, OptionError> {
    if text == "auto" {
        return Ok(WorkersChoice::Auto);
    }
    match text.parse::<NonZeroU16>() {
        Ok(count) if count.get() <= WorkersChoice::MAX => Ok(WorkersChoice::Exactly(count)),
        _ => {
            let most = WorkersChoice::MAX;
            let problem = format!("{text:?} is no number of workers: use auto or 1 to {most}");
            Err(value("--workers", problem))
        }
    }
}

fn offload(text: &str) -> Result<OffloadChoice, OptionError> {
    match text {
        "auto" => return Ok(OffloadChoice::ALL),
        "none" => return Ok(OffloadChoice::NONE),
        _ => {}
    }
    let mut choice = OffloadChoice::NONE;
    for name in text.split(',') {
        match name {
            "tso" => choice.tso = true,
            "uso" => choice.uso = true,
            "gso" => choice.gso = true,
            "gro" => choice.gro = true,
            _ => {
                let problem = format!(
                    "{name:?} is no offload: use auto, none, or a list of tso, uso, gso, gro"
                );
                return Err(value("--offload", problem));
            }
        }
    }
    Ok(choice)
}

fn check_peer_check(text: &str) -> Result<(), OptionError> {
    match text {
        "loose" => Ok(()),
        "strict" => Err(OptionError::NotBuilt {
            missing: "The strict peer check",
            given: "--peer-check=strict".to_owned(),
        }),
        _ => Err(value("--peer-check", format!("{text:?} is no peer check: use loose"))),
    }
}

fn log_format(text: &str) -> Result<LogFormat, OptionError> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(value("--log-format", format!("{text:?} is no form: use text or json"))),
    }
}

fn subnet_file(text: &str) -> Result<PathBuf, OptionError> {
    let path = PathBuf::from(text);
    if path.file_name().is_none() || text.ends_with('/') || text.contains('\0') {
        return Err(value("--subnet-file", format!("{text:?} names no file")));
    }
    Ok(path)
}

fn status_socket(text: &str, subnet_file: &Path) -> Result<PathBuf, OptionError> {
    let path = match optional(text) {
        Some(text) => PathBuf::from(text),
        None if subnet_file.file_name().is_some_and(|name| name == SUBNET_FILE_NAME) => {
            subnet_file.with_file_name("weft.sock")
        }
        None => {
            let mut name = subnet_file.file_stem().unwrap_or_default().to_owned();
            name.push(".weft.sock");
            subnet_file.with_file_name(name)
        }
    };
    let length_bytes = path.as_os_str().len();
    if length_bytes > SOCKET_PATH_BYTES_MAX || path.file_name().is_none() || text.contains('\0') {
        let problem = format!(
            "{} cannot be a socket's path ({length_bytes} bytes, {SOCKET_PATH_BYTES_MAX} at most): \
             give another path",
            path.display()
        );
        return Err(value("--status-socket", problem));
    }
    Ok(path)
}

fn store(
    settings: &mut Settings,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<StoreOptions, OptionError> {
    if settings.kube_subnet_mgr.value {
        if settings.local_store.is_given() {
            return Err(OptionError::TwoStores { other: "--kube-subnet-mgr".to_owned() });
        }
        return kube(settings, variable);
    }
    if !settings.local_store.is_given() {
        return etcd(settings).map(StoreOptions::Etcd);
    }
    let directory = settings.local_store.value.clone();
    if directory.is_empty() {
        return Err(value("--local-store", "an empty path names no directory".to_owned()));
    }
    let mut etcd_flags = FLAGS.iter().filter(|flag| flag.name.starts_with("etcd-"));
    match etcd_flags.find(|flag| flag.given(settings).is_some()) {
        Some(flag) => Err(OptionError::TwoStores { other: format!("--{}", flag.name) }),
        None => Ok(StoreOptions::Local(PathBuf::from(directory))),
    }
}

fn etcd(settings: &Settings) -> Result<EtcdOptions, OptionError> {
    let ca_file = optional(&settings.etcd_cafile.value).map(PathBuf::from);
    let client_certificate = both(
        ("--etcd-certfile", optional(&settings.etcd_certfile.value)),
        ("--etcd-keyfile", optional(&settings.etcd_keyfile.value)),
    )?;
    let client_certificate = client_certificate.map(|(certificate_file, key_file)| {
        ClientCertificate { certificate_file: certificate_file.into(), key_file: key_file.into() }
    });
    let tls_flag = match (&ca_file, &client_certificate) {
        (Some(_), _) => Some("--etcd-cafile"),
        (None, Some(_)) => Some("--etcd-certfile"),
        (None, None) => None,
    };
    let endpoints = settings.etcd_endpoints.value.split(',');
    let endpoints = endpoints.map(|text| endpoint(text, tls_flag)).collect::<Result<_, _>>()?;
    let prefix = clean_prefix(&settings.etcd_prefix.value)?;
    let credentials = both(
        ("--etcd-username", optional(&settings.etcd_username.value)),
        ("--etcd-password", optional(&settings.etcd_password.value.0)),
    )?;
    let credentials = credentials.map(|(username, _)| Credentials {
        username: username.to_owned(),
        password: settings.etcd_password.value.clone(),
    });
    Ok(EtcdOptions { endpoints, prefix, ca_file, client_certificate, credentials })
}

/// Reads one URL of an etcd server. Without a scheme it is plain http, as for etcd's own clients
/// without certificates. Complaints about a URL with a user part do not repeat it,
/// because a password may be in there.
fn endpoint(text: &str, tls_flag: Option<&str>) -> Result<String, OptionError> {
    const FLAG: &str = "--etcd-endpoints";
    if text.contains('@') {
        let problem = "a URL must not hold a user: use --etcd-username and \
                       FLANNELD_ETCD_PASSWORD instead";
        return Err(value(FLAG, problem.to_owned()));
    }
    let whole = url(FLAG, text, PathPart::Forbidden)?;
    match tls_flag {
        Some(flag) if whole.starts_with("http:") => {
            let problem = format!(
                "{text:?} is plain http, but {flag} is given: certificates need https:// endpoints"
            );
            Err(value(FLAG, problem))
        }
        Some(_) | None => Ok(whole),
    }
}

/// Whether a server may be below a path, as behind a proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PathPart {
    Forbidden,
    #[cfg(feature = "kube")]
    Allowed,
}

/// Reads the URL of a server.
pub(super) fn url(flag: &'static str, text: &str, path: PathPart) -> Result<String, OptionError> {
    let wrong = |why: &str| {
        Err(value(flag, format!("{text:?} {why}: write http://host:port or https://host:port")))
    };
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let Ok(url) = whole.parse::<Uri>() else { return wrong("is not a URL") };
    let scheme = url.scheme_str();
    if scheme != Some("http") && scheme != Some("https") {
        return wrong("is no http or https URL");
    }
    let Some(authority) = url.authority().filter(|authority| !authority.host().is_empty()) else {
        return wrong("names no host");
    };
    // The part after the host is a port or nothing: hyper keeps a colon with a bad number.
    let after_host = &authority.as_str()[authority.host().len()..];
    if !after_host.is_empty() && authority.port_u16().is_none_or(|port| port == 0) {
        return wrong("has a bad port");
    }
    let has_path = url.path() != "/" && path == PathPart::Forbidden;
    if has_path || url.query().is_some() {
        return wrong("has a path");
    }
    Ok(whole)
}

/// The prefix as flanneld's keys have it, which Go's `path.Join` makes: no empty parts, no dots,
/// no slash at the end. The root is the empty prefix of keys such as `/config`.
fn clean_prefix(text: &str) -> Result<String, OptionError> {
    let mut parts: Vec<&str> = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let rooted = text.starts_with('/');
    if parts.is_empty() && !rooted {
        let problem = format!("{text:?} is no prefix: use one such as /coreos.com/network");
        return Err(value("--etcd-prefix", problem));
    }
    Ok(parts.iter().enumerate().fold(String::new(), |mut prefix, (index, part)| {
        if rooted || index > 0 {
            prefix.push('/');
        }
        prefix.push_str(part);
        prefix
    }))
}

fn both<T>(
    first: (&'static str, Option<T>),
    second: (&'static str, Option<T>),
) -> Result<Option<(T, T)>, OptionError> {
    match (first, second) {
        ((_, Some(first)), (_, Some(second))) => Ok(Some((first, second))),
        ((_, None), (_, None)) => Ok(None),
        ((given, Some(_)), (absent, None)) | ((absent, None), (given, Some(_))) => {
            Err(OptionError::Incomplete { given, absent })
        }
    }
}

/// In Go an empty text is the same as a flag left out.
pub(super) fn optional(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

pub(super) fn value(flag: &'static str, problem: String) -> OptionError {
    OptionError::Value { flag, problem }
}

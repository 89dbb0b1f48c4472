//! Reads the facts: procfs, netlink, the firewall's programs, the status socket and etcd. Opens
//! what is only there to be opened, and changes nothing.

mod daemon;
mod endpoints;
mod process;
mod sockets;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statvfs};
use tokio::runtime::Runtime;

use super::facts::{Asked, Directory, Facts, Host, SubnetText, Way};
use super::firewall::{self, Chain};
use crate::config::subnet_file::Previous;
use crate::config::whole_file;
use crate::control::clock::unix_seconds;
use crate::failure::with_causes;
use crate::host::netlink::policies::has_policies;
use crate::host::netlink::{Netlink, NetlinkError};
use crate::netfilter::program::{IPTABLES_SAVE, NFT, Program, ProgramError};
use crate::route::Prefix;
use crate::tool::arguments::CheckArguments;
use crate::tool::refusal::why;

/// Far beyond any `subnet.env`.
const SUBNET_FILE_BYTES_MAX: u64 = 64 << 10;

/// Peers whose ways are asked about: milliseconds.
const WAYS_MAX: usize = 256;

/// Single files below `/proc/sys`.
const SYSCTLS: [&str; 7] = [
    "kernel/io_uring_disabled",
    "net/ipv4/ip_forward",
    "net/bridge/bridge-nf-call-iptables",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "net/core/rmem_max",
    "net/core/wmem_max",
];

/// Those of each device.
const DEVICE_SYSCTLS: [&str; 2] = ["forwarding", "rp_filter"];

/// Is there while systemd-timesyncd runs and has synchronised the clock.
const SYNCHRONISED: &str = "/run/systemd/timesync/synchronized";

/// Everything that the checks look at.
pub(super) fn facts(arguments: &CheckArguments) -> anyhow::Result<Facts> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let daemon = daemon::read(&runtime, &arguments.daemon.socket);
    let asked = Asked {
        socket: arguments.daemon.socket.clone(),
        subnet_file: arguments.subnet_file.clone(),
        port: arguments.port,
        interface: arguments.iface.clone(),
    };
    let processes = process::list();
    let mut facts = Facts {
        process: process::read(daemon.pid),
        others: process::others(&processes, daemon.pid),
        udp_sockets: sockets::read(&processes),
        receive_errors: sockets::receive_errors(),
        tun: Some(open_tun()),
        io_uring: Some(crate::sys::ring::probe().map_err(|error| with_causes(&error))),
        sysctls: sysctls(),
        subnet_file: subnet_file(&asked.subnet_file),
        directory: directory(&asked.subnet_file),
        etcd: endpoints::ask_all(&arguments.etcd_endpoints),
        clock_is_synchronised: Some(Path::new(SYNCHRONISED).exists()),
        now_unix: unix_seconds(),
        daemon,
        asked,
        ..Facts::default()
    };
    let networks = [facts.lease().map(|lease| lease.network), facts.subnet_file.network];
    facts.host = runtime.block_on(host(networks)).ok();
    facts.ways = runtime.block_on(ways(&facts)).ok().flatten();
    facts.has_ipsec = runtime.block_on(has_policies()).ok();
    match firewall(&runtime) {
        Ok(chains) => facts.firewall = Some(chains),
        Err(why) => facts.firewall_error = Some(why),
    }
    Ok(facts)
}

/// Opening alone makes no device.
fn open_tun() -> Result<(), String> {
    let mut options = fs::OpenOptions::new();
    let opened = options.read(true).write(true).open("/dev/net/tun");
    opened.map(drop).map_err(|error| error.to_string())
}

/// Default routes and those in the networks: hosts may have many others.
async fn host(networks: [Option<Prefix>; 2]) -> Result<Host, NetlinkError> {
    let netlink = Netlink::open()?;
    let wanted = |destination: Prefix| {
        destination.length_bits() == 0
            || networks.into_iter().flatten().any(|network| network.covers(destination))
    };
    Ok(Host {
        links: netlink.links().await?,
        addresses: netlink.addresses().await?,
        routes: Netlink::routes_to(wanted).await?,
    })
}

/// The kernel's routes to the peers and back, of the first of very many.
async fn ways(facts: &Facts) -> Result<Option<Vec<Way>>, NetlinkError> {
    let (Some(status), Some(lease)) = (facts.status(), facts.lease()) else { return Ok(None) };
    let Some(index) = facts.interface().and_then(|name| facts.link(name)).map(|link| link.id.index)
    else {
        return Ok(None);
    };
    let netlink = Netlink::open()?;
    let local = facts.tunnel_address().map_or(lease.public_ip, |address| *address.ip());
    let mut ways = Vec::new();
    let mut hosts = BTreeMap::new();
    for peer in &status.routes {
        *hosts.entry(peer.via.host()).or_default() |= peer.state.is_alarming();
    }
    for (host, is_alarming) in hosts.into_iter().take(WAYS_MAX) {
        let to = match facts.port() {
            Some(port) => {
                let [from, to] = [local, host].map(|end| SocketAddrV4::new(end, port));
                netlink.path_of_datagram(from, to).await
            }
            None => netlink.path_to(host).await,
        };
        let from = netlink.path_of_forwarded(host, local, index).await;
        let [to, from] = [to, from].map(|path| match path {
            Ok(_) => Ok(Ok(())),
            Err(NetlinkError::Refused { source, .. }) => Ok(Err(why(&source))),
            Err(error) => Err(error),
        });
        ways.push(Way { host, to: to?, from: from?, is_alarming });
    }
    Ok(Some(ways).filter(|ways| !ways.is_empty()))
}

fn sysctls() -> BTreeMap<String, u64> {
    let mut names: Vec<_> = SYSCTLS.iter().map(|name| (*name).to_owned()).collect();
    let devices = fs::read_dir("/proc/sys/net/ipv4/conf").into_iter().flatten().flatten();
    for device in devices.filter_map(|entry| entry.file_name().into_string().ok()) {
        names.extend(DEVICE_SYSCTLS.map(|name| format!("net/ipv4/conf/{device}/{name}")));
    }
    let read = |name: String| {
        let text = fs::read_to_string(Path::new("/proc/sys").join(&name)).ok()?;
        Some((name, text.trim().parse().ok()?))
    };
    names.into_iter().filter_map(read).collect()
}

fn subnet_file(path: &Path) -> SubnetText {
    let is_there = path.exists();
    let text = match whole_file::read(path, SUBNET_FILE_BYTES_MAX) {
        Ok(Some(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
        Ok(None) => return SubnetText { is_there, ..SubnetText::default() },
        Err(error) => {
            let error = Some(with_causes(&error));
            return SubnetText { is_there, error, ..SubnetText::default() };
        }
    };
    let Previous { network, subnet, .. } = Previous::parse(&text);
    let mtu = text.lines().find_map(|line| line.trim().strip_prefix("FLANNEL_MTU="));
    let mtu_bytes = mtu.and_then(|mtu| mtu.trim().parse().ok());
    SubnetText { is_there, error: None, network, subnet, mtu_bytes }
}

fn directory(subnet_file: &Path) -> Option<Directory> {
    let path = subnet_file.ancestors().skip(1).find(|path| path.is_dir())?;
    let space = statvfs(path).ok()?;
    Some(Directory {
        path: PathBuf::from(path),
        is_writable: access(path, Access::WRITE_OK).is_ok(),
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        free_files: space.f_favail,
        counts_files: space.f_files > 0,
    })
}

/// The rules of both firewalls.
fn firewall(runtime: &Runtime) -> Result<Vec<Chain>, String> {
    let nft = output(runtime, NFT, &["-j", "list", "ruleset"]);
    let iptables = output(runtime, IPTABLES_SAVE, &[]);
    let nft = nft.and_then(|text| {
        firewall::nftables::parse(&text).ok_or_else(|| "nft answered no JSON".to_owned())
    });
    let iptables = iptables.map(|text| firewall::iptables::parse(&text));
    match (nft, iptables) {
        (Ok(one), Ok(other)) => Ok([one, other].concat()),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
        (Err(one), Err(other)) => Err(format!("{one}; {other}")),
    }
}

fn output(runtime: &Runtime, program: Program, arguments: &[&str]) -> Result<String, String> {
    let mut text = String::new();
    let take = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    let result: Result<(), ProgramError> = runtime.block_on(program.run(arguments, "", take));
    result.map_err(|error| with_causes(&error))?;
    Ok(text)
}

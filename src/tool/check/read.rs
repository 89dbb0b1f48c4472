//! Reads the facts: procfs, netlink, the firewall's programs, the status socket and etcd. Opens
//! what is only there to be opened, and changes nothing.

mod arp;
mod endpoints;
mod process;
mod sockets;

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statvfs};
use rustix::io::Errno;

use super::facts::{
    CheckedFamily, Directory, Facts, FamilyFacts, Filter, OwnRoute, PeerWay, Resolved, SubnetFacts,
};
use super::firewall;
use crate::config::subnet_file::Previous;
use crate::control::clock::unix_seconds;
use crate::failure::with_causes;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::lock::lock_path;
use crate::host::netlink::filters::{FilterPlace, Side, unusual_disciplines};
use crate::host::netlink::policies::{for_sent, has_policies};
use crate::host::netlink::{self, neighbours, routes};
use crate::host::state::{EntryTable, Link, MacAddress, PathToHost};
use crate::netfilter::program::{NFT, Program};
use crate::route::Prefix;
use crate::status::Lease;
use crate::tool::arguments::CheckArguments;
use crate::tool::ask::wait_for;
use crate::tool::explain::{self, PodsWays, first_pod};
use crate::tool::refusal::{or_refused, way_in, why};

/// Peers whose ways are asked about: milliseconds.
const WAYS_MAX: usize = 256;

/// Routes into this host's subnet that are asked about: more than a node has pods by default.
const OWN_ROUTES_MAX: usize = 256;

/// In prefixes that leave hosts so many bits the second one exists.
const POD_HOST_BITS_MIN: u8 = 3;

/// Addresses of this host, and of peers, whose owners are asked for.
const ASKED_MAX: usize = 16;

/// Single files below `/proc/sys`.
const SYSCTLS: [&str; 6] = [
    "kernel/io_uring_disabled",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
    "net/bridge/bridge-nf-call-iptables",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
];

/// Those of each device.
const DEVICE_SYSCTLS: [&str; 2] = ["forwarding", "rp_filter"];

/// Everything that the checks look at.
pub(super) fn facts(asked: CheckArguments) -> anyhow::Result<Facts> {
    let daemon = process::daemon(&asked.answered.daemon.socket);
    let tun = fs::File::options().read(true).write(true).open("/dev/net/tun");
    let mut facts = Facts {
        process: process::read(daemon.pid),
        others: process::others(daemon.pid),
        udp_sockets: sockets::read(),
        tun_error: tun.err().map(|error| error.to_string()),
        io_uring_error: crate::sys::ring::probe().err().map(|error| with_causes(&error)),
        sysctls: sysctls(),
        forwards_ipv6: explain::forwards_ipv6(),
        subnet_file: subnet_file(&asked.subnet_file),
        directory: directory(&asked.subnet_file),
        now_unix: unix_seconds(),
        daemon,
        asked,
        ..Facts::default()
    };
    wait_for(async {
        facts.etcd = endpoints::ask_all(&facts.asked.etcd_endpoints).await;
        facts.host = host(&facts).await.ok();
        facts.filters = filters(&facts).await.unwrap_or_default();
        facts.resolved = resolved(&facts).await;
        facts.has_ipsec = has_policies().await.ok();
        facts.policies = for_sent().await.unwrap_or_default();
        let nft = output(NFT, &["-j", "list", "ruleset"]).await;
        facts.v4 = of_family(&facts, &nft).await;
        if facts.networks().is_ok_and(|networks| networks.v6().is_some()) {
            facts.v6 = of_family(&facts, &nft).await;
        }
    })?;
    facts.v4.ways = with_ends(&facts);
    facts.v6.ways = with_ends(&facts);
    Ok(facts)
}

/// The ways, with what becomes of what this host's pods send.
fn with_ends<A: CheckedFamily>(facts: &Facts) -> Vec<PeerWay<A>> {
    let end = |way: &PeerWay<A>| own_pods_end(facts, way.subnet);
    A::facts(facts)
        .ways
        .iter()
        .map(|way| PeerWay { own_pods_end: end(way), ..way.clone() })
        .collect()
}

/// Why what this host's pods send to those of a peer with this `subnet` ends here, if it is sent.
fn own_pods_end<A: CheckedFamily>(facts: &Facts, subnet: Prefix<A>) -> Option<String> {
    let settings = format!("net/{}/", A::NAME.to_lowercase());
    // The kernel refuses everything then, and other checks say so.
    let is_off = |(name, value): (&String, &u64)| {
        *value == 0 && name.starts_with(&settings) && name.ends_with("/forwarding")
    };
    if facts.sysctls.iter().any(is_off) {
        return None;
    }
    let status = facts.status()?;
    let peer = status.routes.iter().find(|peer| A::subnet(peer) == Some(subnet))?;
    let peers = std::slice::from_ref(peer);
    let ways = explain::pods_ways(first_pod(subnet), status, peers);
    let PodsWays::EndsThere(why) = ways else { return None };
    let ends = format!("what this host's pods send there ends on this host: {why}");
    peer.state.is_sent_to().then_some(ends)
}

/// Opening alone makes no device.
/// Default routes and those in the networks: hosts may have many others.
async fn host(facts: &Facts) -> netlink::Result<Listing> {
    let host = Listing::with_routes(|to| is_wanted(facts, to)).await?;
    let addresses_v6 = netlink::addresses().await.unwrap_or_default();
    let routes_v6 = routes::routes_to(|to| is_wanted(facts, to)).await.unwrap_or_default();
    Ok(Listing { addresses_v6, routes_v6, ..host })
}

fn is_wanted<A: CheckedFamily>(facts: &Facts, destination: Prefix<A>) -> bool {
    let of_daemon = facts.lease().and_then(Lease::networks);
    let networks = [of_daemon, facts.subnet_file.says.networks].into_iter().flatten();
    destination.length_bits() == 0
        || networks.filter_map(A::of_both).any(|network| network.covers(destination))
}

/// Routes into parts of this host's subnet, of all tables, and what the kernel does with packets to
/// an address of each.
async fn own_routes<A: CheckedFamily>(facts: &Facts) -> Option<Vec<OwnRoute<A>>> {
    let subnet = A::leased(facts.lease()?)?.subnet;
    let device = facts.comes_by::<A>().and_then(|name| facts.link(name));
    let from = facts.status()?.routes.iter().find_map(A::subnet).map(first_pod);
    let all = routes::of_all_tables(|to| subnet.covers(to)).await.ok()?;
    let mut found = Vec::new();
    for (table, route) in all.into_iter().take(OWN_ROUTES_MAX) {
        let destination = route.destination;
        let is_narrow = destination.length_bits() + POD_HOST_BITS_MIN > A::BITS;
        let to = if is_narrow { destination.network() } else { first_pod(destination) };
        let path = match from.zip(device) {
            Some((from, device)) => {
                netlink::path_of_forwarded(from, to, device.id.index, 0).await.ok()
            }
            None => None,
        };
        // What the source check refuses, or forwarding that is off, is no matter of the route.
        let path = if path.is_none() { netlink::path_to(to).await.ok() } else { path };
        found.push(OwnRoute { table, route, path });
    }
    Some(found)
}

/// The kernel's routes to the peers and back, of the first of very many.
async fn ways<A: CheckedFamily>(facts: &Facts) -> Option<Vec<PeerWay<A>>> {
    let index = facts.link(facts.interface()?)?.id.index;
    let local = facts.own_address().or_else(|| A::said_address(facts))?;
    let mut hosts = BTreeMap::new();
    for peer in &facts.status()?.routes {
        let host = A::via(peer).and_then(|via| A::of(via.host()));
        let Some((subnet, host)) = A::subnet(peer).zip(host) else { continue };
        let (is_alarming, _) = hosts.entry(host).or_insert((false, subnet));
        *is_alarming |= peer.state.is_alarming();
    }
    let mut ways = Vec::new();
    for (host, (is_alarming, subnet)) in hosts.into_iter().take(WAYS_MAX) {
        let to = match facts.port() {
            Some(port) => {
                let [from, to] = [local, host].map(|end| SocketAddr::new(end.into(), port));
                netlink::path_of_datagram(from, to).await
            }
            None => netlink::path_to(host).await,
        };
        let from = netlink::path_of_forwarded(host, local, index, 0).await;
        let (to, from) = (or_refused(to).ok()?, or_refused(from).ok()?);
        // Packets may come by the interface by which this host sends.
        let (is_other, name) =
            (to.as_ref().is_ok_and(|to| to.interface_index != index), facts.link_name(index));
        let from_refused = from.err().map(|error| match is_other {
            false => why(&error),
            true => format!("{}, if its packets come by {name}", why(&error)),
        });
        let to_refused = to.map_or_else(|error| Some(why(&error)), |to| ends_here(facts, host, to));
        let pods_refused = pods_refused(facts, host, subnet).await;
        ways.push(PeerWay {
            host,
            subnet,
            to_refused,
            from_refused,
            pods_refused,
            own_pods_end: None,
            is_alarming,
        });
    }
    Some(ways)
}

/// Why what is sent to `host` by this path does not leave this one, if that is so.
fn ends_here<A: CheckedFamily>(facts: &Facts, host: A, path: PathToHost) -> Option<String> {
    let FamilyListing { links, addresses, .. } = A::listed(facts.host.as_ref()?);
    let is_local = |link: &Link| link.id.index == path.interface_index && link.is_loopback;
    links.iter().find(|link| is_local(link))?;
    let own = addresses.iter().find(|it| it.address == host);
    Some(match own.map(|it| facts.link_name(it.interface_index)) {
        Some(name) => format!("{name} of this host has that address, so what is for it ends here"),
        None => "a route has what is for it end on this host".to_owned(),
    })
}

/// Why the kernel does not forward what a pod in the `subnet` of `host` sends to one of this host,
/// if a rule or a route of such a type says so; nothing where no interface leads to this host's
/// pods.
async fn pods_refused<A: CheckedFamily>(
    facts: &Facts,
    host: A,
    subnet: Prefix<A>,
) -> Option<String> {
    let [from, to] = [subnet, A::of_both(facts.lease()?.subnets()?)?].map(first_pod);
    let device = facts.link(facts.comes_by::<A>()?)?.id.index;
    or_refused(netlink::path_to(to).await).ok()?.ok()?;
    let by = way_in(from, host.into(), Some(device)).await.ok()??;
    let path = netlink::path_of_forwarded(from, to, by, 0).await;
    let error = or_refused(path).ok()?.err()?;
    let is_told = matches!(Errno::from_io_error(&error), Some(Errno::ACCESS | Errno::INVAL));
    let (ip, name) = (A::NAME.replace("IPv", "ip -"), facts.link_name(by));
    let query = format!("`{ip} route get {to} from {from} iif {name}`");
    is_told.then(|| format!("{} ({query})", why(&error)))
}

/// What others have put on the external link and the overlay's device.
async fn filters(facts: &Facts) -> Option<Vec<Filter>> {
    let mut found = Vec::new();
    for name in [facts.interface(), facts.device(), facts.ipv6_device()].into_iter().flatten() {
        let link = facts.link(name)?;
        let index = link.id.index;
        let mut add = |text, has_action| found.push(Filter { text, has_action });
        for (side, way) in [(Side::Egress, "egress"), (Side::Ingress, "ingress")] {
            for kind in FilterPlace::of_others(index, side).await.ok()? {
                // Agents of every kind look at packets by programs.
                let has_action = side == Side::Egress && kind != "bpf";
                add(format!("{kind} filter ({way} of {name})"), has_action);
            }
        }
        for kind in unusual_disciplines(index).await.ok()? {
            add(format!("queueing discipline {kind} ({name})"), false);
        }
        if link.has_xdp {
            add(format!("XDP program ({name})"), false);
        }
    }
    Some(found)
}

/// Who has the addresses of this host on the external link, and those of peers with an alarm.
async fn resolved(facts: &Facts) -> Option<Vec<Resolved>> {
    let (host, link) = (facts.host.as_ref()?, facts.link(facts.interface()?)?);
    let on_link = host.addresses.iter().filter(|it| it.interface_index == link.id.index);
    let own: Vec<_> = on_link.map(|it| it.address).take(ASKED_MAX).collect();
    let asked: Vec<_> = own.iter().copied().chain(facts.alarming().take(ASKED_MAX)).collect();
    let mut answers = arp::who_has(&asked, link.id.index, link.mac?).ok()?;
    let entries = neighbours::entries::<Ipv4Addr>(&link.id).await.ok()?;
    // Any interface of a host answers for all its addresses.
    let is_other = |mac: &MacAddress| host.links.iter().all(|link| link.mac != Some(*mac));
    let resolved = asked.into_iter().map(|address| Resolved {
        address,
        is_own: own.contains(&address),
        answers: answers.remove(&address).into_iter().flatten().filter(is_other).collect(),
        permanent: entries
            .iter()
            .find(|entry| entry.table == EntryTable::Neighbours && entry.address == address)
            .map(|entry| entry.mac),
    });
    Some(resolved.collect())
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

fn subnet_file(path: &Path) -> SubnetFacts {
    let (is_there, read) = (path.exists(), Previous::read(path));
    let has_lock = lock_path(path).is_ok_and(|lock| lock.exists());
    let error = read.as_ref().err().map(|error| with_causes(error));
    SubnetFacts { is_there, has_lock, error, says: read.unwrap_or_default() }
}

fn directory(subnet_file: &Path) -> Option<Directory> {
    let path = subnet_file.ancestors().skip(1).find(|path| path.is_dir())?;
    let space = statvfs(path).ok()?;
    Some(Directory {
        path: PathBuf::from(path),
        is_writable: access(path, Access::WRITE_OK).is_ok(),
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        free_files: (space.f_files > 0).then_some(space.f_favail),
    })
}

/// The ways, and the rules of both firewalls: nft shows those of iptables as well, but for
/// iptables-legacy's.
async fn of_family<A: CheckedFamily>(
    facts: &Facts,
    nft: &Result<String, String>,
) -> FamilyFacts<A> {
    let nft = nft.as_ref().map_err(Clone::clone).and_then(|text| {
        firewall::nftables::parse(text).ok_or_else(|| "nft answered no JSON".to_owned())
    });
    let iptables = output(A::IPTABLES.save, &[]).await;
    let name = A::IPTABLES.list.name;
    let (firewall, unread) = match (nft, iptables.map(|text| firewall::iptables::parse(&text))) {
        (Ok(one), Ok(other)) => (Some([one, other].concat()), None),
        (Ok(chains), Err(why)) => {
            (Some(chains), Some(format!("rules by {name}-legacy, if any, are unread: {why}")))
        }
        (Err(why), Ok(chains)) => (Some(chains), Some(format!("nft's rules are unread: {why}"))),
        (Err(one), Err(other)) => (None, Some(format!("{one}; {other}"))),
    };
    let own_routes = own_routes(facts).await.unwrap_or_default();
    FamilyFacts { ways: ways(facts).await.unwrap_or_default(), own_routes, firewall, unread }
}

async fn output(program: Program, arguments: &[&str]) -> Result<String, String> {
    program.run(arguments, "").await.map_err(|error| with_causes(&error))
}

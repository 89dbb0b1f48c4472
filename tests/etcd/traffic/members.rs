//! A cluster of three members with certificates and users: its leader changes, tokens end,
//! certificates are replaced, members die and fall silent.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::control::PREFIX;
use crate::support::lab::{Namespace, wait_until};
use crate::support::members::{Members, Setup, TOKEN_TTL, Version, lease_key};
use crate::support::overlay::CONFIG;
use crate::support::pace::Stopwatch;
use crate::support::status::Status;
use crate::traffic::site::{Plan, RECONNECT, Site};

/// Who owns what is nobody's.
const NOBODY: u32 = 65_534;

/// Later than the leader's change is nobody told of anything.
const LAG: Duration = Duration::from_secs(2);

/// A path that says nothing any more is given up within this time.
const NOTICED: Duration = Duration::from_secs(20);

/// F8, F10 and F12 under traffic.
#[test]
fn tls_cluster_member_changes_lose_no_packet() {
    let members = secure();
    let mut site = Site::build(plan(&members));
    connect(&site, &members);
    site.start_daemons(2);
    let mut news = News::of(&members);
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let began = Instant::now();
        for change in 0..3 {
            members.move_leader(change);
            news.arrive(site, change, LAG, "a leader change loses no event");
        }
        // The next request needs another token, and nobody hears of it.
        thread::sleep((TOKEN_TTL * 2).saturating_sub(began.elapsed()));
        for (host, told) in told.iter().enumerate() {
            told.assert_no_warning(&site.daemons[host]);
        }
        let used = member_of(&site.cluster.hosts[0]);
        members.kill(used);
        news.arrive(site, (used + 1) % 3, RECONNECT, "nodes go on with the members that live");
        members.spawn_all();
        news.arrive(site, used, LAG, "the member is back");
        told[0].assert_warned(&site.daemons[0], "");
    });
    report.assert_nothing_lost("a cluster whose members change and die");
    site.assert_settled();
}

/// F8, F9, F10 and F12 under traffic: members that stay connected and say nothing, certificates
/// that are replaced, tokens that end all the time; and F2 with such a cluster.
#[test]
fn silent_tls_members_lose_no_packet() {
    let members = secure();
    let mut site = Site::build(plan(&members));
    connect(&site, &members);
    // So that each host has a member of its own; what a host cannot reach costs it no start.
    drop_packets(&site.cluster.hosts[0], &[2]);
    drop_packets(&site.cluster.hosts[1], &[0, 1]);
    site.start_daemons(2);
    let mut news = News::of(&members);
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        news.arrive(site, 0, LAG, "an endpoint that drops everything delays nothing");
        // Where the hosts watch, also when their requests go elsewhere.
        let watched = [member_of(&site.cluster.hosts[0]), 2];
        drop_packets(&site.cluster.hosts[0], &[]);
        drop_packets(&site.cluster.hosts[1], &[]);
        members.new_server_certificate(2);
        members.new_client_certificate();
        news.arrive(site, 1, LAG, "a new certificate loses no event");
        for (host, told) in told.iter().enumerate() {
            told.assert_no_warning(&site.daemons[host]);
        }
        // By now with tokens that have ended several times.
        members.freeze(watched[0], true);
        drop_packets(&site.cluster.hosts[1], &watched[1..]);
        let other = (0..3).find(|member| !watched.contains(member));
        news.arrive(site, other.unwrap(), NOTICED, "silent members are given up");
        news.arrive(site, other.unwrap(), LAG, "a silent member delays nothing any more");
        members.freeze(watched[0], false);
        drop_packets(&site.cluster.hosts[1], &[]);
        for (host, told) in told.iter().enumerate() {
            let daemon = &site.daemons[host];
            told.assert_warned(daemon, "");
        }
    });
    report.assert_nothing_lost("a cluster whose members fall silent");
    site.assert_settled();
    starts_without_etcd(&mut site, &members);
}

/// F2, of a cluster of three with certificates and users.
#[track_caller]
fn starts_without_etcd(site: &mut Site, members: &Members) {
    const WARM: Duration = Duration::from_secs(1);
    let entry = || {
        let subnets = format!("{PREFIX}/subnets/{}-24", site.leases[0].network());
        let json = members.ctl(&["get", &subnets, "-w", "json"]);
        serde_json::from_str::<serde_json::Value>(&json).unwrap()["kvs"][0].clone()
    };
    let before = entry();
    site.daemons[0].stop(Signal::KILL, WARM);
    members.kill_all();
    let started = Stopwatch::start();
    let daemon = site.weftd(0, &[]);
    let address = site.leases[1].pod_address().to_string();
    let status = || Status::try_of(&site.dir(0));
    wait_until(WARM, "a node without its cluster is ready", || {
        status().is_some_and(|status| status.0["ready"] == true && status.0["stale"] == true)
    });
    wait_until(WARM.saturating_sub(started.elapsed()), "pods reach each other", || {
        site.pods[0].succeeds(&["ping", "-q", "-c1", "-W0.1", &address])
    });
    println!("without its cluster the node carries after {:?}", started.elapsed());
    members.spawn_all();
    wait_until(RECONNECT, "the cluster confirms what is stale", || {
        status().is_some_and(|status| status.0["stale"] == false)
    });
    assert_eq!(entry(), before, "the own entry is another one");
    site.daemons[0] = daemon;
    site.wait_for_routes(1, site.routes(0).expect("it runs"));
    site.assert_settled();
}

/// Leases of further nodes, one after the other.
struct News<'a> {
    members: &'a Members,
    peers: usize,
}

impl<'a> News<'a> {
    /// Of a site of two hosts that know each other.
    fn of(members: &'a Members) -> Self {
        Self { members, peers: 1 }
    }

    /// Writes by one of the members, and waits until both hosts have it.
    #[track_caller]
    fn arrive(&mut self, site: &Site, by: usize, limit: Duration, what: &str) {
        self.peers += 1;
        let peers = self.peers;
        let (key, url) = (lease_key(u8::try_from(peers).unwrap()), self.members.url(by));
        let value = format!(r#"{{"PublicIP":"192.0.2.{peers}"}}"#);
        // A cluster without a leader takes nothing, until it has elected another.
        wait_until(RECONNECT, "etcd takes news", || {
            self.members.try_ctl(&url, &["put", &key, &value]).is_ok()
        });
        let written = Instant::now();
        wait_until(limit, what, || [0, 1].map(|host| site.routes(host)) == [Some(peers); 2]);
        println!("news after {:?}", written.elapsed());
    }
}

fn secure() -> Members {
    let members = Members::start(Setup { version: Version::V3_5, count: 3, secure: true });
    members.ctl(&["put", &format!("{PREFIX}/config"), CONFIG]);
    members
}

/// Gives the site's hosts a way to the members.
fn connect(site: &Site, members: &Members) {
    let cluster = &site.cluster;
    members.namespace.link("up0", &cluster.switch, "members", 1500);
    cluster.switch.exec(&["ip", "link", "set", "members", "master", "br0"]);
    members.namespace.address("up0", "172.20.0.250/24");
    for host in &cluster.hosts {
        host.exec(&["ip", "route", "add", "172.20.9.0/24", "via", "172.20.0.250"]);
    }
}

/// Drops all packets of `host` to and from these members, and of no other.
fn drop_packets(host: &Namespace, members: &[usize]) {
    host.succeeds(&["nft", "delete", "table", "inet", "holes"]);
    host.exec(&["nft", "add table inet holes"]);
    for (hook, end) in [("output", "daddr"), ("input", "saddr")] {
        let chain =
            format!("add chain inet holes {hook} {{ type filter hook {hook} priority 0; }}");
        host.exec(&["nft", &chain]);
        for member in members {
            let address = format!("172.20.9.{}", member + 1);
            host.exec(&["nft", &format!("add rule inet holes {hook} ip {end} {address} drop")]);
        }
    }
}

/// The member that a host is connected to.
fn member_of(host: &Namespace) -> usize {
    let connections = host.exec(&["ss", "-Htn", "state", "established", "dport = :2379"]);
    let member = (0..3).find(|member| connections.contains(&format!("172.20.9.{}:", member + 1)));
    member.unwrap_or_else(|| panic!("connected to no member: {connections}"))
}

/// Two hosts that know all members.
fn plan(members: &Members) -> Plan {
    let options = members.options(&[0, 1, 2]);
    let certificate = options.client_certificate.expect("the cluster is secure");
    let credentials = options.credentials.expect("the cluster is secure");
    let authority = options.ca_file.expect("the cluster is secure");
    // Another user's, as where a program renews it: weftd reads it at each connection, with the
    // rights that it has kept.
    let key = &certificate.key_file;
    chown(key, Some(NOBODY), Some(NOBODY)).expect("tests run as root");
    set_permissions(key, Permissions::from_mode(0o600)).expect("tests run as root");
    Plan {
        // The site's own etcd stays empty.
        config: None,
        endpoints: options.endpoints.join(","),
        flags: vec![
            format!("--etcd-cafile={}", authority.display()),
            format!("--etcd-certfile={}", certificate.certificate_file.display()),
            format!("--etcd-keyfile={}", certificate.key_file.display()),
            format!("--etcd-username={}", credentials.username),
        ],
        environment: vec![format!("FLANNELD_ETCD_PASSWORD={}", credentials.password.0)],
        ..Plan::of(Version::V3_5)
    }
}

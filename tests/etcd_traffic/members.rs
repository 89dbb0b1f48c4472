//! A cluster of three members with certificates and users: its leader changes, tokens end, and a
//! member dies.

use std::thread;
use std::time::{Duration, Instant};

use crate::site::{Plan, RECONNECT, Site};
use crate::support::control::PREFIX;
use crate::support::lab::{Namespace, wait_until};
use crate::support::members::{Members, Setup, TOKEN_TTL, Version, lease_key};
use crate::support::overlay::CONFIG;

/// F8, F10 and F12 under traffic.
#[test]
fn a_secure_cluster_whose_members_change_and_die_costs_no_packet() {
    const LAG: Duration = Duration::from_secs(2);
    let members = Members::start(Setup { version: Version::V3_5, count: 3, secure: true });
    members.ctl(&["put", &format!("{PREFIX}/config"), CONFIG]);
    let mut site = Site::build(plan(&members));
    let cluster = &site.cluster;
    members.namespace.link("up0", &cluster.switch, "members", 1500);
    cluster.switch.exec(&["ip", "link", "set", "members", "master", "br0"]);
    members.namespace.address("up0", "172.20.0.250/24");
    for host in &cluster.hosts {
        host.exec(&["ip", "route", "add", "172.20.9.0/24", "via", "172.20.0.250"]);
    }
    site.start_daemons(2);
    let mut peers = 1;
    let mut wait_for_news = |site: &Site, by: usize, limit: Duration, what: &str| {
        peers += 1;
        let (key, url) = (lease_key(u8::try_from(peers).unwrap()), members.url(by));
        let value = format!(r#"{{"PublicIP":"192.0.2.{peers}"}}"#);
        // A cluster without a leader takes nothing, until it has elected another.
        wait_until(RECONNECT, "etcd takes news", || {
            members.try_ctl(&url, &["put", &key, &value]).is_ok()
        });
        let written = Instant::now();
        wait_until(limit, what, || [0, 1].map(|host| site.routes(host)) == [Some(peers); 2]);
        println!("news after {:?}", written.elapsed());
    };
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let began = Instant::now();
        for change in 0..3 {
            members.move_leader(change);
            wait_for_news(site, change, LAG, "a leader change loses no event");
        }
        // The next request needs another token, and nobody hears of it.
        thread::sleep((TOKEN_TTL * 2).saturating_sub(began.elapsed()));
        for (host, told) in told.iter().enumerate() {
            told.assert_no_warning(&site.daemons[host]);
        }
        let used = member_of(&site.cluster.hosts[0]);
        members.kill(used);
        wait_for_news(site, (used + 1) % 3, RECONNECT, "nodes go on with the members that live");
        members.spawn_all();
        wait_for_news(site, used, LAG, "the member is back");
        told[0].assert_plain(&site.daemons[0], "without the store for", &["and trying again"]);
    });
    report.assert_nothing_lost("a cluster whose members change and die");
    site.assert_settled();
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

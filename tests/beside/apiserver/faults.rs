//! A real API in trouble: killed under the pods' traffic, its history compacted, its answers 403
//! and 429. No fault withdraws a peer, and each ends by itself.

use std::time::{Duration, Instant};

use hyper::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::plane::Plane;
use crate::requests::{send, with_client};
use crate::site::{ACCOUNT, Site};
use crate::support::lab::wait_until;
use crate::support::probe::Probe;

/// How long the API is away.
const AWAY: Duration = Duration::from_secs(30);
/// From an API that answers again to nodes that follow it: the longest pause between two tries,
/// which the nodes' number spreads, and a busy machine.
pub(crate) const FOLLOWS: Duration = Duration::from_secs(75);
/// How long others ask without a pause.
const CROWDED: Duration = Duration::from_secs(10);
/// Bookmarks come once a minute.
const BOOKMARKED: Duration = Duration::from_secs(70);

/// Makes another node of the cluster that flanneld or weftd serves, as both see it.
#[track_caller]
fn join(site: &Site, number: u8, backend: &str) {
    let prefix = "flannel.alpha.coreos.com";
    let subnet = format!("10.244.{number}.0/24");
    let (kind, data) = match backend {
        "udp" => ("", "null".to_owned()),
        other => (other, format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{number:02x}"}}"#)),
    };
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("other-{number}"), "annotations": {
            format!("{prefix}/kube-subnet-manager"): "true",
            format!("{prefix}/backend-type"): kind,
            format!("{prefix}/backend-data"): data,
            format!("{prefix}/public-ip"): format!("172.20.0.{number}"),
        }},
        "spec": {"podCIDR": subnet, "podCIDRs": [subnet]},
    });
    site.plane.hand("admin", &["create"], &node);
}

/// Waits until both nodes know so many peers, and gives how long that took.
#[track_caller]
fn follows(site: &Site, peers: u64) -> Duration {
    let started = Instant::now();
    wait_until(FOLLOWS, &format!("both nodes know {peers} peers"), || {
        [0, 1].iter().all(|host| site.peers(*host) == Some(peers))
    });
    started.elapsed()
}

/// Listings of all Nodes by the account of the nodes.
fn listings(site: &Site) -> usize {
    let audited = site.plane.audited();
    let is_listing = |entry: &&Value| {
        let uri = entry["requestURI"].as_str().unwrap_or_default();
        entry["user"]["username"] == ACCOUNT && uri == "/api/v1/nodes?limit=250"
    };
    audited.iter().filter(is_listing).count()
}

#[track_caller]
fn outlives_a_kill_and_a_compaction(backend: &str, flags: &[&str]) {
    let mut site = Site::start(Plane::without_controller(2, flags), backend);
    kill_under_traffic(&mut site, backend);
    // The nodes sleep while Nodes come and go, and wake when nothing of that can be told.
    for daemon in &mut site.daemons {
        daemon.signal(Signal::STOP);
    }
    site.plane.kubectl(&["delete", "node", "other-101"]);
    for number in [102, 103] {
        join(&site, number, backend);
    }
    site.plane.kill_apiserver();
    site.plane.compact();
    site.plane.revive_apiserver();
    for daemon in &mut site.daemons {
        daemon.signal(Signal::CONT);
    }
    println!("{flags:?}: after the compaction all was known within {:.1?}", follows(&site, 3));
    for daemon in &mut site.daemons {
        assert!(daemon.ended().is_none(), "{}", daemon.output());
    }
}

/// Kills the API for a while, and has a node join afterwards.
#[track_caller]
fn kill_under_traffic(site: &mut Site, backend: &str) {
    site.carries(1400);
    site.plane.kill_apiserver();
    let ((), report) = Probe::run(&site.ends(), |_| std::thread::sleep(AWAY));
    println!("{report}");
    report.assert_nothing_lost("an API that was killed");
    site.plane.revive_apiserver();
    join(site, 101, backend);
    println!("after {AWAY:?} without API a new Node was known within {:.1?}", follows(site, 2));
}

#[test]
fn an_api_with_a_watch_cache_may_be_killed_and_compacted() {
    outlives_a_kill_and_a_compaction("udp", &[]);
}

#[test]
fn an_api_without_one_may_too() {
    outlives_a_kill_and_a_compaction("vxlan", &["--watch-cache=false"]);
}

#[test]
fn an_etcd_that_was_restored_from_a_backup_is_followed() {
    let mut site = Site::start(Plane::without_controller(2, &[]), "vxlan");
    join(&site, 101, "vxlan");
    follows(&site, 2);
    site.plane.go_back(|plane| {
        // Many versions, none of which the restored etcd knows.
        for number in 0..50 {
            let note = format!("a.example/b={number}");
            plane.kubectl(&["annotate", "--overwrite", "node", "worker-0", &note]);
        }
    });
    join(&site, 102, "vxlan");
    println!("after a restore a new Node was known within {:.1?}", follows(&site, 3));
    site.carries(1400);
}

#[test]
fn bookmarks_are_read_and_a_quiet_watch_lists_nothing_again() {
    let site = Site::start(Plane::without_controller(2, &[]), "udp");
    let before = listings(&site);
    let list = site.plane.kubectl(&["get", "--raw", "/api/v1/nodes?limit=1"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let path = format!(
        "/api/v1/nodes?watch=true&resourceVersion={}&allowWatchBookmarks=true&timeoutSeconds={}",
        list["metadata"]["resourceVersion"].as_str().unwrap(),
        BOOKMARKED.as_secs()
    );
    // A bookmark tells of what came during the watch, and does not come if nothing did.
    let watched = std::thread::scope(|scope| {
        let watched = || site.plane.kubectl(&["get", "--request-timeout=0", "--raw", &path]);
        let watched = scope.spawn(watched);
        std::thread::sleep(Duration::from_secs(5));
        site.plane.kubectl(&["annotate", "node", "worker-0", "a.example/b=c"]);
        watched.join().unwrap()
    });
    let bookmarks: Vec<_> = watched.lines().filter(|line| line.contains("BOOKMARK")).collect();
    println!("{}", bookmarks.join("\n"));
    assert!(!bookmarks.is_empty(), "the API sent no bookmark: {watched}");
    assert_eq!(listings(&site), before, "a bookmark made a node list all Nodes");
    join(&site, 101, "udp");
    follows(&site, 2);
    assert_eq!(listings(&site), before, "listed for one new Node");
}

#[test]
fn a_role_that_is_taken_away_and_given_back() {
    let mut site = Site::start(Plane::without_controller(2, &[]), "udp");
    site.plane.kubectl(&["delete", "clusterrolebinding", "flannel"]);
    // A watch that runs is not judged again.
    site.plane.kill_apiserver();
    site.plane.revive_apiserver();
    for host in 0..2 {
        site.wait_for(host, "403 Forbidden");
        assert_eq!(site.peers(host), Some(1), "a 403 withdrew peers");
    }
    site.carries(1400);
    join(&site, 101, "udp");
    std::thread::sleep(Duration::from_secs(5));
    let lines = |host: usize| site.daemons[host].output().matches("403 Forbidden").count();
    assert!(lines(0) <= 3, "the same line {} times", lines(0));
    site.apply();
    println!("with its role again a new Node was known within {:.1?}", follows(&site, 2));
}

#[test]
fn an_api_that_has_too_much_to_do_is_followed_all_the_same() {
    let flags = ["--enable-priority-and-fairness=false", "--max-requests-inflight=1"];
    let mut site = Site::start(Plane::without_controller(2, &flags), "udp");
    // The nodes have to open their watches again, among others that do not wait to be let in.
    site.plane.kill_apiserver();
    site.plane.revive_apiserver();
    // Not as an administrator, whom the API never sends away.
    with_client(&site.plane, "system:node:worker-0", async |client| {
        let until = Instant::now() + CROWDED;
        let crowd = (0..16).map(|_| {
            let client = client.clone();
            async move {
                while Instant::now() < until {
                    send(&client, Method::GET, "/api/v1/nodes", "application/json", None).await;
                }
            }
        });
        futures_util::future::join_all(crowd).await;
    });
    let audited = site.plane.audited();
    let refused: Vec<_> =
        audited.iter().filter(|entry| entry["responseStatus"]["code"] == 429).collect();
    assert!(!refused.is_empty(), "the API let everybody in");
    let ours = refused.iter().filter(|entry| entry["user"]["username"] == ACCOUNT).count();
    println!("{} requests answered 429, {ours} of them weftd's", refused.len());
    join(&site, 101, "udp");
    println!("after that a new Node was known within {:.1?}", follows(&site, 2));
}

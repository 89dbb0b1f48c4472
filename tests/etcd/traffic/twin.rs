//! A node of flannel that has our PublicIP: it claims nothing, and writes the lease of both.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::lab::wait_until;
use crate::support::members::Version;
use crate::support::status::{Status, metric};
use crate::traffic::site::{Plan, Site};

/// F15, where the other is no weft: flannel's renewal is another lease of etcd and a blind write.
#[test]
fn flannel_node_with_same_address_raises_alarm_only() {
    const NOTICED: Duration = Duration::from_secs(2);
    const RENEWALS: u64 = 3;
    let mut site = Site::start(Plan::of(Version::V3_5));
    let ((), report) = site.with_traffic(|site, _| {
        let told = site.listen();
        let key = site.key(0);
        let value = r#"{"PublicIP":"172.20.0.1","PublicIPv6":null}"#;
        let mut last = None;
        for renewal in 1..=RENEWALS {
            let granted = site.ctl(&["lease", "grant", "86400"]);
            let id = granted.split_whitespace().nth(1).expect("lease ID granted with TTL");
            site.ctl(&["put", &key, value, "--lease", id]);
            let written = Instant::now();
            wait_until(NOTICED, "the node notices who writes its lease", || {
                Status::of(&site.dir(0)).0["store"]["written_by_others"] == renewal
            });
            println!("noticed within {:?}", written.elapsed());
            let renewed_lease = site.ctl(&["lease", "timetolive", id, "--keys"]);
            assert!(renewed_lease.contains(&key), "the lease holds nothing: {renewed_lease}");
            last = site.entry(&key);
        }
        thread::sleep(NOTICED);
        assert_eq!(site.entry(&key), last, "two nodes fight for one lease");
        assert_eq!(told[0].warned(&site.daemons[0], "ALARM"), 1, "not told once");
        told[0].assert_warned(&site.daemons[0], "172.20.0.1");
        told[1].assert_no_warning(&site.daemons[1]);
        let counted = metric(&site.dir(0), "flannel_lease_written_by_others_total");
        assert_eq!(counted, Some(RENEWALS as f64), "not counted");
    });
    site.has_twin = true;
    report.assert_nothing_lost("a node of flannel with the same address");
    site.assert_settled();
}

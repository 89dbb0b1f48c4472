//! What an older or a newer weftd says is read as far as it is known.

use serde_json::json;

use super::*;
use crate::stats::{DirectionStats, DropReason, WorkerStats};

/// What a weftd of schema 1 answered, with vxlan and with udp.
const FORMER: [&str; 2] = [
    r#"{"schema":1,"version":"0.1.0","ready":true,
    "verdict":{"state":"degraded","since_unix":7,"causes":["look"]},
    "stale":false,"store":{"up":true,"lease_expires_unix":null,"renewals":0,"failures":0,
    "refused":null,"written_by_others":0,"duplicate_public_ip":null,"subnets_exhausted":0,
    "rejected":{"bad_key":1},"subnet_refused":false,"refused_subnet":"10.5.9.0/24"},
    "restart_needed":false,"stale_as_of_unix":null,"cache":{"writes":1,"failures":0},"peers":1,
    "peers_held":0,"lease":{"network":"10.5.0.0/16","subnet":"10.5.1.0/24",
    "public_ip":"192.0.2.1","mtu_bytes":1450},"interface":"eth0","device":"flannel.1",
    "dataplane":"vxlan","subnet_file":{"failures":0},"rules":null,"guard":null,
    "device_drops":{"eth0":{"egress":0,"ingress":4}},"backend":{"kind":"vxlan",
    "peers_programmed":1,"peers_failed":0,"leases_ignored":0,"leases_unusable":0,"failures":0,
    "repairs":0},"peer_states":{"set-up":1},"narrow_paths":0,"routes":[{"subnet":"10.5.2.0/24",
    "node":null,"via":"192.0.2.2","state":"set-up"}]}"#,
    r#"{"schema":1,"version":"0.1.0","ready":true,
    "verdict":{"state":"ready","since_unix":7,"causes":[]},"store":{},"peers":1,
    "backend":{"kind":"udp"},"peer_states":{"ok":1},"routes":[{"subnet":"10.5.2.0/24","node":"b",
    "via":"192.0.2.2:8285","state":"ok","heard_seconds_ago":null,"round_trip_microseconds":9,
    "path_mtu_bytes":1472,"packets_sent":1,"bytes_sent":2,"packets_received":3,"bytes_received":4,
    "failed_sends":0,"fast_path":{"packets_sent":0,"bytes_sent":0,"packets_received":0,
    "bytes_received":0}}],"fast_path":{"packets_sent":5,"bytes_sent":0,"packets_received":0,
    "bytes_received":0,"on":false,"why":"cap","reason":"no CAP_BPF"},"egress":{
    "packets_received":3,"packets_forwarded":1,"drops":{"no-route":2}},"workers":[{"index":0,
    "engine":"mmsg","processor":null,"sleeps":6}]}"#,
];

fn read(text: &str) -> Status {
    serde_json::from_str(text).unwrap()
}

#[test]
fn an_older_weftd_is_understood() {
    let [vxlan, udp] = FORMER.map(read);
    assert_eq!((vxlan.schema, vxlan.verdict.state), (1, State::Degraded));
    assert_eq!((vxlan.verdict.causes.len(), vxlan.verdict.faults.len()), (1, 0));
    let backend = vxlan.backend.unwrap();
    assert_eq!(backend.kind, Some(BackendKind::Vxlan));
    assert_eq!(backend.done.unwrap().peers_programmed, 1);
    assert_eq!(vxlan.lease.unwrap().subnets().unwrap().to_string(), "10.5.1.0/24");
    let via = Via::Host([192, 0, 2, 2].into());
    let subnet = "10.5.2.0/24".parse().unwrap();
    assert_eq!(vxlan.routes, [Peer::new(subnet, None, via, PeerState::SetUp)]);
    assert_eq!((vxlan.egress, vxlan.tunnel, vxlan.dataplane_is_up), (None, None, None));

    let peer = &udp.routes[0];
    assert_eq!(peer.via, Via::Tunnel("192.0.2.2:8285".parse().unwrap()));
    assert_eq!(peer.traffic.unwrap().bytes_received, 4);
    assert_eq!(udp.backend.unwrap().done, None);
    let egress = udp.egress.unwrap();
    assert_eq!((egress.dropped(DropReason::NoRoute), egress.dropped_total()), (2, 2));
    assert_eq!(udp.workers[0].counts.sleeps, 6);
    assert_eq!(udp.fast_path.unwrap().taken.packets_sent, 5);
}

#[test]
fn what_an_older_tool_reads_is_still_there() {
    for former in FORMER {
        let before: serde_json::Value = serde_json::from_str(former).unwrap();
        let now = serde_json::to_value(read(former)).unwrap();
        assert_contains(&now, &before, "");
    }
}

/// Whether all of `part` is in `whole`.
#[track_caller]
fn assert_contains(whole: &serde_json::Value, part: &serde_json::Value, at: &str) {
    match (whole, part) {
        (serde_json::Value::Object(_), serde_json::Value::Object(members)) => {
            for (name, part) in members {
                assert_contains(&whole[name], part, &format!("{at}/{name}"));
            }
        }
        (serde_json::Value::Array(items), serde_json::Value::Array(parts)) => {
            assert_eq!(items.len(), parts.len(), "{at}");
            items.iter().zip(parts).for_each(|(item, part)| assert_contains(item, part, at));
        }
        _ => assert_eq!(whole, part, "{at}"),
    }
}

#[test]
fn words_of_a_newer_weftd_do_no_harm() {
    let status = read(
        r#"{"schema":9,"new":{"a":[1]},"verdict":{"state":"superb","faults":[{"cause":"new",
        "text":"look","more":1}]},"tunnel":{"geneve":6081},"backend":{"kind":"geneve"},
        "peer_states":{"jammed":2},"routes":[{"subnet":"10.5.2.0/24","via":"192.0.2.2",
        "state":"jammed"}]}"#,
    );
    assert_eq!(status.verdict.state, State::NotReady);
    assert_eq!(status.verdict.faults[0].cause, Cause::Unknown);
    assert_eq!((status.tunnel, status.backend.unwrap().kind), (None, None));
    assert_eq!(status.routes[0].state, PeerState::Unknown);
    assert_eq!(status.peer_states[&PeerState::Unknown], 2);
}

#[test]
fn ends_of_tunnels_come_back() {
    let vxlan = TunnelEnd::Vxlan { port: 8472, vni: 1 };
    let udp = TunnelEnd::Udp("192.0.2.1:8285".parse().unwrap());
    for (end, json) in [
        (vxlan, json!({"vxlan": {"port": 8472, "vni": 1}})),
        (udp, json!({"udp": "192.0.2.1:8285"})),
    ] {
        let status = Status { tunnel: Some(end), ..Status::default() };
        let text = serde_json::to_value(&status).unwrap();
        assert_eq!(text["tunnel"], json);
        assert_eq!(serde_json::from_value::<Status>(text).unwrap(), status);
    }
}

/// Counts one more each time.
fn count_all(stats: &DirectionStats, from: u64) {
    let DirectionStats {
        packets_received,
        bytes_received,
        packets_forwarded,
        bytes_forwarded,
        reads,
        writes,
        icmp_sent,
        icmp_limited,
        ..
    } = stats;
    let named = [
        packets_received,
        bytes_received,
        packets_forwarded,
        bytes_forwarded,
        reads,
        writes,
        icmp_sent,
        icmp_limited,
    ];
    (from..).zip(named).for_each(|(count, counter)| counter.add(count));
    (from + 8..).zip(DropReason::ALL).for_each(|(count, reason)| stats.drop(*reason, count));
}

#[test]
fn a_sum_leaves_nothing_out() {
    let stats = WorkerStats::default();
    count_all(&stats.egress, 100);
    let WorkerStats { sleeps, naps, gso_fallbacks, tun_fallbacks, receive_overflows, .. } = &stats;
    let others = [sleeps, naps, gso_fallbacks, tun_fallbacks, receive_overflows];
    (200..).zip(others).for_each(|(count, counter)| counter.add(count));
    let (one, others) = (Direction::from(&stats.egress), WorkerCounts::from(&stats));
    let mut sums = (Direction::default(), WorkerCounts::default());
    for _ in 0..2 {
        sums.0 += &one;
        sums.1 += others;
    }
    let twice: Vec<_> = numbers(&json!([one, others])).iter().map(|number| 2 * number).collect();
    assert!(!twice.contains(&0), "a counter was added: extend this test");
    assert_eq!(twice.len(), 8 + DropReason::ALL.len() + 5);
    assert_eq!(numbers(&json!([sums.0, sums.1])), twice);
}

/// All numbers in a value, in its order.
fn numbers(value: &serde_json::Value) -> Vec<u64> {
    let members = value.as_object().into_iter().flat_map(serde_json::Map::values);
    let below = members.chain(value.as_array().into_iter().flatten()).flat_map(numbers);
    value.as_u64().into_iter().chain(below).collect()
}

//! `weft peers`: a row for each lease of another node, those that need a person first.

use std::cmp::Reverse;

use serde_json::Value;

use crate::tool::style::Style;
use crate::tool::table;

const HEADINGS: [&str; 11] = [
    "SUBNET", "NODE", "ADDRESS", "STATE", "RTT", "MTU", "HEARD", "SENT", "RECEIVED", "FAILED",
    "KERNEL",
];

/// Where in a row its state is.
const STATE_AT: usize = 3;

/// The table of `weft peers`, from what weftd answered to `/peers`.
pub(super) fn render(answer: &Value, style: Style) -> String {
    let mut peers: Vec<_> = answer["peers"].as_array().into_iter().flatten().collect();
    // Stable: those of one state stay in the order of their subnets.
    peers.sort_by_key(|peer| Reverse(urgency(peer)));
    let rows: Vec<_> = peers.iter().map(|peer| row(peer)).collect();
    table::render(&HEADINGS, &rows, |column, cell, shown| match (column, cell) {
        (STATE_AT, "SILENT" | "not-set-up") => style.bad(shown),
        (STATE_AT, "ok" | "set-up") => style.good(shown),
        _ => shown.to_owned(),
    })
}

/// Whether none of them needs a person.
pub(super) fn are_well(answer: &Value) -> bool {
    answer["peers"].as_array().into_iter().flatten().all(|peer| urgency(peer) < URGENT)
}

/// Of peers that need a person.
const URGENT: u8 = 3;

fn urgency(peer: &Value) -> u8 {
    match peer["state"].as_str() {
        Some("silent" | "not-set-up") => URGENT,
        Some("asked" | "other-backend") => 2,
        Some("ok" | "set-up") => 1,
        _ => 0,
    }
}

fn row(peer: &Value) -> Vec<String> {
    let text = |name: &str| peer[name].as_str().unwrap_or("-").to_owned();
    let number = |name: &str| peer[name].as_u64();
    let or_dash = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
    let traffic = |packets: &str, bytes: &str| {
        let each = number(packets).zip(number(bytes));
        or_dash(each.map(|(packets, bytes)| format!("{packets} ({})", scaled(bytes))))
    };
    let kernel = &peer["fast_path"];
    let kernel_packets = ["packets_sent", "packets_received"].map(|name| kernel[name].as_u64());
    let all = ["packets_sent", "packets_received"].map(number);
    vec![
        text("subnet"),
        text("node"),
        text("via"),
        match text("state").as_str() {
            "silent" => "SILENT".to_owned(),
            state => state.to_owned(),
        },
        or_dash(number("round_trip_microseconds").map(milliseconds)),
        or_dash(number("path_mtu_bytes").map(|bytes| bytes.to_string())),
        or_dash(number("heard_seconds_ago").map(ago)),
        traffic("packets_sent", "bytes_sent"),
        traffic("packets_received", "bytes_received"),
        or_dash(number("failed_sends").map(|packets| packets.to_string())),
        or_dash(share(kernel_packets, all)),
    ]
}

/// How much of all packets the kernel's programs carried.
fn share(kernel: [Option<u64>; 2], all: [Option<u64>; 2]) -> Option<String> {
    let sum = |both: [Option<u64>; 2]| Some(both[0]? + both[1]?);
    let (kernel, all) = (sum(kernel)?, sum(all)?);
    (all > 0).then(|| format!("{}%", kernel * 100 / all))
}

fn milliseconds(microseconds: u64) -> String {
    format!("{}.{:02}ms", microseconds / 1000, microseconds % 1000 / 10)
}

fn ago(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

/// `1.4 GB`; powers of 1000, as interfaces' rates are.
fn scaled(bytes: u64) -> String {
    let mut unit = 0;
    let mut tenths = u128::from(bytes) * 10;
    while tenths >= 10_000 && unit < 5 {
        tenths /= 1000;
        unit += 1;
    }
    let name = ["B", "kB", "MB", "GB", "TB", "PB"][unit];
    if unit == 0 { format!("{bytes} B") } else { format!("{}.{} {name}", tenths / 10, tenths % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_row_says_it_all_and_silent_peers_come_first() {
        let answer = json!({ "schema": 1, "peers": [
            { "subnet": "10.5.1.0/24", "node": null, "via": "192.0.2.1:8285", "state": "idle" },
            { "subnet": "10.5.2.0/24", "node": "b", "via": "192.0.2.2:8285", "state": "silent",
              "heard_seconds_ago": 250, "round_trip_microseconds": 1234, "path_mtu_bytes": 1372,
              "packets_sent": 2000, "bytes_sent": 1_940_000, "packets_received": 0,
              "bytes_received": 0, "failed_sends": 3,
              "fast_path": { "packets_sent": 500, "packets_received": 0 } },
        ] });
        let screen = render(&answer, Style::PLAIN);
        let lines: Vec<Vec<&str>> =
            screen.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..4], ["SUBNET", "NODE", "ADDRESS", "STATE"]);
        assert_eq!(
            lines[1].join(" "),
            "10.5.2.0/24 b 192.0.2.2:8285 SILENT 1.23ms 1372 4m 2000 (1.9 MB) 0 (0 B) 3 25%"
        );
        assert_eq!(lines[2][..5], ["10.5.1.0/24", "-", "192.0.2.1:8285", "idle", "-"]);
    }

    #[test]
    fn bytes_are_scaled() {
        for (bytes, text) in [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_950_000, "1.9 MB")] {
            assert_eq!(scaled(bytes), text);
        }
    }
}

//! A network that changes its backend while it runs, from each to each other.

use crate::support::change::{By, Kind, Site, round_trip};

/// Those that this machine can run. WireGuard is in userspace, whatever the kernel has.
const KINDS: [Kind; 7] = [
    Kind {
        name: "udp",
        config: r#"{"Type":"udp"}"#,
        flags: &["--workers=2"],
        leased_as: "udp",
        by: By::Device("flannel0"),
    },
    Kind {
        name: "udp with the fast path",
        config: r#"{"Type":"udp"}"#,
        flags: &["--fast-path=on", "--keep-tunnel=true"],
        leased_as: "udp",
        by: By::Programs,
    },
    Kind {
        name: "vxlan",
        config: r#"{"Type":"vxlan"}"#,
        flags: &[],
        leased_as: "vxlan",
        by: By::Device("flannel.1"),
    },
    Kind {
        name: "host-gw",
        config: r#"{"Type":"host-gw"}"#,
        flags: &[],
        leased_as: "host-gw",
        by: By::Routes,
    },
    Kind {
        name: "wireguard",
        config: r#"{"Type":"wireguard"}"#,
        flags: &["--wireguard=userspace"],
        leased_as: "wireguard",
        by: By::Device("flannel-wg"),
    },
    Kind {
        name: "alloc",
        config: r#"{"Type":"alloc"}"#,
        flags: &[],
        leased_as: "udp",
        by: By::Nobody,
    },
    Kind {
        name: "extension",
        config: r#"{"Type":"extension",
            "SubnetAddCommand":"ip route replace $SUBNET via $PUBLIC_IP",
            "SubnetRemoveCommand":"ip route delete $SUBNET via $PUBLIC_IP"}"#,
        flags: &[],
        leased_as: "extension",
        by: By::Commands,
    },
];

/// One of so many parts of the way from each to each other.
#[track_caller]
fn part(number: usize, parts: usize) {
    let trip = round_trip(KINDS.len());
    let steps: Vec<_> = trip.windows(2).collect();
    let each = steps.len().div_ceil(parts);
    let steps = &steps[number * each..steps.len().min((number + 1) * each)];
    let mut site = Site::start(&KINDS[steps[0][0]]);
    for step in steps {
        site.change(&KINDS[step[0]], &KINDS[step[1]]);
    }
}

#[test]
fn from_each_backend_to_each_other_first_part() {
    part(0, 3);
}

#[test]
fn from_each_backend_to_each_other_second_part() {
    part(1, 3);
}

#[test]
fn from_each_backend_to_each_other_third_part() {
    part(2, 3);
}

/// The table, a row for each backend that is changed from.
fn rows() -> String {
    let names = KINDS.each_ref().map(|kind| kind.name);
    let mut rows = format!("| From, to | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(7));
    for (number, from) in KINDS.iter().enumerate() {
        let cell = |(other, to): (usize, &Kind)| match other == number {
            true => "–".to_owned(),
            false => from.beside(to).to_string(),
        };
        let cells: Vec<_> = KINDS.iter().enumerate().map(cell).collect();
        rows += &format!("| {} | {} |\n", from.name, cells.join(" | "));
    }
    rows
}

#[test]
fn the_table_of_changes_is_in_the_documents() {
    let trip = round_trip(KINDS.len());
    let mut pairs: Vec<_> = trip.windows(2).collect();
    pairs.sort_unstable();
    pairs.dedup();
    assert_eq!((pairs.len(), trip.len()), (42, 43), "each pair is changed, once");
    let rows = rows();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/backends.md");
    let page = std::fs::read_to_string(page).expect("the document is there");
    assert!(page.contains(&rows), "docs/backends.md needs these rows:\n{rows}");
}

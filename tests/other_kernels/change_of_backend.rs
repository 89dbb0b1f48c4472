//! A network that changes its backend while it runs, with backends that this machine's kernel may
//! lack: from each to each other, and `udp`.

use crate::support::change::{By, Kind, Site, round_trip};

/// First the one whose module gives every host a device more, `tunl0`.
const KINDS: [Kind; 3] = [
    Kind {
        name: "ipip",
        config: r#"{"Type":"ipip"}"#,
        flags: &[],
        leased_as: "ipip",
        by: By::Device("flannel.ipip"),
    },
    Kind {
        name: "udp",
        config: r#"{"Type":"udp"}"#,
        // Two hosts of real-time workers leave two emulated processors no time.
        flags: &["--workers=1", "--worker-priority=ordinary"],
        leased_as: "udp",
        by: By::Device("flannel0"),
    },
    Kind {
        name: "wireguard in the kernel",
        config: r#"{"Type":"wireguard"}"#,
        flags: &["--wireguard=kernel"],
        leased_as: "wireguard",
        by: By::Device("flannel-wg"),
    },
];

#[test]
fn from_each_backend_to_each_other() {
    let trip = round_trip(KINDS.len());
    let mut site = Site::start(&KINDS[trip[0]]);
    for step in trip.windows(2) {
        site.change(&KINDS[step[0]], &KINDS[step[1]]);
    }
}

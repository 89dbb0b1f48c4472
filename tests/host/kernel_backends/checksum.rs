//! The checksum offload of the vxlan device, which is the operator's to switch off.

use std::time::Duration;

use rustix::process::Signal;

use crate::kernel_backends::{SOON, VXLAN};
use crate::support::overlay::Overlay;

/// The device's setting, as an operator reads it.
fn setting(overlay: &Overlay) -> String {
    let said = overlay.lab.hosts[0].exec(&["ethtool", "-k", "flannel.1"]);
    let line = said.lines().find_map(|line| line.trim().strip_prefix("tx-checksum-ip-generic:"));
    line.unwrap_or_else(|| panic!("{said}")).trim().to_owned()
}

#[test]
fn sound_kernel_keeps_checksum_offload() {
    let mut overlay = Overlay::start_with(VXLAN, [&[], &[]]);
    assert_eq!(setting(&overlay), "on", "throughput falls for nothing");
    let switch_off = ["ethtool", "-K", "flannel.1", "tx-checksum-ip-generic", "off"];
    overlay.lab.hosts[0].exec(&switch_off);
    assert_eq!(setting(&overlay), "off");
    overlay.traffic_resumes(SOON, "the offload was switched off");
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    overlay.restart(0, &[]);
    assert_eq!(setting(&overlay), "off", "a restart undoes what an operator chose");
}

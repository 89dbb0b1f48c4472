//! The checksum offload of the vxlan device, which kernels with a fault need switched off.

use std::time::Duration;

use rustix::process::Signal;
use weft::device::features::{self, Switch};

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
    let host = &overlay.lab.hosts[0];
    host.enter(|| features::switch("flannel.1", Switch::TransmitChecksum)).unwrap();
    assert_eq!(setting(&overlay), "off");
    overlay.traffic_resumes(SOON, "the offload was switched off");
    overlay.daemons[0].stop(Signal::TERM, Duration::from_secs(5));
    overlay.restart(0, &[]);
    assert_eq!(setting(&overlay), "off", "a restart undoes what an operator chose");
    let missing =
        overlay.lab.hosts[0].enter(|| features::switch("flannel.7", Switch::TransmitChecksum));
    let error = missing.unwrap_err();
    assert!(error.to_string().contains("flannel.7"), "which device it was is not said: {error}");
}

//! Kernels whose NAT corrupts checksums that a vxlan device leaves to be filled in later, so that
//! connections take a minute to open: there, a new device gets checksum offload switched off.

use tracing::warn;

use crate::device::{features, kernel};
use crate::failure::with_causes;

/// What to do about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    /// The device is new, and no operator has chosen yet.
    SwitchOff,
    /// Somebody may have switched it on again because this kernel has the correction all the same.
    Warn,
}

/// Switches checksum offload of the device `name` off, or warns, where the kernel needs it.
pub(super) fn settle(name: &str, is_new: bool) {
    let release = kernel::upstream_release();
    if !kernel::spoils_vxlan_checksums(&release) {
        return;
    }
    let remedy = format!("`ethtool -K {name} tx-checksum-ip-generic off`");
    let corrupts = format!(
        "kernel {release} may corrupt checksums of vxlan packets that it masquerades (fixed in 5.7 \
         and in stable releases of 2020)"
    );
    let done = features::leaves_checksums(name).and_then(|is_left| match step(is_left, is_new) {
        Step::Nothing => Ok(()),
        Step::SwitchOff => features::leave_no_checksums(name).map(|()| {
            warn!(
                "{corrupts}: checksum offload of {name} is off, which costs throughput; a newer \
                 kernel needs no such thing"
            );
        }),
        Step::Warn => {
            warn!("{corrupts}; if connections take a minute to open, run {remedy}");
            Ok(())
        }
    });
    if let Err(error) = done {
        let text = with_causes(&error);
        warn!("{corrupts}, but {text}; if connections take a minute to open, run {remedy}");
    }
}

fn step(is_left: bool, is_new: bool) -> Step {
    match (is_left, is_new) {
        (false, _) => Step::Nothing,
        (true, true) => Step::SwitchOff,
        (true, false) => Step::Warn,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_new_device_is_changed() {
        assert_eq!(step(true, true), Step::SwitchOff);
        assert_eq!(step(true, false), Step::Warn, "an operator's choice is undone by a restart");
        assert_eq!([step(false, true), step(false, false)], [Step::Nothing; 2]);
    }
}

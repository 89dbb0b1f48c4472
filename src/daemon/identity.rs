//! Identity of this host: hostname, machine-id and boot id, from three small files.

use std::fs::read_to_string;

use crate::control::identity::NodeIdentity;

const HOSTNAME: &str = "/proc/sys/kernel/hostname";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// machine-id(5); containers often lack it.
const MACHINE_ID: &str = "/etc/machine-id";

/// Reads them. Without the boot id, this host and a clone of it look the same.
pub(super) fn of_this_host() -> Result<NodeIdentity, String> {
    let read = |path: &str| match read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => Err(format!("cannot read {path}: {error}")),
    };
    let machine_id = read(MACHINE_ID).ok().filter(|id| is_machine_id(id));
    Ok(NodeIdentity { hostname: read(HOSTNAME)?, machine_id, boot_id: read(BOOT_ID)? })
}

/// Whether `text` tells machines apart: 32 hexadecimal digits, by machine-id(5). An image that is
/// made for many machines has `uninitialized`, or zeros, until the first boot of each.
fn is_machine_id(text: &str) -> bool {
    text.len() == 32
        && text.bytes().all(|digit| digit.is_ascii_hexdigit())
        && text.bytes().any(|digit| digit != b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_itself() {
        let identity = of_this_host().expect("every Linux has these files");
        assert!(identity.is_same_as(&of_this_host().expect("as before")));
        assert_eq!(identity.boot_id.len(), 36, "{identity:?}");
    }

    #[test]
    fn what_an_image_holds_before_its_first_boot_is_no_identity() {
        assert!(is_machine_id("0b5f7e0c1d2e4f60a1b2c3d4e5f60718"));
        for text in ["", "uninitialized", "00000000000000000000000000000000", "0b5f7e0c1d2e4f60"] {
            assert!(!is_machine_id(text), "{text:?} is taken for an identity");
        }
    }
}

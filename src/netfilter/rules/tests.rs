//! The rules that the golden texts spell.

use super::*;

/// The rules that the golden texts spell.
pub(in crate::netfilter) fn wanted() -> Wanted {
    Wanted {
        network: "10.5.0.0/16".parse().unwrap(),
        subnet: "10.5.3.0/24".parse().unwrap(),
        masquerade: true,
        forward: true,
        random_ports: true,
    }
}

//! The rules that the golden texts spell.

use super::*;

/// The rules that the golden texts spell.
pub(in crate::netfilter) fn wanted() -> Wanted {
    Wanted {
        networks: "10.5.0.0/16,fd00:5::/48".parse().unwrap(),
        subnets: "10.5.3.0/24,fd00:5:0:3::/64".parse().unwrap(),
        masquerade: true,
        forward: true,
        random_ports: true,
    }
}

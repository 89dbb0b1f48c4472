//! Whose a device or a filter is that outlives weftd: the next weftd of the same tunnel knows it by
//! what does not change, its port and its network.

use crate::route::Prefixes;

/// Whose device it is: the tunnel's port, which only one weftd can have, and the overlay, that of
/// IPv4 alone if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, derive_more::Display)]
#[display("{ALIAS_PREFIX} {port} {network}")]
pub(crate) struct Owner {
    pub(super) port: u16,
    pub(super) network: Prefixes,
}

impl Owner {
    /// Of the device with this alias, if it is one of ours to the letter.
    pub(super) fn of(alias: &str) -> Option<Self> {
        let (port, network) = alias.strip_prefix(ALIAS_PREFIX)?.trim_start().split_once(' ')?;
        let owner = Self { port: port.parse().ok()?, network: network.parse().ok()? };
        (owner.to_string() == alias).then_some(owner)
    }
}

/// What the alias of each kept device begins with.
const ALIAS_PREFIX: &str = "weft udp";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_alias_is_ours() {
        let owner = Owner { port: 8285, network: "10.5.0.0/16".parse().unwrap() };
        assert_eq!(owner.to_string(), "weft udp 8285 10.5.0.0/16");
        assert_eq!(Owner::of(&owner.to_string()), Some(owner));
        let without_ipv4 = Owner { port: 8285, network: "fd00:5::/48".parse().unwrap() };
        assert_eq!(without_ipv4.to_string(), "weft udp 8285 fd00:5::/48");
        assert_eq!(Owner::of(&without_ipv4.to_string()), Some(without_ipv4));
        for alias in [
            "",
            "weft udp 8285 mine",
            "weft udp 8285 10.5.0.0/16&fd00:5::/48",
            "weft udp  8285 10.5.0.0/16",
            "weft udp 08285 10.5.0.0/16",
            "weft udp 8285 10.5.0.0/16 ",
            "weft udp 8285 10.5.0.0/16 of somebody",
            "my weft udp 8285 10.5.0.0/16",
        ] {
            assert_eq!(Owner::of(alias), None, "{alias:?}");
        }
    }
}

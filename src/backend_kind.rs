//! The backends by name: which there are, what is the same on every host of one, and how leases
//! and configurations spell those of others. Pure.

use derive_more::{Display, From};
use serde::Serialize;

use crate::words::{visible, words};

/// The port on which flannel's udp backends talk.
pub const UDP_PORT: u16 = 8285;

words! {
    /// A way for packets to travel between hosts.
    BackendKind {
        /// In UDP datagrams, by weftd's own workers.
        Udp = "udp",
        /// In the kernel's VXLAN.
        Vxlan = "vxlan",
        /// By plain routes.
        HostGw = "host-gw",
        /// In the kernel's IPv4 in IPv4.
        Ipip = "ipip",
        /// In WireGuard, encrypted.
        Wireguard = "wireguard",
        /// In IPsec tunnels, whose keys charon agrees on.
        Ipsec = "ipsec",
        /// By routes of an AWS VPC.
        AwsVpc = "aws-vpc",
        /// By routes of a Google Compute Engine network.
        Gce = "gce",
        /// By routes of an Alibaba Cloud VPC.
        AliVpc = "ali-vpc",
        /// By routes of a Tencent Cloud VPC.
        TencentVpc = "tencent-vpc",
        /// Not at all: a subnet only.
        Alloc = "alloc",
        /// By whatever the operator's commands set up.
        Extension = "extension",
    }
}

/// Who carries packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CarriedBy {
    /// weftd's workers.
    Workers,
    /// The kernel, by tables that weftd keeps.
    Kernel,
    /// Somebody else.
    Others,
}

impl BackendKind {
    /// Bytes that a tunnel over IPv4 adds to each packet.
    pub const fn overhead_bytes(self) -> u32 {
        match self {
            // Outer IPv4 without options (20), UDP (8).
            Self::Udp => 28,
            // The same, VXLAN (8), inner Ethernet (14).
            Self::Vxlan => 50,
            // Outer IPv4.
            Self::Ipip => 20,
            // The same as of udp, and WireGuard's type, receiver, counter and tag (4, 4, 8, 16).
            Self::Wireguard => 60,
            // Outer IPv4, and the most that any ESP has: SPI, sequence, initial vector, padding,
            // its length, next header, check value (4, 4, 16, 15, 1, 1, 16). UDP comes on top.
            Self::Ipsec => 77,
            Self::HostGw
            | Self::AwsVpc
            | Self::Gce
            | Self::AliVpc
            | Self::TencentVpc
            | Self::Alloc
            | Self::Extension => 0,
        }
    }

    /// Who carries the packets.
    pub const fn carried_by(self) -> CarriedBy {
        match self {
            Self::Udp => CarriedBy::Workers,
            Self::Vxlan | Self::HostGw | Self::Ipip | Self::Wireguard => CarriedBy::Kernel,
            Self::Ipsec
            | Self::AwsVpc
            | Self::Gce
            | Self::AliVpc
            | Self::TencentVpc
            | Self::Alloc
            | Self::Extension => CarriedBy::Others,
        }
    }

    /// Whether a cloud's network carries the packets, by routes that weftd keeps there.
    pub const fn is_cloud(self) -> bool {
        matches!(self, Self::AwsVpc | Self::Gce | Self::AliVpc | Self::TencentVpc)
    }

    /// What its leases name, as flannel's do.
    pub const fn leased_as(self) -> Self {
        if matches!(self, Self::Alloc) || self.is_cloud() { Self::Udp } else { self }
    }

    /// Whether hosts send each other UDP datagrams to a port.
    pub const fn has_port(self) -> bool {
        matches!(self, Self::Udp | Self::Vxlan | Self::Wireguard)
    }

    /// Whether anybody's datagrams to that port may pass for a peer's, or packets beside it that
    /// nobody has encrypted for a pod's.
    pub const fn needs_guard(self) -> bool {
        matches!(self, Self::Udp | Self::Vxlan | Self::Wireguard)
    }

    /// Whether the overlay has a device of its own, which has an address of the subnet.
    pub const fn has_device(self) -> bool {
        matches!(self, Self::Udp | Self::Vxlan | Self::Ipip | Self::Wireguard)
    }

    /// Whether `MTU` in the network configuration's Backend lowers the overlay's.
    pub const fn has_mtu_key(self) -> bool {
        matches!(self, Self::Udp | Self::Vxlan | Self::Wireguard)
    }

    /// Whether hosts reach each other's IPv6 subnets by IPv6 addresses of theirs.
    pub const fn has_ipv6_underlay(self) -> bool {
        !self.has_ipv4_alone() && !matches!(self, Self::Udp)
    }

    /// Whether nothing of IPv6 is carried.
    pub const fn has_ipv4_alone(self) -> bool {
        matches!(self, Self::Ipip | Self::Ipsec) || self.is_cloud()
    }

    /// Whether weftd runs commands of the operator's, which may need any right.
    pub const fn runs_commands(self) -> bool {
        matches!(self, Self::Extension)
    }

    /// The backend of this name, to the letter.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|kind| kind.name() == name).copied()
    }
}

/// What a lease or a configuration calls its backend.
#[derive(Debug, Clone, PartialEq, Eq, Display, From, Serialize)]
#[serde(untagged)]
pub enum BackendName {
    /// One of ours.
    #[from]
    Known(BackendKind),
    /// One that only other programs have, or nobody: whoever may write a lease chose it.
    #[display("{}", visible(_0))]
    Other(String),
}

impl BackendName {
    /// Whether it is `kind`.
    pub fn is(&self, kind: BackendKind) -> bool {
        *self == Self::Known(kind)
    }

    /// Whether it is udp, which flannel's nodes leave out of their leases.
    pub fn is_udp(&self) -> bool {
        self.is(BackendKind::Udp)
    }

    /// As leases spell it.
    pub fn in_lease(&self) -> &str {
        match self {
            Self::Known(BackendKind::Udp) => "",
            Self::Known(kind) => kind.name(),
            Self::Other(text) => text,
        }
    }
}

impl From<&str> for BackendName {
    fn from(text: &str) -> Self {
        if text.is_empty() {
            return Self::Known(BackendKind::Udp);
        }
        BackendKind::named(text).map_or_else(|| Self::Other(text.to_owned()), Self::Known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_spelled_one_way_everywhere() {
        for kind in BackendKind::ALL.iter().copied() {
            assert_eq!(BackendKind::named(kind.name()), Some(kind));
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("{:?}", kind.name()));
            assert_eq!(BackendName::from(kind.name()), BackendName::Known(kind));
        }
    }

    #[test]
    fn names_of_others_are_kept_as_they_are() {
        for text in ["aws-tgw", "VXLAN", " udp"] {
            let name = BackendName::from(text);
            assert_eq!(
                (name.clone(), name.to_string()),
                (BackendName::Other(text.into()), text.into())
            );
        }
        let hostile = BackendName::from("\u{1b}[31m\r\nready");
        assert_eq!(hostile.to_string(), "\\u{1b}[31m\\r\\nready", "a terminal would obey");
        assert!(BackendName::from("").is_udp(), "as flannel's udp nodes publish it");
    }
}

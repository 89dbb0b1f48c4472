//! What differs by family in what weftd and others tell.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::forward::decide::Leased;
use crate::host::state::KernelFamily;
use crate::netfilter::program::{IP6TABLES, IPTABLES, Iptables};
use crate::route::{Prefix, Routed};
use crate::status::{Lease, Peer, Status, Via};

/// A family, as the tool and the programs that it asks know it.
pub(in crate::tool) trait ToldFamily: Routed + KernelFamily {
    /// What nft calls it.
    const NFT: &'static str;
    /// Its programs of iptables.
    const IPTABLES: Iptables;

    /// Where a peer's packets go.
    fn via(peer: &Peer) -> Option<Via>;

    /// The overlay's device.
    fn device(status: &Status) -> Option<&str>;

    /// The overlay, and this host's part of it.
    fn leased(lease: &Lease) -> Option<Leased<Self>> {
        let (network, subnet) =
            (Self::of_both(lease.networks()?)?, Self::of_both(lease.subnets()?)?);
        Some(Leased { network, subnet })
    }

    /// A peer's subnet.
    fn subnet(peer: &Peer) -> Option<Prefix<Self>> {
        Self::of_both(peer.subnets()?)
    }
}

impl ToldFamily for Ipv4Addr {
    const NFT: &'static str = "ip";
    const IPTABLES: Iptables = IPTABLES;

    fn via(peer: &Peer) -> Option<Via> {
        Some(peer.via)
    }

    fn device(status: &Status) -> Option<&str> {
        status.device.as_deref()
    }
}

impl ToldFamily for Ipv6Addr {
    const NFT: &'static str = "ip6";
    const IPTABLES: Iptables = IP6TABLES;

    fn via(peer: &Peer) -> Option<Via> {
        peer.ipv6_via
    }

    fn device(status: &Status) -> Option<&str> {
        status.ipv6_device.as_deref().or(status.device.as_deref())
    }
}

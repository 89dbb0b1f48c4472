//! What differs by family in what weftd and others tell.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::forward::decide::Leased;
use crate::host::state::KernelFamily;
use crate::netfilter::program::{IP6TABLES, IPTABLES, Iptables};
use crate::route::{Prefix, Prefixes, Routed};
use crate::status::{Lease, Peer, Status, Via};

/// A family, as the tool and the programs that it asks know it.
pub(in crate::tool) trait ToldFamily: Routed + KernelFamily {
    /// Its name.
    const NAME: &'static str;
    /// What nft calls it.
    const NFT: &'static str;
    /// Its programs of iptables.
    const IPTABLES: Iptables;

    /// The prefix of the family, if there is one.
    fn of_both(prefixes: Prefixes) -> Option<Prefix<Self>>;

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
    const NAME: &'static str = "IPv4";
    const NFT: &'static str = "ip";
    const IPTABLES: Iptables = IPTABLES;

    fn of_both(prefixes: Prefixes) -> Option<Prefix> {
        prefixes.v4()
    }

    fn via(peer: &Peer) -> Option<Via> {
        Some(peer.via)
    }

    fn device(status: &Status) -> Option<&str> {
        status.device.as_deref()
    }
}

impl ToldFamily for Ipv6Addr {
    const NAME: &'static str = "IPv6";
    const NFT: &'static str = "ip6";
    const IPTABLES: Iptables = IP6TABLES;

    fn of_both(prefixes: Prefixes) -> Option<Prefix<Self>> {
        prefixes.v6()
    }

    fn via(peer: &Peer) -> Option<Via> {
        peer.ipv6_via
    }

    fn device(status: &Status) -> Option<&str> {
        status.ipv6_device.as_deref().or(status.device.as_deref())
    }
}

//! The rules that a node wants, as values. The only place that knows flannel's rule set; it knows
//! no firewall's syntax.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::route::{IpAddress, Prefix, Prefixes};
use crate::words::words;

/// The bit by which kube-proxy marks what it masquerades itself. Any other bit may be set as well.
pub const KUBE_PROXY_MARK: u32 = 0x4000;

words! {
    /// A family of addresses: each firewall keeps its rules in tables of their own.
    Family {
        /// Always there.
        V4 = "IPv4",
        /// In networks that have it.
        V6 = "IPv6",
    }
}

/// What a node wants, after its flags and its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The overlay's networks.
    pub networks: Prefixes,
    /// The node's own subnets.
    pub subnets: Prefixes,
    /// Whether what leaves the overlay is masqueraded.
    pub masquerade: bool,
    /// Whether what the overlay sends and gets may be forwarded.
    pub forward: bool,
    /// Whether masqueraded flows get random source ports; else the kernel keeps a port if it can,
    /// and two nodes behind one address may choose the same.
    pub random_ports: bool,
}

/// The rules of one chain, in their order.
pub type Chain = (Purpose, Vec<Rule>);

impl Wanted {
    /// What is wanted of `family`, with the rules of each in their order; nothing if the network
    /// does not have it.
    pub fn chains(&self, family: Family) -> Vec<Chain> {
        let is_wanted = |purpose: &Purpose| match purpose {
            Purpose::Masquerade => self.masquerade,
            Purpose::Forward => self.forward,
        };
        let wanted = Purpose::ALL.into_iter().filter(is_wanted);
        wanted.filter_map(|purpose| Some((purpose, self.rules(family, purpose)?))).collect()
    }

    /// Whether no rule is wanted, and the firewall is left alone.
    pub fn is_nothing(&self) -> bool {
        !self.masquerade && !self.forward
    }

    fn rules(&self, family: Family, purpose: Purpose) -> Option<Vec<Rule>> {
        let (network, subnet) = (family.of(self.networks)?, family.of(self.subnets)?);
        let both = |source, destination, verdict| Rule {
            only_marked: false,
            source: Some(source),
            destination: Some(destination),
            verdict,
        };
        let masquerade = Verdict::Masquerade { random_ports: self.random_ports };
        Some(match purpose {
            Purpose::Masquerade => vec![
                // kube-proxy masquerades it, and some kernels corrupt what is translated twice.
                Rule { only_marked: true, ..Rule::all(Verdict::Return) },
                // Within the overlay pods see each other's addresses.
                both(Side::In(subnet), Side::In(network), Verdict::Return),
                both(Side::In(network), Side::In(subnet), Verdict::Return),
                // So do our pods those of a client outside that is routed to them.
                both(Side::NotIn(network), Side::In(subnet), Verdict::Return),
                both(Side::In(network), Side::NotIn(family.multicast()), masquerade),
                // A host's answer from a remote pod must come back to this node.
                both(Side::NotIn(network), Side::In(network), masquerade),
            ],
            Purpose::Forward => vec![
                Rule { source: Some(Side::In(network)), ..Rule::all(Verdict::Accept) },
                Rule { destination: Some(Side::In(network)), ..Rule::all(Verdict::Accept) },
            ],
        })
    }
}

impl Family {
    /// What there is of this family.
    fn of(self, prefixes: Prefixes) -> Option<Block> {
        match self {
            Self::V4 => prefixes.v4().map(Block::from),
            Self::V6 => prefixes.v6().map(Block::from),
        }
    }

    /// 224.0.0.0/4 or ff00::/8, which must not be masqueraded.
    fn multicast(self) -> Block {
        match self {
            Self::V4 => Block { network: Ipv4Addr::new(224, 0, 0, 0).into(), length_bits: 4 },
            Self::V6 => Block { network: Ipv6Addr::from_bits(0xff << 120).into(), length_bits: 8 },
        }
    }
}

/// What a chain is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Addresses of what leaves the overlay.
    Masquerade,
    /// Accept forwarded packets from and to the overlay.
    Forward,
}

impl Purpose {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Masquerade, Self::Forward];
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// It is for packets with [`KUBE_PROXY_MARK`] only.
    pub only_marked: bool,
    /// Where packets come from; `None` for anywhere.
    pub source: Option<Side>,
    /// Where they go to.
    pub destination: Option<Side>,
    /// What becomes of them.
    pub verdict: Verdict,
}

impl Rule {
    /// The rule for every packet.
    pub fn all(verdict: Verdict) -> Self {
        Self { only_marked: false, source: None, destination: None, verdict }
    }

    /// Whether every network on the host wants this very rule.
    pub fn is_shared(&self) -> bool {
        self.source.is_none() && self.destination.is_none()
    }
}

/// A prefix of either family.
///
/// INVARIANT: it was a [`Prefix`], so its host bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub(super) network: IpAddr,
    pub(super) length_bits: u8,
}

impl<A: IpAddress + Into<IpAddr>> From<Prefix<A>> for Block {
    fn from(prefix: Prefix<A>) -> Self {
        Self { network: prefix.network().into(), length_bits: prefix.length_bits() }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.length_bits)
    }
}

/// One end of a packet's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Inside the prefix.
    In(Block),
    /// Outside the prefix.
    NotIn(Block),
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing more in this chain.
    Return,
    /// It may pass.
    Accept,
    /// Its source becomes the address of the interface by which it leaves.
    Masquerade {
        /// With a random source port.
        random_ports: bool,
    },
}

#[cfg(test)]
pub(super) mod tests;

//! The rules that a node wants, as values. The only place that knows flannel's rule set; it knows
//! no firewall's syntax.

use std::net::Ipv4Addr;

use crate::route::Prefix;

/// The bit by which kube-proxy marks what it masquerades itself. Any other bit may be set as well.
pub const KUBE_PROXY_MARK: u32 = 0x4000;

/// What a node wants, after its flags and its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The overlay's network.
    pub network: Prefix,
    /// The node's own subnet.
    pub subnet: Prefix,
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
    /// What is wanted, with the rules of each in their order.
    pub fn chains(&self) -> Vec<Chain> {
        let is_wanted = |purpose: &Purpose| match purpose {
            Purpose::Masquerade => self.masquerade,
            Purpose::Forward => self.forward,
        };
        let wanted = Purpose::ALL.into_iter().filter(is_wanted);
        wanted.map(|purpose| (purpose, self.rules(purpose))).collect()
    }

    /// Whether no rule is wanted, and the firewall is left alone.
    pub fn is_nothing(&self) -> bool {
        !self.masquerade && !self.forward
    }

    fn rules(&self, purpose: Purpose) -> Vec<Rule> {
        let (network, subnet) = (self.network, self.subnet);
        let both = |source, destination, verdict| Rule {
            only_marked: false,
            source: Some(source),
            destination: Some(destination),
            verdict,
        };
        let masquerade = Verdict::Masquerade { random_ports: self.random_ports };
        match purpose {
            Purpose::Masquerade => vec![
                // kube-proxy masquerades it, and some kernels corrupt what is translated twice.
                Rule { only_marked: true, ..Rule::all(Verdict::Return) },
                // Within the overlay pods see each other's addresses.
                both(Side::In(subnet), Side::In(network), Verdict::Return),
                both(Side::In(network), Side::In(subnet), Verdict::Return),
                // So do our pods those of a client outside that is routed to them.
                both(Side::NotIn(network), Side::In(subnet), Verdict::Return),
                both(Side::In(network), Side::NotIn(multicast()), masquerade),
                // A host's answer from a remote pod must come back to this node.
                both(Side::NotIn(network), Side::In(network), masquerade),
            ],
            Purpose::Forward => vec![
                Rule { source: Some(Side::In(network)), ..Rule::all(Verdict::Accept) },
                Rule { destination: Some(Side::In(network)), ..Rule::all(Verdict::Accept) },
            ],
        }
    }
}

/// 224.0.0.0/4, which must not be masqueraded.
pub fn multicast() -> Prefix {
    Prefix::new(Ipv4Addr::new(224, 0, 0, 0), 4).expect("4 bits are a prefix length")
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

/// One end of a packet's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Inside the prefix.
    In(Prefix),
    /// Outside the prefix.
    NotIn(Prefix),
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

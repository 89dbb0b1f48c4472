//! What keeps the kernel's programs from running.

use crate::fast_path::{LENGTHS_MAX, PEERS_MAX};
use crate::host::netlink::NetlinkError;
use crate::status;

use super::attachment::AttachError;

/// That workers carry all packets: why, in a word of few and for people.
pub(crate) fn off(why: &str, reason: String) -> status::FastPath {
    let (why, reason) = (Some(why.to_owned()), Some(reason));
    status::FastPath { why, reason, ..Default::default() }
}

/// Why the programs don't run now.
#[derive(Debug, thiserror::Error)]
pub(super) enum Obstacle {
    #[error("the device is being made again")]
    NoGround,
    #[error("this host has IPsec policies, which its packets would pass by")]
    Policies,
    #[error("{0} is gone, or is another interface now")]
    NoInterface(String),
    #[error("{0} is no Ethernet interface")]
    NotEthernet(String),
    #[error("{0} is a bridge, on which the kernel cuts and sums each packet of a tunnel itself")]
    Bridge(String),
    #[error("no path can be measured without the right to a raw ICMP socket")]
    Unmeasured,
    #[error("leases have more than {LENGTHS_MAX} lengths of prefix")]
    Lengths,
    #[error("there are more than {PEERS_MAX} peers")]
    Peers,
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("another program has removed weftd's from its TUN device or from {0}")]
    Evicted(String),
    #[error("the kernel refused an entry")]
    Entry(#[from] std::io::Error),
    #[error("the kernel does not tell what its packets would meet")]
    Netlink(#[from] NetlinkError),
}

impl Obstacle {
    /// A word for it.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::NoGround => "device-rebuilt",
            Self::Policies => "ipsec",
            Self::NoInterface(_) => "interface-gone",
            Self::NotEthernet(_) => "not-ethernet",
            Self::Bridge(_) => "bridge",
            Self::Unmeasured => "unmeasured",
            Self::Lengths => "prefix-lengths",
            Self::Peers => "peers",
            Self::Attach(_) => "not-attached",
            Self::Evicted(_) => "evicted",
            Self::Entry(_) => "entry-refused",
            Self::Netlink(_) => "netlink",
        }
    }
}

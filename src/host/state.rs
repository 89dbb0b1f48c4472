//! What the kernel knows about links, IPv4 addresses and IPv4 routes, as plain values.
//! Owns the vocabulary of `host`; must never perform I/O or name a netlink crate.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use crate::route::Prefix;

/// A network interface as the kernel addresses it (`index`) and as people do (`name`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LinkId {
    /// The kernel's index: stable across renames, never reused while the link lives.
    pub index: u32,
    /// The name at the time of the listing.
    pub name: String,
}

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (index {})", self.name, self.index)
    }
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index and name.
    pub id: LinkId,
    /// Largest IP packet that it carries, in bytes; 0 if the kernel did not say.
    pub mtu_bytes: u32,
    /// Length of its transmit queue, in packets.
    pub transmit_queue_length: u32,
    /// Whether the administrator switched it on (`IFF_UP`).
    pub is_up: bool,
    /// Whether it is operational, carrier included (`IFF_RUNNING`).
    pub is_running: bool,
}

/// How far an address or a route reaches: `RT_SCOPE_*` of rtnetlink(7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Valid everywhere.
    Global,
    /// Valid inside this site.
    Site,
    /// Valid on the attached link.
    Link,
    /// Valid inside this host.
    Host,
    /// Any other value, as the kernel gave it.
    Other(u8),
}

/// One IPv4 address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// Index of the interface that owns it.
    pub interface_index: u32,
    /// The interface's own address (`IFA_LOCAL`), never the far end of a point-to-point link.
    pub address: Ipv4Addr,
    /// Length of the on-link prefix, 0…32.
    pub prefix_length_bits: u8,
    /// How far the address reaches.
    pub scope: Scope,
    /// No lifetime is running (`IFA_F_PERMANENT`); an address of DHCP is not.
    pub is_permanent: bool,
    /// Its preferred lifetime is over (`IFA_F_DEPRECATED`): not for new connections.
    pub is_deprecated: bool,
    /// A later address of a subnet that the interface already had (`IFA_F_SECONDARY`).
    pub is_secondary: bool,
}

/// One way that a route leaves the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NextHop {
    /// Index of the outgoing interface.
    pub interface_index: u32,
    /// The router, `None` when the destination is on the link itself.
    pub gateway: Option<IpAddr>,
}

/// What a route does with a packet: `RTN_*` of rtnetlink(7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// Forwards it.
    Unicast,
    /// Anything else (blackhole, unreachable, prohibit, …), as the kernel numbers it.
    Other(u8),
}

/// Which program set a route: `RTPROT_*` of rtnetlink(7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouteProtocol(pub u8);

impl RouteProtocol {
    /// `RTPROT_BOOT`, what flannel and a bare `ip route add` write.
    pub const BOOT: Self = Self(3);
}

/// One IPv4 route of the main table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Route {
    /// The prefix it is for; `0.0.0.0/0` for a default route.
    pub destination: Prefix,
    /// Its priority, lower wins; 0 unless somebody chose one.
    pub metric: u32,
    /// What it does with a packet.
    pub kind: RouteKind,
    /// How far its destination is.
    pub scope: Scope,
    /// Who set it.
    pub protocol: RouteProtocol,
    /// Type of service it is limited to; 0 means any.
    pub type_of_service: u8,
    /// Source address that it suggests.
    pub preferred_source: Option<Ipv4Addr>,
    /// One entry normally, several for a multipath route, none for a blackhole.
    pub next_hops: Vec<NextHop>,
}

/// A route to set or to remove: one way out, main table, any type of service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteSpec {
    /// The prefix it is for.
    pub destination: Prefix,
    /// The outgoing interface.
    pub interface: LinkId,
    /// The router, `None` when the destination is on the link itself.
    pub gateway: Option<Ipv4Addr>,
    /// Its priority, lower wins.
    pub metric: u32,
    /// How far its destination is.
    pub scope: Scope,
    /// Who claims it.
    pub protocol: RouteProtocol,
}

impl fmt::Display for RouteSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        write!(f, " dev {}", self.interface.name)?;
        if self.metric != 0 {
            write!(f, " metric {}", self.metric)?;
        }
        Ok(())
    }
}

/// How the kernel would reach a destination right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathToHost {
    /// Index of the outgoing interface.
    pub interface_index: u32,
    /// The source address that it would use.
    pub preferred_source: Option<Ipv4Addr>,
}

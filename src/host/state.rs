//! What the kernel knows about links, addresses and routes, as plain values.
//! Owns the vocabulary of `host`; must never perform I/O or name a netlink crate.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::route::{IpAddress, Prefix};

/// A network interface as the kernel addresses it (`index`) and as people do (`name`).
#[derive(Debug, Clone, PartialEq, Eq, derive_more::Display)]
#[display("{name} (index {index})")]
pub struct LinkId {
    /// The kernel's index: stable across renames, never reused while the link lives.
    pub index: u32,
    /// The name at the time of the listing.
    pub name: String,
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index and name.
    pub id: LinkId,
    /// Largest IP packet that it carries, in bytes; 0 if the kernel did not say.
    pub mtu_bytes: u32,
    /// Whether the administrator switched it on (`IFF_UP`).
    pub is_up: bool,
    /// Whether anything is at its other end (`IFF_LOWER_UP`): of a TUN device, a process.
    pub has_carrier: bool,
    /// How often it has lost that since it was made (Linux 4.16).
    pub carrier_losses: Option<u32>,
    /// Whether it leads nowhere but back (`IFF_LOOPBACK`).
    pub is_loopback: bool,
    /// Whether it is a bridge.
    pub is_bridge: bool,
    /// Whether an XDP program is attached to it.
    pub has_xdp: bool,
    /// Its hardware address, if it has one of Ethernet's length.
    pub mac: Option<MacAddress>,
    /// What it was made with, if it is a VXLAN device.
    pub vxlan: Option<Vxlan>,
    /// The same, if it tunnels IPv4 in IPv4 and nothing else.
    pub ipip: Option<Ipip>,
    /// Whether it is a WireGuard device of the kernel's.
    pub is_wireguard: bool,
    /// Index of the other end, if it is one of a veth pair.
    pub veth_peer: Option<u32>,
    /// Index of the bridge, or the like, that it is a port of.
    pub controller: Option<u32>,
    /// What somebody says of it (`ip link set alias`).
    pub alias: Option<String>,
}

impl Link {
    /// Whether the two are the ends of one veth pair.
    pub fn is_paired_with(&self, other: &Self) -> bool {
        self.veth_peer == Some(other.id.index) && other.veth_peer == Some(self.id.index)
    }
}

/// What the kernel does by family.
pub trait KernelFamily: IpAddress {
    /// The metric of a route for which nobody chose one.
    const USUAL_METRIC: u32;
    /// Whether what [`Address::is_secondary`] says is that the address changes from time to time.
    const SECONDARY_CHANGES: bool;
    /// Bytes of a header of the family, without options.
    const HEADER_BYTES: u32;
    /// Below this MTU the kernel switches the family off on a device.
    const MTU_BYTES_MIN: u32;
    /// Whether the kernel refuses a gateway that another device's route leads to, even as onlink.
    const ONLINK_GOES_BY_ROUTES: bool;

    /// Whether packets from and to one host may have it, another's or its own.
    fn is_of_host(self) -> bool;

    /// Whether it is of one link only.
    fn is_of_link(self) -> bool;
}

impl KernelFamily for Ipv4Addr {
    const USUAL_METRIC: u32 = 0;
    const SECONDARY_CHANGES: bool = false;
    const HEADER_BYTES: u32 = 20;
    /// `inetdev_valid_mtu`, net/ipv4/devinet.c.
    const MTU_BYTES_MIN: u32 = 68;
    const ONLINK_GOES_BY_ROUTES: bool = false;

    fn is_of_host(self) -> bool {
        !(self.is_loopback() || self.is_multicast() || self.is_broadcast() || self.is_unspecified())
    }

    fn is_of_link(self) -> bool {
        self.is_link_local()
    }
}

impl KernelFamily for Ipv6Addr {
    /// `IP6_RT_PRIO_USER` (include/net/ip6_route.h): the kernel takes 0 for "not given".
    const USUAL_METRIC: u32 = 1024;
    const SECONDARY_CHANGES: bool = true;
    const HEADER_BYTES: u32 = 40;
    /// `IPV6_MIN_MTU`, RFC 8200.
    const MTU_BYTES_MIN: u32 = 1280;
    /// `ip6_route_check_nh_onlink`, net/ipv6/route.c.
    const ONLINK_GOES_BY_ROUTES: bool = true;

    fn is_of_host(self) -> bool {
        !(self.is_loopback() || self.is_multicast() || self.is_unspecified())
    }

    fn is_of_link(self) -> bool {
        self.is_unicast_link_local()
    }
}

/// One address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address<A: IpAddress = Ipv4Addr> {
    /// Index of the interface that owns it.
    pub interface_index: u32,
    /// The interface's own address (`IFA_LOCAL`), never the far end of a point-to-point link.
    pub address: A,
    /// Length of the on-link prefix, 0…32 or 0…128.
    pub prefix_length_bits: u8,
    /// No lifetime is running (`IFA_F_PERMANENT`); an address of DHCP is not.
    pub is_permanent: bool,
    /// Its preferred lifetime is over (`IFA_F_DEPRECATED`): not for new connections.
    pub is_deprecated: bool,
    /// A later address of a subnet that the interface already had (`IFA_F_SECONDARY`); of IPv6, one
    /// that is changed from time to time (`IFA_F_TEMPORARY`, the same bit).
    pub is_secondary: bool,
    /// Nobody may use it, or not yet: another host may have it (`IFA_F_TENTATIVE`,
    /// `IFA_F_DADFAILED`).
    pub is_in_doubt: bool,
}

/// One way that a route leaves the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    /// Index of the outgoing interface.
    pub interface_index: u32,
    /// The router, `None` when the destination is on the link itself.
    pub gateway: Option<IpAddr>,
}

/// What a route does with a packet: `RTN_*` of rtnetlink(7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteKind(pub u8);

impl RouteKind {
    /// Forwards it.
    pub const UNICAST: Self = Self(1);
    /// To this host itself.
    pub const LOCAL: Self = Self(2);
    /// Drops it.
    pub const BLACKHOLE: Self = Self(6);
    /// Drops it, and says that the host can't be reached.
    pub const UNREACHABLE: Self = Self(7);
    /// Drops it, and says that this is forbidden.
    pub const PROHIBIT: Self = Self(8);
}

/// Which program set a route: `RTPROT_*` of rtnetlink(7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteProtocol(pub u8);

impl RouteProtocol {
    /// `RTPROT_BOOT`, what flannel and a bare `ip route add` write.
    pub const BOOT: Self = Self(3);
    /// What weftd writes on routes that nothing else marks as its own. No program
    /// in iproute2's list or the kernel's header has the number.
    pub const WEFT: Self = Self(119);
}

/// One route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route<A: IpAddress = Ipv4Addr> {
    /// The prefix it is for; `0.0.0.0/0` or `::/0` for a default route.
    pub destination: Prefix<A>,
    /// Its priority, lower wins; [`KernelFamily::USUAL_METRIC`] unless somebody chose one.
    pub metric: u32,
    /// What it does with a packet.
    pub kind: RouteKind,
    /// Who set it.
    pub protocol: RouteProtocol,
    /// Type of service it is limited to; 0 means any.
    pub type_of_service: u8,
    /// Its own MTU in bytes, in place of the interface's, if it has one.
    pub mtu_bytes: Option<u32>,
    /// One entry normally, several for a multipath route, none for a blackhole.
    pub next_hops: Vec<NextHop>,
}

impl<A: KernelFamily> Route<A> {
    /// The main table has one place for each destination, type of service and metric. Whether this
    /// route has the one that weftd's routes take.
    pub fn is_in_our_place(&self) -> bool {
        self.metric == A::USUAL_METRIC && self.type_of_service == 0
    }

    /// What names this route for its removal. One of several ways or of none is not ours.
    pub fn removal(&self) -> Option<RouteSpec<A>> {
        let [hop] = self.next_hops.as_slice() else { return None };
        let gateway = match hop.gateway {
            None => None,
            Some(gateway) => Some(A::of(gateway)?),
        };
        let index = hop.interface_index;
        let interface = LinkId { index, name: format!("if{index}") };
        let (metric, protocol) = (self.metric, self.protocol);
        let spec = RouteSpec::into_device(self.destination, interface);
        Some(RouteSpec { gateway, metric, protocol, ..spec })
    }
}

/// A route to set or to remove: one way out, main table, any type of service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteSpec<A: IpAddress = Ipv4Addr> {
    /// The prefix it is for.
    pub destination: Prefix<A>,
    /// The outgoing interface.
    pub interface: LinkId,
    /// The router, `None` when the destination is on the link itself.
    pub gateway: Option<A>,
    /// Its priority, lower wins.
    pub metric: u32,
    /// Who claims it.
    pub protocol: RouteProtocol,
    /// Whether the router counts as reachable over the interface, whatever its address.
    pub is_onlink: bool,
    /// Its own MTU in bytes, in place of the interface's, if it has one.
    pub mtu_bytes: Option<u32>,
}

impl<A: KernelFamily> RouteSpec<A> {
    /// A route with flannel's attributes that leads all of `destination` into a device. With the
    /// usual metric, which for IPv4 is the strongest.
    pub fn into_device(destination: Prefix<A>, interface: LinkId) -> Self {
        Self {
            destination,
            interface,
            gateway: None,
            metric: A::USUAL_METRIC,
            protocol: RouteProtocol::BOOT,
            is_onlink: false,
            mtu_bytes: None,
        }
    }
}

impl<A: KernelFamily> fmt::Display for RouteSpec<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { destination, interface, metric, .. } = self;
        let via = self.gateway.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
        let onlink = if self.is_onlink { " onlink" } else { "" };
        let metric =
            if *metric == A::USUAL_METRIC { String::new() } else { format!(" metric {metric}") };
        let mtu = self.mtu_bytes.map(|bytes| format!(" mtu {bytes}")).unwrap_or_default();
        write!(f, "{destination}{via} dev {}{onlink}{metric}{mtu}", interface.name)
    }
}

/// How the kernel would reach a destination right now.
#[derive(Debug, Clone, Copy)]
pub struct PathToHost {
    /// Index of the outgoing interface.
    pub interface_index: u32,
    /// The source address that it would use.
    pub preferred_source: Option<IpAddr>,
    /// The router, `None` when the destination is on the link itself.
    pub gateway: Option<IpAddr>,
    /// Whether packets leave as they are for another host: no local route, no encapsulation.
    pub is_plain: bool,
}

/// A device's hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display("{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", _0[0], _0[1], _0[2], _0[3], _0[4], _0[5])]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The address in `bytes`, if they are as many as an Ethernet address has.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Reads a text such as `82:4b:b6:2f:54:4e`.
    pub fn parse(text: &str) -> Option<Self> {
        let byte = |part: &str| {
            // Before it a sign would be read, too.
            let is_byte = part.len() == 2 && !part.starts_with('+');
            u8::from_str_radix(part, 16).ok().filter(|_| is_byte)
        };
        let bytes: Option<Vec<u8>> = text.split([':', '-']).map(byte).collect();
        Self::from_bytes(&bytes?)
    }

    /// A locally administered address for one host.
    pub fn locally_administered(mut bytes: [u8; 6]) -> Self {
        bytes[0] = (bytes[0] & 0xfe) | 0x02;
        Self(bytes)
    }

    /// Whether it is the address of one host: neither a group address nor zero.
    pub fn is_host(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

/// A table of a link that maps addresses and hardware addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryTable {
    /// The hardware address of each neighbour, one entry for each address.
    Neighbours,
    /// The host behind each hardware address of a VXLAN device, one entry for each of them.
    Forwarding,
}

/// A permanent entry of such a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkEntry<A: IpAddress = Ipv4Addr> {
    /// The table.
    pub table: EntryTable,
    /// An address in the overlay for a neighbour, a host's for the forwarding database.
    pub address: A,
    /// The hardware address.
    pub mac: MacAddress,
}

/// What a VXLAN device is made with; it cannot be changed later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vxlan {
    /// The network identifier.
    pub vni: u32,
    /// Index of the interface beneath it.
    pub parent_index: u32,
    /// The source address of its packets.
    pub local: Option<IpAddr>,
    /// Its UDP port; `None` leaves it to the kernel.
    pub port: Option<u16>,
    /// Whether packets carry the group policy extension.
    pub gbp: bool,
    /// Whether it learns from what it receives.
    pub learning: bool,
    /// Whether it has a peer or a group to send to what it does not know where to send.
    pub has_default_remote: bool,
    /// Whether it asks a program where to send to.
    pub l2miss: bool,
}

/// What an ipip device has at its ends, which can't be changed later; unspecified is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipip {
    /// The source address of its packets.
    pub local: Ipv4Addr,
    /// Where it sends all of them.
    pub remote: Ipv4Addr,
}

#[cfg(test)]
pub(crate) mod tests;

//! What the kernel does with a packet that is explained, by its own answers to `ip route get`,
//! asked as if the packet came by the interface of this host's pod. Policy rules, other tables and
//! the source check count in these answers, and nothing is sent.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::{fs, io};

use anyhow::Context;

use crate::host::netlink::{self, NetlinkError};
use crate::host::state::{KernelFamily, Link, PathToHost};
use crate::tool::ask::wait_for;
use crate::tool::refusal::{or_refused, way_in, why};

/// The way that is asked about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a, A> {
    /// The pod of this host.
    pub(super) near: A,
    /// The other one.
    pub(super) far: A,
    /// Whether the packet is the near pod's.
    pub(super) is_outward: bool,
    /// The overlay's device, if it has one.
    pub(super) device: Option<&'a str>,
    /// The interface to the other hosts.
    pub(super) interface: &'a str,
    /// The host of the far pod.
    pub(super) host: IpAddr,
    /// What the tunnel sends, if there is a tunnel.
    pub(super) tunnel: Option<Outer>,
}

/// A datagram of the tunnel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outer {
    /// From where to where.
    Datagram([SocketAddr; 2]),
    /// To the host, with IPv6 outside: no routing rule is asked for ports.
    ToHost,
}

/// What is said where that is so of IPv6.
pub(in crate::tool) const FORWARDS_NOTHING: &str = "the kernel forwards no IPv6: \
                                           net.ipv6.conf.all.forwarding is 0";

/// A route, or why there is none.
pub(super) type Path = Result<PathToHost, io::Error>;

/// What the kernel answered.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) links: Vec<Link>,
    /// The route to the near pod.
    pub(super) near: Path,
    /// The interface by which the packet comes, if there is one.
    pub(super) comes_by: Option<u32>,
    /// Whether the kernel forwards nothing of the family.
    pub(super) forwards_nothing: bool,
    /// That of the packet, by where it comes from; nothing if that is not known.
    pub(super) across: Option<Path>,
    /// The same with the marks by which routing rules go, of a packet that leaves.
    pub(super) marked: Vec<(u32, Path)>,
    /// That of the tunnel's datagrams.
    pub(super) outer: Option<Path>,
}

/// Asks.
pub(super) fn ask<A: KernelFamily>(asked: &Asked<'_, A>) -> anyhow::Result<Answers> {
    wait_for(ask_for_all(asked))?.context("the kernel could not be asked for its routes")
}

async fn ask_for_all<A: KernelFamily>(asked: &Asked<'_, A>) -> Result<Answers, NetlinkError> {
    let links = netlink::links().await?;
    let near = or_refused(netlink::path_to(asked.near).await)?;
    let comes_by = match (&near, asked.is_outward) {
        (near, true) => near.as_ref().ok().map(|path| path.interface_index),
        (_, false) => {
            let named = links.iter().find(|link| link.id.name == asked.comes_by());
            way_in(asked.far, asked.host, named.map(|link| link.id.index)).await?
        }
    };
    let (mut across, mut outer, mut marked) = (None, None, Vec::new());
    if let Some(index) = comes_by {
        let (from, to) = asked.ends();
        across = Some(or_refused(netlink::path_of_forwarded(from, to, index, 0).await)?);
        let marks = if asked.is_outward { netlink::marks::<A>().await? } else { Vec::new() };
        for mark in marks {
            let path = netlink::path_of_forwarded(from, to, index, mark).await;
            marked.push((mark, or_refused(path)?));
        }
    }
    if let Some(tunnel) = asked.tunnel.filter(|_| asked.is_outward) {
        let path = match tunnel {
            Outer::Datagram([from, to]) => netlink::path_of_datagram(from, to).await,
            Outer::ToHost => netlink::path_to(asked.host).await,
        };
        outer = Some(or_refused(path)?);
    }
    let forwards_nothing = A::BITS == 128 && forwards_ipv6() == Some(false);
    Ok(Answers { links, near, comes_by, forwards_nothing, across, marked, outer })
}

/// Whether the kernel forwards IPv6, which it does not say when it is asked for a route
/// (`ip6_forward` in net/ipv6/ip6_output.c): from Linux 6.17 on devices may be made to, where all
/// are not. Nothing if it has no IPv6.
pub(in crate::tool) fn forwards_ipv6() -> Option<bool> {
    let is_on = |path: PathBuf| Some(fs::read_to_string(path).ok()?.trim() != "0");
    let of_all = is_on("/proc/sys/net/ipv6/conf/all/forwarding".into())?;
    let devices = fs::read_dir("/proc/sys/net/ipv6/conf").into_iter().flatten().flatten();
    let mut forced = devices.filter_map(|device| is_on(device.path().join("force_forwarding")));
    Some(of_all || forced.any(|is_on| is_on))
}

impl<'a, A: KernelFamily> Asked<'a, A> {
    /// `ip` with the option by which it means the family.
    const IP: &'static str = if A::BITS == 32 { "ip" } else { "ip -6" };

    fn ends(&self) -> (A, A) {
        if self.is_outward { (self.near, self.far) } else { (self.far, self.near) }
    }

    /// By which interface what other hosts send comes in, unless routes lead to them without it.
    fn comes_by(&self) -> &'a str {
        self.device.unwrap_or(self.interface)
    }
}

impl Answers {
    /// Whether this host has a way to pods of its own.
    pub(super) fn has_pods<A: KernelFamily>(&self, asked: &Asked<'_, A>) -> bool {
        self.near.as_ref().is_ok_and(|path| self.leads_to_pods(path, asked))
    }

    fn leads_to_pods<A: KernelFamily>(&self, path: &PathToHost, asked: &Asked<'_, A>) -> bool {
        let name = Some(self.name(path));
        path.gateway.is_none() && name != asked.device && !self.is_local(path)
    }

    fn is_local(&self, path: &PathToHost) -> bool {
        let is_its = |link: &&Link| link.id.index == path.interface_index;
        self.links.iter().find(is_its).is_some_and(|link| link.is_loopback)
    }

    /// Whether the kernel does what the packet needs, or else where it parts from that, nearest
    /// first.
    pub(super) fn agree<A: KernelFamily>(&self, asked: &Asked<'_, A>) -> Result<(), String> {
        let (Asked { near, device, host, is_outward, .. }, ip) = (*asked, Asked::<A>::IP);
        let path = self.near.as_ref().map_err(|error| {
            format!(
                "the kernel has no way to {near}, a pod of this host: {}; does one run here, \
                 and is the pods' bridge there and up, with its address?",
                why(error)
            )
        })?;
        let pods_interface = self.name(path);
        if self.is_local(path) {
            return Err(format!(
                "{near} is an address of this host itself, or a local route has it: what is for it \
                 ends in the host, and reaches no pod (`{ip} address`, `{ip} route get {near}`)"
            ));
        }
        if !self.leads_to_pods(path, asked) {
            return Err(format!(
                "this host has no route of its own to {near}, the kernel sends that by {}: \
                 the pods' bridge is missing, down or without its address, or no pod runs here",
                self.shown(path)
            ));
        }
        if self.forwards_nothing {
            return Err(FORWARDS_NOTHING.to_owned());
        }
        let (from, to) = asked.ends();
        let comes_by = self.comes_by.map_or_else(|| asked.comes_by(), |index| self.named(index));
        let query = format!("`{ip} route get {to} from {from} iif {comes_by}`");
        let across = self.across.as_ref();
        let across = across.ok_or_else(|| format!("there is no interface {comes_by}"))?;
        let path = across
            .as_ref()
            .map_err(|error| format!("the kernel does not forward it: {} ({query})", why(error)))?;
        let is_right = match is_outward {
            true => self.leads_to_peer(path, asked),
            false => self.name(path) == pods_interface,
        };
        if !is_right {
            return Err(format!(
                "the kernel sends it by {}: another route, rule or table wins ({query})",
                self.shown(path)
            ));
        }
        let Some(outer) = &self.outer else { return Ok(()) };
        let path = outer.as_ref().map_err(|error| {
            format!("this host can't send to {host}: {} (`{ip} route get {host}`)", why(error))
        })?;
        if self.is_local(path) {
            return Err(format!(
                "{host}, the peer's address, is one of this host itself, or a local route has it: \
                 what is sent there ends here (`{ip} address`, `{ip} route get {host}`)"
            ));
        }
        if Some(self.name(path)) == device {
            let by = self.shown(path);
            return Err(format!("the route to {host} leads into the overlay itself, by {by}"));
        }
        Ok(())
    }

    fn leads_to_peer<A: KernelFamily>(&self, path: &PathToHost, asked: &Asked<'_, A>) -> bool {
        let gateway = Some(asked.host);
        Some(self.name(path)) == asked.device || path.gateway == gateway
    }

    /// Where it goes if a firewall marks it, which nobody can ask about; nothing if that is the
    /// same.
    pub(super) fn parting_by_mark<A: KernelFamily>(&self, asked: &Asked<'_, A>) -> Option<String> {
        let (mark, what) = self.marked.iter().find_map(|(mark, path)| match path {
            Ok(path) if self.leads_to_peer(path, asked) => None,
            Ok(path) => Some((mark, format!("sends it by {}", self.shown(path)))),
            Err(error) => Some((mark, format!("does not forward it: {}", why(error)))),
        })?;
        Some(format!(
            "unless a firewall marks it {mark:#x}: then the kernel {what} (`ip rule`). Does a rule \
             mark what pods send (`nft list ruleset`)?"
        ))
    }

    fn name(&self, path: &PathToHost) -> &str {
        self.named(path.interface_index)
    }

    fn named(&self, index: u32) -> &str {
        let is_its = |link: &&Link| link.id.index == index;
        self.links.iter().find(is_its).map_or("?", |link| &link.id.name)
    }

    fn shown(&self, path: &PathToHost) -> String {
        let by = self.name(path);
        path.gateway.map_or_else(|| by.to_owned(), |gateway| format!("{by} via {gateway}"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use rustix::io::Errno;

    use super::*;
    use crate::host::state::LinkId;

    const ASKED: Asked<'static, Ipv4Addr> = Asked {
        near: Ipv4Addr::new(10, 5, 1, 9),
        far: Ipv4Addr::new(10, 5, 2, 7),
        is_outward: true,
        device: Some("flannel0"),
        interface: "eth0",
        host: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
        tunnel: None,
    };

    fn by(interface_index: u32, gateway: Option<[u8; 4]>) -> Path {
        let gateway = gateway.map(IpAddr::from);
        Ok(PathToHost { interface_index, preferred_source: None, gateway, is_plain: true })
    }

    fn refused(errno: Errno) -> Path {
        Err(errno.into())
    }

    /// eth0, cni0, flannel0 and lo are 1 to 4.
    pub(in crate::tool::explain) fn links() -> Vec<Link> {
        let link = |(index, name): (u32, &str)| Link {
            id: LinkId { index, name: name.to_owned() },
            mtu_bytes: 1500,
            is_up: true,
            has_carrier: true,
            carrier_losses: None,
            is_loopback: name == "lo",
            is_bridge: false,
            has_xdp: false,
            mac: None,
            vxlan: None,
            ipip: None,
            is_wireguard: false,
            veth_peer: None,
            controller: None,
            alias: None,
        };
        [(1, "eth0"), (2, "cni0"), (3, "flannel0"), (4, "lo")].map(link).to_vec()
    }

    fn parting(
        asked: Asked<'_, Ipv4Addr>,
        near: Path,
        across: Path,
        outer: Path,
    ) -> Option<String> {
        let marked = vec![(7, across)];
        let comes_by = if asked.is_outward {
            near.as_ref().ok().map(|it| it.interface_index)
        } else {
            Some(3)
        };
        let outer = Some(outer);
        let links = links();
        let forwards_nothing = false;
        let mut answers =
            Answers { links, near, comes_by, forwards_nothing, across: None, marked, outer };
        let by_mark = answers.parting_by_mark(&asked).filter(|_| asked.is_outward);
        answers.across = answers.marked.pop().map(|(_, path)| path);
        let parting = answers.agree(&asked).err();
        let is_across = parting.as_ref().is_some_and(|text| text.contains("ip route get 10.5.2.7"));
        assert_eq!(by_mark.is_some(), is_across, "{by_mark:?} {parting:?}");
        parting
    }

    #[test]
    fn a_way_that_the_kernel_agrees_on_goes() {
        assert_eq!(parting(ASKED, by(2, None), by(3, None), by(1, None)), None);
        let routed = by(1, Some([192, 0, 2, 254]));
        assert_eq!(parting(ASKED, by(2, None), by(3, None), routed), None);
        let host_gw = Asked { device: None, ..ASKED };
        let direct = by(1, Some([192, 0, 2, 2]));
        assert_eq!(parting(host_gw, by(2, None), direct, by(1, None)), None);
        let inward = Asked { is_outward: false, ..ASKED };
        assert_eq!(parting(inward, by(2, None), by(2, None), by(1, None)), None);
    }

    #[test]
    fn each_parting_is_named_with_its_evidence() {
        let well = || by(1, None);
        for (near, across, outer, expected) in [
            (by(3, None), by(3, None), well(), "bridge"),
            (by(1, Some([192, 0, 2, 254])), by(3, None), well(), "by eth0 via 192.0.2.254"),
            (refused(Errno::NETUNREACH), by(3, None), well(), "10.5.1.9"),
            (by(2, None), by(1, Some([192, 0, 2, 254])), well(), "by eth0 via 192.0.2.254"),
            (by(2, None), refused(Errno::XDEV), well(), "rp_filter"),
            (by(2, None), refused(Errno::HOSTUNREACH), well(), "forwarding"),
            (by(2, None), by(3, None), refused(Errno::INVAL), "192.0.2.2"),
            (by(2, None), by(3, None), by(3, None), "flannel0"),
            (by(4, None), by(3, None), well(), "`ip route get 10.5.1.9`"),
            (by(2, None), by(3, None), by(4, None), "`ip address`, `ip route get 192.0.2.2`"),
        ] {
            let text = parting(ASKED, near, across, outer).unwrap_or_default();
            assert!(text.contains(expected), "{expected}: {text}");
        }
        let inward = Asked { is_outward: false, ..ASKED };
        let text = parting(inward, by(2, None), by(1, None), well()).unwrap_or_default();
        assert!(text.contains("ip route get 10.5.1.9 from 10.5.2.7 iif flannel0"), "{text}");
    }
}

//! The device through which the kernel tunnels the packets of one family: made, made again when
//! somebody deletes it, and given the MTU that the external interface leaves. What differs by kind
//! of tunnel is in the file of each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tracing::{debug, info, warn};

use crate::backend::error::{StartError, StartResult};
use crate::backend::family::{CarriedFamily, VXLAN_NAMES, WIREGUARD_NAMES};
use crate::backend::ipip;
use crate::backend::setup::Claim;
use crate::backend::status::{Reporter, Unusable};
use crate::backend::vxlan::device as vxlan;
use crate::backend::vxlan::owner::{Vtep, resolve};
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::Lease;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::netlink::{self, NetlinkError, devices, request_all};
use crate::host::node_lock::NodeLock;
use crate::host::state::{KernelFamily as _, Link, LinkId, MacAddress};
use crate::host::tables::{Device, Way, Ways};
use crate::route::{Families, Prefix, Prefixes};
use crate::status::TunnelEnd;

/// What kind of device it is, and what it is made with.
#[derive(Debug)]
pub(super) enum Tunnel {
    Vxlan(VxlanBackendConfig, MacAddress),
    Ipip { direct_routing: bool },
}

/// The device of one family, which can be made.
#[derive(Debug)]
pub(super) struct TunnelDevice<A: CarriedFamily = Ipv4Addr> {
    tunnel: Tunnel,
    /// Its own address.
    address: A,
    /// Whether nodes are known by addresses of its family, so that nothing is carried without it.
    is_main: bool,
    /// The UDP port that it has.
    port: Option<u16>,
    /// The MTU that it was last given.
    imposed_mtu_bytes: Option<u32>,
    logged: LogOnce,
}

/// Whether a link is the device of such a backend, of this network or another: `flannel.1`,
/// `flannel-v6.1`, `flannel.ipip`, `flannel-wg` and the like.
pub fn is_tunnel_device(link: &Link) -> bool {
    if link.ipip.is_some() {
        return link.id.name == ipip::NAME;
    }
    if link.is_wireguard {
        return WIREGUARD_NAMES.contains(&link.id.name.as_str());
    }
    let number = VXLAN_NAMES.iter().find_map(|name| link.id.name.strip_prefix(name));
    link.vxlan.is_some() && number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// A device that a backend has, and whose packets it carries.
#[derive(Debug)]
pub(super) struct OwnDevice {
    pub(super) name: String,
    pub(super) families: Families<(), ()>,
}

/// Refuses a device of these `names` with an address of another network while another weftd runs
/// here: the two would take each other's peers and addresses from it.
pub(super) async fn refuse_anothers(names: &[String], claim: &Claim<'_>) -> StartResult {
    let links = netlink::links().await?.into_iter();
    // One that runs WireGuard itself has a TUN device.
    let links = links.filter(|link| names.contains(&link.id.name));
    let addresses = all_addresses().await?;
    let former = claim.previous_subnet.map(|subnet| IpAddr::from(subnet.network()));
    let is_anothers = |address: IpAddr| {
        let is_of_link = matches!(address, IpAddr::V6(address) if address.is_of_link());
        !claim.networks.contains(address) && former != Some(address) && !is_of_link
    };
    for Link { id, .. } in links {
        let owned = addresses.iter().filter(|(index, _)| *index == id.index);
        let address = owned.map(|(_, address)| *address).find(|address| is_anothers(*address));
        if let Some(address) = address
            && !NodeLock::is_alone().await.unwrap_or(true)
        {
            return Err(StartError::DeviceOfAnother { name: id.name, address });
        }
    }
    Ok(())
}

/// The addresses of both families, each with the index of its link.
async fn all_addresses() -> Result<Vec<(u32, IpAddr)>, NetlinkError> {
    let v4 = netlink::addresses::<Ipv4Addr>().await?.into_iter();
    let v6 = netlink::addresses::<Ipv6Addr>().await?.into_iter();
    let v4 = v4.map(|owned| (owned.interface_index, IpAddr::from(owned.address)));
    let v6 = v6.map(|owned| (owned.interface_index, IpAddr::from(owned.address)));
    Ok(v4.chain(v6).collect())
}

/// Removes the kernel's tunnel devices that are not `own`, or carry a family that is another one's
/// now, as far as they have an address for that in `networks`: their routes lead packets away.
/// Another daemon may have one for another network.
pub(super) async fn remove_others(own: &[OwnDevice], networks: &[Prefixes]) -> netlink::Result {
    let links = netlink::links().await?.into_iter().filter(is_tunnel_device);
    let addresses = all_addresses().await?;
    for Link { id, .. } in links {
        let families = own.iter().find(|own| own.name == id.name).map(|own| own.families);
        let is_stale = |(index, address): &(u32, IpAddr)| {
            let stays = families.is_some_and(|families| match address {
                IpAddr::V4(_) => families.v4().is_some(),
                IpAddr::V6(_) => families.v6().is_some(),
            });
            *index == id.index && !stays && networks.iter().any(|it| it.contains(*address))
        };
        if addresses.iter().any(is_stale) {
            netlink::unless_gone(netlink::remove_link(&id).await)?;
            info!("removed {id}: it is of another backend, mode or network than this node's now");
        }
    }
    Ok(())
}

impl<A: CarriedFamily> TunnelDevice<A> {
    pub(super) fn new(tunnel: Tunnel, subnet: Prefix<A>, is_main: bool) -> Self {
        let (address, logged) = (subnet.network(), LogOnce::default());
        Self { tunnel, address, is_main, port: None, imposed_mtu_bytes: None, logged }
    }

    pub(super) fn mtu_bytes(&self, external: &ExternalInterface) -> u32 {
        match &self.tunnel {
            Tunnel::Vxlan(settings, _) => vxlan::mtu_bytes::<A>(settings, external),
            Tunnel::Ipip { .. } => ipip::mtu_bytes(external),
        }
    }

    /// The device's name.
    pub(super) fn name(&self) -> String {
        match &self.tunnel {
            Tunnel::Vxlan(settings, _) => vxlan::name::<A>(settings),
            Tunnel::Ipip { .. } => ipip::NAME.to_owned(),
        }
    }

    /// Its own address.
    pub(super) fn address(&self) -> A {
        self.address
    }

    /// Where its datagrams arrive, once the device is there.
    pub(super) fn tunnel(&self) -> Option<TunnelEnd> {
        match &self.tunnel {
            Tunnel::Vxlan(VxlanBackendConfig { vni, .. }, _) => {
                self.port.map(|port| TunnelEnd::Vxlan { port, vni: *vni })
            }
            Tunnel::Ipip { .. } => None,
        }
    }

    /// The port that its datagrams have, or will have.
    pub(super) fn port(&self) -> Option<u16> {
        match &self.tunnel {
            Tunnel::Vxlan(settings, _) => self.port.or(settings.port).or_else(vxlan::kernels_port),
            Tunnel::Ipip { .. } => None,
        }
    }

    /// Whether hosts of one link send to each other without it.
    fn is_direct(&self) -> bool {
        match &self.tunnel {
            Tunnel::Vxlan(settings, _) => settings.direct_routing,
            Tunnel::Ipip { direct_routing } => *direct_routing,
        }
    }

    /// The device in one line, for the log and the status.
    pub(super) fn describe(&self, external: &ExternalInterface) -> String {
        let address = A::own(external).map(|address| format!(" at {address}")).unwrap_or_default();
        let tunnel = match &self.tunnel {
            Tunnel::Vxlan(VxlanBackendConfig { vni, .. }, mac) => {
                let port = self.port.map_or_else(|| "unknown".to_owned(), |port| port.to_string());
                format!("vxlan id {vni} port {port}, hardware address {mac}")
            }
            Tunnel::Ipip { .. } => "IPv4 in IPv4".to_owned(),
        };
        format!(
            "{} mtu {} over {}{address}: {tunnel}{}",
            self.name(),
            self.mtu_bytes(external),
            external.name,
            if self.is_direct() { ", direct routing" } else { "" },
        )
    }

    /// Whether a device of its name may be taken over, or removed to make another, as flannel does.
    fn may_be_own(&self, found: &Link) -> bool {
        match &self.tunnel {
            Tunnel::Vxlan(..) => true,
            Tunnel::Ipip { .. } => found.ipip.is_some(),
        }
    }

    /// Why a device of its name cannot stay; `None` if it can.
    fn mismatch(&self, found: &Link, external: &ExternalInterface) -> Option<String> {
        match &self.tunnel {
            Tunnel::Vxlan(settings, _) => {
                let wanted = vxlan::vxlan::<A>(settings, external);
                vxlan::mismatch(&wanted, found, vxlan::kernels_port())
            }
            Tunnel::Ipip { .. } => ipip::mismatch(found, external),
        }
    }

    /// Makes sure that the device exists and is of the right kind, and gives it as it must be. A
    /// `listing` without a device that was made is read again.
    pub(super) async fn ensure(
        &mut self,
        host: &HostFollower,
        listing: &mut Listing,
        reporter: &Reporter,
    ) -> Result<Device<A>, NetlinkError> {
        let (external, name) = (host.external(), self.name());
        let (is_first, mtu_bytes) = (self.imposed_mtu_bytes.is_none(), self.mtu_bytes(external));
        let found = listing.links.iter().find(|link| link.id.name == name);
        let was_missing = found.is_none();
        let mut stays = found.filter(|link| self.may_be_own(link));
        if let Some(link) = stays
            && let Some(why) = self.mismatch(link, external)
        {
            warn!("{name} cannot stay as it is: {why}; making it again");
            netlink::remove_link(&link.id).await?;
            stays = None;
        }
        let is_new = stays.is_none();
        let link = match stays {
            Some(link) => link.clone(),
            None => match self.make(external).await {
                Ok(link) => link,
                Err(error) => {
                    self.report_failure(&error, reporter).await;
                    return Err(error);
                }
            },
        };
        if is_new || is_first {
            refuse_autoconfiguration(&link.id).await;
        }
        if is_new {
            // With an old device its routes went as well.
            *listing = host.read().await?;
            if !is_first && self.is_main {
                reporter.state(|state| state.is_up = false);
            }
        }
        if was_missing && !is_first {
            warn!("{name} was deleted by someone else; made again, with its peers");
            reporter.count(|done| done.repairs += 1);
        }
        let mac = match &self.tunnel {
            Tunnel::Vxlan(_, mac) => {
                if is_new || is_first {
                    vxlan::avoid_spoiled_checksums(&name, is_new);
                }
                Some(*mac)
            }
            Tunnel::Ipip { .. } => None,
        };
        self.port = link.vxlan.as_ref().and_then(|vxlan| vxlan.port);
        Ok(Device {
            link: link.id,
            address: self.address,
            mac,
            mtu_bytes: Some(mtu_bytes).filter(|_| self.imposed_mtu_bytes != Some(mtu_bytes)),
            is_ours_alone: true,
        })
    }

    /// Makes the device, switched off.
    async fn make(&self, external: &ExternalInterface) -> Result<Link, NetlinkError> {
        let (name, mtu_bytes) = (self.name(), self.mtu_bytes(external));
        let made = match &self.tunnel {
            Tunnel::Vxlan(settings, mac) => {
                let vxlan = vxlan::vxlan::<A>(settings, external);
                devices::add_vxlan(&name, &vxlan, *mac, mtu_bytes).await
            }
            Tunnel::Ipip { .. } => ipip::add(external, mtu_bytes).await,
        };
        if let Err(error) = made {
            // Perhaps somebody made one of this name a moment ago; the next comparison validates
            // it.
            let found = netlink::link_named(&name).await?.filter(|link| self.may_be_own(link));
            return found.filter(|_| error.is_already_there()).ok_or(error);
        }
        netlink::link_just_made(&name).await
    }

    /// Notes that the device has this MTU.
    pub(super) fn note_imposed(&mut self, to: u32, external: &ExternalInterface) {
        if let Some(from) = self.imposed_mtu_bytes.replace(to) {
            let (name, below) = (self.name(), &external.name);
            info!("the MTU of {name} went from {from} to {to}: it follows that of {below}");
        }
    }

    /// Without the device no packet flows. Another one may have its place: the kernel has one for
    /// each VNI, port and family.
    async fn report_failure(&mut self, error: &NetlinkError, reporter: &Reporter) {
        let name = self.name();
        let Ok(found) = netlink::link_named(&name).await else { return };
        if found.as_ref().is_some_and(|link| self.may_be_own(link)) {
            return;
        }
        if self.is_main {
            let why = format!("{name} cannot be made: {}", with_causes(error));
            reporter.state(|state| (state.is_up, state.wrong) = (false, Some(why)));
        }
        let advice = match &self.tunnel {
            Tunnel::Vxlan(settings, _) => error.is_already_there().then(|| vxlan::advice(settings)),
            Tunnel::Ipip { .. } => Some(ipip::advice(error, found.is_some())),
        };
        if let Some(advice) = advice {
            self.logged.once(&format!("{name} cannot be made: {advice}"), |text| warn!("{text}"));
        }
    }

    /// The ways to the hosts of `leases`, and why some of them can't be used.
    pub(super) async fn ways<'a>(
        &self,
        leases: impl Iterator<Item = &'a Lease> + Clone,
        link: &LinkId,
    ) -> (Ways<A>, Unusable) {
        let hosts = leases.clone().filter_map(A::peer);
        let (mut ways, unusable): (Ways<A>, _) = match &self.tunnel {
            Tunnel::Vxlan(..) => {
                let (usable, unusable) = resolve(leases);
                let way = |Vtep { subnet, host, mac }| {
                    (subnet, Way::tunnelled(subnet, host, link.clone(), mac))
                };
                (usable.into_iter().map(way).collect(), unusable)
            }
            Tunnel::Ipip { .. } => (ipip::ways(hosts.clone(), link), Unusable::new()),
        };
        if self.is_direct() {
            let usable = hosts.filter(|(subnet, _)| ways.contains_key(subnet)).collect();
            route_directly(usable, &mut ways, link).await;
        }
        (ways, unusable)
    }
}

/// Peers that the kernel reaches without a router need no tunnel.
async fn route_directly<A: CarriedFamily>(
    hosts: Vec<(Prefix<A>, A)>,
    ways: &mut Ways<A>,
    link: &LinkId,
) {
    let path = async |(subnet, host)| (subnet, host, netlink::path_to(host).await);
    for (subnet, host, path) in request_all(hosts, path).await {
        // A host without a path may get one; until then the tunnel is as good as anything.
        let Ok(path) = path else { continue };
        let index = path.interface_index;
        if path.is_plain && path.gateway.is_none() && index != link.index {
            let interface = LinkId { index, name: format!("if{index}") };
            ways.insert(subnet, Way::direct(subnet, host, interface));
        }
    }
}

/// The overlay has no routers that could advertise themselves, and nobody to tell of an address of
/// the link. Where the kernel has no IPv6 there is nothing to be kept from.
async fn refuse_autoconfiguration(link: &LinkId) {
    let path = format!("/proc/sys/net/ipv6/conf/{}/accept_ra", link.name);
    if let Err(error) = std::fs::write(&path, "0") {
        // As in a container that is not privileged. With 1, a host that forwards accepts none.
        match std::fs::read_to_string(&path) {
            Ok(text) if text.trim() == "2" => warn!(
                "{path} is 2 and cannot be set to 0 ({error}): whoever sends into the overlay can \
                 give this host addresses and routes; set it on the host, and \
                 net.ipv6.conf.default.accept_ra as well"
            ),
            Ok(_) | Err(_) => debug!("cannot set {path} to 0: {error}"),
        }
    }
    if let Err(error) = devices::keep_silent(link).await {
        debug!("{}", with_causes(&error));
    }
}

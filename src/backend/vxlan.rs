//! What is particular to the vxlan backend: its lease, the kernel's VXLAN devices, of which each
//! family has one, and which peers are reached through them.

mod data;
mod device;
mod owner;

use std::net::{Ipv4Addr, Ipv6Addr};

use tracing::{info, warn};

use crate::backend::error::StartResult;
use crate::backend::family::CarriedFamily;
use crate::backend::setup::addresses;
use crate::backend::status::{Reporter, Unusable};
use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::device::{features, kernel};
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::mtu::no_room;
use crate::host::netlink::{self, NetlinkError, request_all};
use crate::host::state::{LinkId, MacAddress};
use crate::host::tables::{Device, Way, Ways};
use crate::route::{Prefix, Prefixes};
use crate::status::TunnelEnd;

use self::data::{data, vtep_mac};
use self::device::{kernels_port, mismatch, overhead_bytes};
use self::owner::{Vtep, resolve};

pub(super) use self::owner::without_vtep;

const KIND: BackendKind = BackendKind::Vxlan;

/// What the devices are made with, of the families that nodes have.
#[derive(Debug, Clone, Copy)]
pub(super) struct VxlanReserved {
    settings: VxlanBackendConfig,
    mac_v4: Option<MacAddress>,
    mac_v6: Option<MacAddress>,
}

/// The VXLAN device of one family, which can be made.
#[derive(Debug)]
pub(super) struct VxlanDevice<A: CarriedFamily = Ipv4Addr> {
    settings: VxlanBackendConfig,
    mac: MacAddress,
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

/// Refuses an interface that leaves no sensible MTU.
pub(super) async fn prepare(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> StartResult<(LeaseAttributes, VxlanReserved)> {
    let settings = *settings;
    let mac_v4 = match external.v4() {
        Some(_) => Some(choose_mac::<Ipv4Addr>(&settings, external, former).await?),
        None => None,
    };
    let mac_v6 = match external.v6() {
        Some(_) => Some(choose_mac::<Ipv6Addr>(&settings, external, former).await?),
        None => None,
    };
    let attributes = LeaseAttributes {
        backend_data: mac_v4.map(|mac| data(settings.vni, mac)),
        backend_v6_data: mac_v6.map(|mac| data(settings.vni, mac)),
        ..addresses(KIND, external)
    };
    let VxlanBackendConfig { vni, port, gbp, learning, direct_routing, .. } = settings;
    info!(
        "VXLAN config: VNI={vni} Port={} GBP={gbp} Learning={learning} \
         DirectRouting={direct_routing}",
        port.unwrap_or(0)
    );
    if let Some(bytes) = settings.mtu_bytes.filter(|bytes| *bytes > external.mtu_bytes) {
        let (name, most) = (&external.name, external.mtu_bytes);
        warn!("Backend.MTU {bytes} is above the {most} of {name}; using {most}");
    }
    Ok((attributes, VxlanReserved { settings, mac_v4, mac_v6 }))
}

/// The hardware address of the device that can stay, else the one of the node's lease, so that
/// peers need not learn another one, else a new one.
async fn choose_mac<A: CarriedFamily>(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> StartResult<MacAddress> {
    if device::mtu_bytes::<A>(settings, external) < A::MTU_BYTES_MIN {
        let what = match settings.mtu_bytes.filter(|bytes| *bytes < external.mtu_bytes) {
            Some(bytes) => format!("Backend.MTU is {bytes}"),
            None => format!("the external interface has MTU {}", external.mtu_bytes),
        };
        return Err(no_room::<A>(&what, overhead_bytes::<A>()).into());
    }
    let found = netlink::link_named(&device::name::<A>(settings)).await?;
    let wanted = device::vxlan::<A>(settings, external);
    let kept = found
        .filter(|found| mismatch(&wanted, found, kernels_port()).is_none())
        .and_then(|found| found.mac);
    let published = former.filter(|former| former.backend_type.is(KIND)).and_then(vtep_mac::<A>);
    Ok(kept.or(published).unwrap_or_else(|| {
        let mut bytes = [0; 6];
        fastrand::fill(&mut bytes);
        MacAddress::locally_administered(bytes)
    }))
}

impl VxlanReserved {
    /// Whether hosts of one link send to each other without the tunnel.
    pub(super) fn is_direct(&self) -> bool {
        self.settings.direct_routing
    }

    /// The devices of the families that nodes have, for the own `subnets`. Those of others, which
    /// an earlier run left, go.
    pub(super) async fn devices(
        &self,
        subnets: Prefixes,
    ) -> Result<(Option<VxlanDevice>, Option<VxlanDevice<Ipv6Addr>>), NetlinkError> {
        let v4 = self.device(self.mac_v4.zip(subnets.v4()), true).await?;
        let v6 = self.device(self.mac_v6.zip(subnets.v6()), v4.is_none()).await?;
        Ok((v4, v6))
    }

    async fn device<A: CarriedFamily>(
        &self,
        of: Option<(MacAddress, Prefix<A>)>,
        is_main: bool,
    ) -> Result<Option<VxlanDevice<A>>, NetlinkError> {
        if let Some((mac, subnet)) = of {
            return Ok(Some(VxlanDevice::new(self.settings, mac, subnet, is_main)));
        }
        let left = netlink::link_named(&device::name::<A>(&self.settings)).await?;
        if let Some(link) = left.filter(|link| link.vxlan.is_some()) {
            netlink::remove_link(&link.id).await?;
            info!("removed {}: the network has no {} any more", link.id, A::NAME);
        }
        Ok(None)
    }
}

impl<A: CarriedFamily> VxlanDevice<A> {
    fn new(
        settings: VxlanBackendConfig,
        mac: MacAddress,
        subnet: Prefix<A>,
        is_main: bool,
    ) -> Self {
        let (address, logged) = (subnet.network(), LogOnce::default());
        Self { settings, mac, address, is_main, port: None, imposed_mtu_bytes: None, logged }
    }

    pub(super) fn mtu_bytes(&self, external: &ExternalInterface) -> u32 {
        device::mtu_bytes::<A>(&self.settings, external)
    }

    /// The device's name.
    pub(super) fn name(&self) -> String {
        device::name::<A>(&self.settings)
    }

    /// Its own address.
    pub(super) fn address(&self) -> A {
        self.address
    }

    /// Where its datagrams arrive, once the device is there.
    pub(super) fn tunnel(&self) -> Option<TunnelEnd> {
        self.port.map(|port| TunnelEnd::Vxlan { port, vni: self.settings.vni })
    }

    /// The port that its datagrams have, or will have.
    pub(super) fn port(&self) -> Option<u16> {
        self.port.or(self.settings.port).or_else(kernels_port)
    }

    /// The device in one line, for the log and the status.
    pub(super) fn describe(&self, external: &ExternalInterface) -> String {
        let settings = &self.settings;
        let port = self.port.map_or_else(|| "unknown".to_owned(), |port| port.to_string());
        let address = A::own(external).map(|address| format!(" at {address}")).unwrap_or_default();
        format!(
            "{} mtu {} over {}{address}: vxlan id {} port {port}, hardware address {}{}",
            self.name(),
            self.mtu_bytes(external),
            external.name,
            settings.vni,
            self.mac,
            if settings.direct_routing { ", direct routing" } else { "" },
        )
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
        let spec = device::vxlan::<A>(&self.settings, external);
        let found = listing.links.iter().find(|link| link.id.name == name);
        let (was_missing, mut stays) = (found.is_none(), found);
        if let Some(link) = found
            && let Some(why) = mismatch(&spec, link, kernels_port())
        {
            warn!("{name} cannot stay as it is: {why}; making it again");
            netlink::remove_link(&link.id).await?;
            stays = None;
        }
        let is_new = stays.is_none();
        let link = match stays {
            Some(link) => link.clone(),
            None => match device::make(&name, &spec, self.mac, mtu_bytes).await {
                Ok(link) => link,
                Err(error) => {
                    self.report_failure(&error, reporter).await;
                    return Err(error);
                }
            },
        };
        if is_new || is_first {
            device::refuse_autoconfiguration(&link.id).await;
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
        let release = kernel::upstream_release();
        if (is_new || is_first) && kernel::spoils_vxlan_checksums(&release) {
            avoid_spoiled_checksums(&name, is_new, &release);
        }
        self.port = link.vxlan.as_ref().and_then(|vxlan| vxlan.port);
        Ok(Device {
            link: link.id,
            address: self.address,
            mac: Some(self.mac),
            mtu_bytes: Some(mtu_bytes).filter(|_| self.imposed_mtu_bytes != Some(mtu_bytes)),
            is_ours_alone: true,
        })
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
        if !matches!(netlink::link_named(&name).await, Ok(None)) {
            return;
        }
        if self.is_main {
            let why = format!("{name} cannot be made: {}", with_causes(error));
            reporter.state(|state| (state.is_up, state.wrong) = (false, Some(why)));
        }
        if error.is_already_there() {
            let text = format!(
                "{name} cannot be made: another device has VNI {vni} and the same port, see \
                 `ip -d link show type vxlan`; remove it, or give one of them another VNI",
                vni = self.settings.vni
            );
            self.logged.once(&text, |text| warn!("{text}"));
        }
    }

    /// The ways to the hosts of `leases`, and why some of them can't be used.
    pub(super) async fn ways<'a>(
        &self,
        leases: impl Iterator<Item = &'a Lease>,
        link: &LinkId,
    ) -> (Ways<A>, Unusable) {
        let (usable, unusable) = resolve(leases);
        let way = |Vtep { subnet, host, mac }: &Vtep<A>| {
            (*subnet, Way::tunnelled(*subnet, *host, link.clone(), *mac))
        };
        let mut ways: Ways<A> = usable.iter().map(way).collect();
        if self.settings.direct_routing {
            let hosts = usable.iter().map(|vtep| (vtep.subnet, vtep.host)).collect();
            route_directly(hosts, &mut ways, link).await;
        }
        (ways, unusable)
    }
}

/// Kernel `release` corrupts checksums that a vxlan device leaves to be filled in later, where it
/// masquerades the packet: a new device gets no such packets. One that was there is left as it is;
/// somebody may have switched the offload on again because this kernel has the correction.
fn avoid_spoiled_checksums(name: &str, is_new: bool, release: &str) {
    let switched_off = is_new.then(|| features::switch(name, features::Switch::TransmitChecksum));
    let done = match switched_off {
        Some(Ok(())) => {
            format!("checksum offload of {name} is switched off, which costs throughput")
        }
        Some(Err(error)) => with_causes(&error),
        None => format!("{name} was there before and is left as it is"),
    };
    warn!(
        "kernel {release} may corrupt checksums of vxlan packets that it masquerades (fixed in 5.7 \
         and in stable releases of 2020): {done}; if connections take a minute to open, run \
         `ethtool -K {name} tx-checksum-ip-generic off`"
    );
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

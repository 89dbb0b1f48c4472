//! What is particular to the vxlan backend: its lease, the kernel's VXLAN device, and which peers
//! are reached through it.

mod checksum;
mod data;
mod device;
mod owner;

use tracing::{info, warn};

use crate::backend::setup::{Setup, SetupError};
use crate::backend::status::Reporter;
use crate::backend::tables::{Peer, Wanted};
use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::OVERLAY_MTU_BYTES_MIN;
use crate::host::netlink::{Netlink, NetlinkError, request_all};
use crate::host::state::{Address, LinkId, MacAddress};
use crate::route::Prefix;
use crate::status::TunnelEnd;

use self::data::{data, vtep_mac};
use self::device::{DeviceSpec, Found, kernels_port, mismatch};
use self::owner::{Resolved, resolve};

const KIND: BackendKind = BackendKind::Vxlan;

/// A device that can be made.
#[derive(Debug)]
pub(super) struct VxlanReserved {
    settings: VxlanBackendConfig,
    mac: MacAddress,
}

/// The VXLAN device of a running backend.
#[derive(Debug)]
pub(super) struct VxlanDevice {
    settings: VxlanBackendConfig,
    network: Prefix,
    subnet: Prefix,
    mac: MacAddress,
    /// The MTU that the device was last given.
    imposed_mtu_bytes: Option<u32>,
    /// The UDP port that the device has.
    port: Option<u16>,
    logged: LogOnce,
}

/// Refuses an interface that leaves no sensible MTU. A node publishes the hardware address of the
/// device that can stay, else the one of its lease, so that peers need not learn another one, else
/// a new one.
pub(super) async fn prepare(
    settings: &VxlanBackendConfig,
    external: &ExternalInterface,
    former: Option<&LeaseAttributes>,
) -> Result<(LeaseAttributes, VxlanReserved), SetupError> {
    if device::mtu_bytes(settings, external) < OVERLAY_MTU_BYTES_MIN {
        return Err(SetupError::NoRoom { external_bytes: external.mtu_bytes });
    }
    let netlink = Netlink::open()?;
    let found = netlink.link_named(&device::name(settings)).await?;
    let wanted = device::vxlan(settings, external);
    let kept = found
        .filter(|found| mismatch(&wanted, found, kernels_port()).is_none())
        .and_then(|found| found.mac);
    let published = former.filter(|former| former.backend_type.is(KIND)).and_then(vtep_mac);
    let mac = kept.or(published).unwrap_or_else(|| {
        let mut bytes = [0; 6];
        fastrand::fill(&mut bytes);
        MacAddress::locally_administered(bytes)
    });
    let data = Some(data(settings.vni, mac));
    let attributes = LeaseAttributes::of(KIND, external.public_address, data);
    Ok((attributes, VxlanReserved { settings: *settings, mac }))
}

impl VxlanReserved {
    /// Whether a peer's way depends on routes to anywhere.
    pub(super) fn goes_by_routes(&self) -> bool {
        self.settings.direct_routing
    }
}

impl VxlanDevice {
    /// Nothing is made yet.
    pub(super) fn new(reserved: VxlanReserved, setup: &Setup) -> Self {
        let VxlanReserved { settings, mac } = reserved;
        let VxlanBackendConfig { vni, port, gbp, learning, direct_routing, .. } = settings;
        info!(
            "VXLAN config: VNI={vni} Port={} GBP={gbp} Learning={learning} \
             DirectRouting={direct_routing}",
            port.unwrap_or(0)
        );
        let external = &setup.external;
        if let Some(bytes) = settings.mtu_bytes.filter(|bytes| *bytes > external.mtu_bytes) {
            let (name, most) = (&external.name, external.mtu_bytes);
            warn!("Backend.MTU {bytes} is above the {most} of {name}; using {most}");
        }
        Self {
            settings,
            network: setup.network,
            subnet: setup.subnet,
            mac,
            imposed_mtu_bytes: None,
            port: None,
            logged: LogOnce::default(),
        }
    }

    pub(super) fn mtu_bytes(&self, external: &ExternalInterface) -> u32 {
        device::mtu_bytes(&self.settings, external)
    }

    /// The device's name.
    pub(super) fn name(&self) -> String {
        device::name(&self.settings)
    }

    /// Where its datagrams arrive, once the device is there.
    pub(super) fn tunnel(&self) -> Option<TunnelEnd> {
        self.port.map(|port| TunnelEnd::Vxlan { port, vni: self.settings.vni })
    }

    /// The backend in one line, for the log and the status.
    pub(super) fn describe(&self, external: &ExternalInterface) -> String {
        let settings = &self.settings;
        let port = self.port.map_or_else(|| "unknown".to_owned(), |port| port.to_string());
        format!(
            "{} mtu {} over {} at {}: vxlan id {} port {port}, hardware address {}{}",
            device::name(settings),
            self.mtu_bytes(external),
            external.name,
            external.address,
            settings.vni,
            self.mac,
            if settings.direct_routing { ", direct routing" } else { "" },
        )
    }

    /// Makes sure that the device exists, has its address and is up.
    pub(super) async fn establish(
        &mut self,
        host: &HostFollower,
        addresses: &[Address],
        reporter: &Reporter,
    ) -> Result<Found, NetlinkError> {
        let (netlink, external) = (host.netlink(), host.external());
        let mtu_bytes = self.mtu_bytes(external);
        let spec = DeviceSpec {
            name: device::name(&self.settings),
            vxlan: device::vxlan(&self.settings, external),
            mac: self.mac,
            mtu_bytes,
        };
        let before = self.imposed_mtu_bytes;
        let impose_mtu = before != Some(mtu_bytes);
        let found = match device::establish(netlink, &spec, impose_mtu).await {
            Ok(found) => found,
            Err(error) => {
                self.report_failure(netlink, &spec, &error, reporter).await;
                return Err(error);
            }
        };
        if let Some(from) = before.filter(|_| impose_mtu) {
            let (name, below) = (&spec.name, &external.name);
            info!("the MTU of {name} went from {from} to {mtu_bytes}: it follows that of {below}");
        }
        if found.was_missing && before.is_some() {
            warn!("{} was deleted by someone else; made again, with its peers", spec.name);
            reporter.counters.repairs.add(1);
        }
        if found.is_new && before.is_some() {
            reporter.state(|state| state.is_up = false);
        }
        if found.is_new || before.is_none() {
            checksum::settle(&spec.name, found.is_new);
        }
        self.imposed_mtu_bytes = Some(mtu_bytes);
        self.port = found.link.vxlan.as_ref().and_then(|vxlan| vxlan.port);
        let address = self.subnet.network();
        device::switch_on(netlink, &found.link, addresses, self.network, address).await?;
        Ok(found)
    }

    /// Without the device no packet flows. Another one may have its place: the kernel has one for
    /// each VNI and port.
    async fn report_failure(
        &mut self,
        netlink: &Netlink,
        spec: &DeviceSpec,
        error: &NetlinkError,
        reporter: &Reporter,
    ) {
        let name = &spec.name;
        if !matches!(netlink.link_named(name).await, Ok(None)) {
            return;
        }
        let why = format!("{name} cannot be made: {}", with_causes(error));
        reporter.state(|state| (state.is_up, state.wrong) = (false, Some(why)));
        if error.is_already_there() {
            let text = format!(
                "{name} cannot be made: another device has VNI {vni} and the same port, see \
                 `ip -d link show type vxlan`; remove it, or give one of them another VNI",
                vni = spec.vxlan.vni
            );
            self.logged.once(&text, |text| warn!("{text}"));
        }
    }

    /// What the leases ask for, and why some of them can't be used.
    pub(super) async fn wanted<'a>(
        &self,
        netlink: &Netlink,
        leases: impl Iterator<Item = &'a Lease>,
        link: &LinkId,
    ) -> (Wanted, Vec<String>) {
        let Resolved { usable, unusable } = resolve(leases);
        let peers = usable.into_iter().map(|(lease, mac)| {
            let (subnet, host) = (lease.subnet, lease.attributes.public_ip);
            (subnet, Peer::tunnelled(subnet, host, link.clone(), mac))
        });
        let mut wanted: Wanted = peers.collect();
        if self.settings.direct_routing {
            route_directly(netlink, &mut wanted, link).await;
        }
        (wanted, unusable)
    }
}

/// Peers that the kernel reaches without a router need no tunnel.
async fn route_directly(netlink: &Netlink, wanted: &mut Wanted, link: &LinkId) {
    let hosts: Vec<_> = wanted.iter().map(|(subnet, peer)| (*subnet, peer.public_ip)).collect();
    let path = async |(subnet, host)| (subnet, host, netlink.path_to(host).await);
    for (subnet, host, path) in request_all(hosts, path).await {
        // A host without a path may get one; until then the tunnel is as good as anything.
        let Ok(path) = path else { continue };
        let index = path.interface_index;
        if path.gateway.is_none() && index != link.index {
            let interface = LinkId { index, name: format!("if{index}") };
            wanted.insert(subnet, Peer::direct(subnet, host, interface));
        }
    }
}

//! What is particular to the vxlan backend: its lease, the kernel's VXLAN device, and which peers
//! are reached through it.

mod data;
mod device;
mod owner;

use std::net::Ipv4Addr;

use tracing::{info, warn};

use crate::backend::error::StartResult;
use crate::backend::status::Reporter;
use crate::backend_kind::BackendKind;
use crate::config::network::VxlanBackendConfig;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::device::{features, kernel};
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::listing::Listing;
use crate::host::mtu::{OVERLAY_MTU_BYTES_MIN, no_room};
use crate::host::netlink::{self, NetlinkError, request_all};
use crate::host::state::{LinkId, MacAddress};
use crate::host::tables::{Way, Ways};
use crate::route::Prefix;
use crate::status::TunnelEnd;

use self::data::{data, vtep_mac};
use self::device::{kernels_port, mismatch};
use self::owner::resolve;

const KIND: BackendKind = BackendKind::Vxlan;

/// The VXLAN device, which can be made.
#[derive(Debug)]
pub(super) struct VxlanDevice {
    pub(super) settings: VxlanBackendConfig,
    pub(super) mac: MacAddress,
    /// The UDP port that it has.
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
) -> StartResult<(LeaseAttributes, VxlanDevice)> {
    if device::mtu_bytes(settings, external) < OVERLAY_MTU_BYTES_MIN {
        return Err(no_room(external.mtu_bytes, KIND).into());
    }
    let found = netlink::link_named(&device::name(settings)).await?;
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
    let settings = *settings;
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
    Ok((attributes, VxlanDevice { settings, mac, port: None, logged: LogOnce::default() }))
}

impl VxlanDevice {
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

    /// The port that its datagrams have, or will have.
    pub(super) fn port(&self) -> Option<u16> {
        self.port.or(self.settings.port).or_else(kernels_port)
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

    /// Makes sure that the device exists and is of the right kind. `is_first` is for a start; a
    /// `listing` without a device that was made is read again.
    pub(super) async fn ensure(
        &mut self,
        host: &HostFollower,
        listing: &mut Listing,
        is_first: bool,
        reporter: &Reporter,
    ) -> Result<LinkId, NetlinkError> {
        let (external, name) = (host.external(), self.name());
        let spec = device::vxlan(&self.settings, external);
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
            None => match device::make(&name, &spec, self.mac, self.mtu_bytes(external)).await {
                Ok(link) => link,
                Err(error) => {
                    self.report_failure(&error, reporter).await;
                    return Err(error);
                }
            },
        };
        if is_new {
            // With an old device its routes went as well.
            *listing = host.read().await?;
            if !is_first {
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
        Ok(link.id)
    }

    /// Without the device no packet flows. Another one may have its place: the kernel has one for
    /// each VNI and port.
    async fn report_failure(&mut self, error: &NetlinkError, reporter: &Reporter) {
        let name = self.name();
        if !matches!(netlink::link_named(&name).await, Ok(None)) {
            return;
        }
        let why = format!("{name} cannot be made: {}", with_causes(error));
        reporter.state(|state| (state.is_up, state.wrong) = (false, Some(why)));
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
    ) -> (Ways, Vec<String>) {
        let (usable, unusable) = resolve(leases);
        let host = |lease: &Lease| Some((lease.v4()?, lease.attributes.public_ip));
        let hosts = usable.iter().filter_map(|(lease, _)| host(lease));
        let hosts: Vec<_> = hosts.collect();
        let ways = usable.into_iter().filter_map(|(lease, mac)| {
            let (subnet, host) = host(lease)?;
            Some((subnet, Way::tunnelled(subnet, host, link.clone(), mac)))
        });
        let mut ways: Ways = ways.collect();
        if self.settings.direct_routing {
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
async fn route_directly(hosts: Vec<(Prefix, Ipv4Addr)>, ways: &mut Ways, link: &LinkId) {
    let path = async |(subnet, host)| (subnet, host, netlink::path_to(host).await);
    for (subnet, host, path) in request_all(hosts, path).await {
        // A host without a path may get one; until then the tunnel is as good as anything.
        let Ok(path) = path else { continue };
        let index = path.interface_index;
        if path.gateway.is_none() && index != link.index {
            let interface = LinkId { index, name: format!("if{index}") };
            ways.insert(subnet, Way::direct(subnet, host, interface));
        }
    }
}

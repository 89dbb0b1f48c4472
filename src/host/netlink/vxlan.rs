//! Makes VXLAN devices.

use rtnetlink::LinkVxlan;
use rtnetlink::packet_route::RouteNetlinkMessage;

use super::{Netlink, Result};
use crate::host::state::{MacAddress, Vxlan};

impl Netlink {
    /// Makes a VXLAN device, switched off.
    pub async fn add_vxlan(
        &self,
        name: &str,
        vxlan: &Vxlan,
        mac: MacAddress,
        mtu_bytes: u32,
    ) -> Result {
        let mut builder = LinkVxlan::new(name, vxlan.vni)
            .dev(vxlan.parent_index)
            .learning(vxlan.learning)
            .address(mac.0.to_vec())
            .mtu(mtu_bytes);
        if let Some(local) = vxlan.local {
            builder = builder.local(local);
        }
        if let Some(port) = vxlan.port {
            builder = builder.port(port);
        }
        if vxlan.gbp {
            builder = builder.gbp();
        }
        let request = RouteNetlinkMessage::NewLink(builder.build());
        self.add(format!("make the vxlan device {name}"), request).await
    }
}

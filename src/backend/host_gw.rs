//! What is particular to the host-gw backend: its lease, and a route to each peer's subnet by way
//! of its host.

use crate::backend::error::{StartError, StartResult};
use crate::backend::setup::addresses;
use crate::backend_kind::BackendKind;
use crate::control::lease::LeaseAttributes;
use crate::host::interface::{ExternalAddress, ExternalInterface};
use crate::host::state::{KernelFamily, LinkId};
use crate::host::tables::{Way, Ways};
use crate::route::{IpAddress, Prefix};

/// What a host-gw node publishes.
pub(super) fn introduce(external: &ExternalInterface) -> StartResult<LeaseAttributes> {
    is_its_own(external.v4())?;
    is_its_own(external.v6())?;
    Ok(addresses(BackendKind::HostGw, external))
}

fn is_its_own<A: IpAddress>(addresses: Option<ExternalAddress<A>>) -> StartResult {
    match addresses {
        Some(ExternalAddress { address, public_address }) if address != public_address => {
            let [address, public_address] = [address, public_address].map(Into::into);
            Err(StartError::NotTheInterfacesAddress { address, public_address })
        }
        Some(_) | None => Ok(()),
    }
}

/// The routes to the subnets of `hosts` over `external`.
pub(super) fn ways<A: KernelFamily>(
    hosts: impl Iterator<Item = (Prefix<A>, A)>,
    external: &ExternalInterface,
) -> Ways<A> {
    let interface = LinkId { index: external.index, name: external.name.clone() };
    hosts.map(|(subnet, host)| (subnet, Way::direct(subnet, host, interface.clone()))).collect()
}

/// What helps against a refusal.
pub(super) fn advice(external: &ExternalInterface) -> String {
    format!(
        "host-gw needs every host on the same link as {}; use a backend with a tunnel for others",
        external.name
    )
}

/// The backend in one line, for the log and the status.
pub(super) fn describe(external: &ExternalInterface) -> String {
    format!("host-gw: routes over {}, mtu {}", external.name, external.mtu_bytes)
}

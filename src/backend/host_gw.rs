//! What is particular to the host-gw backend: its lease, and a route to each peer's subnet by way
//! of its host.

use crate::backend::error::{StartError, StartResult};
use crate::backend_kind::BackendKind;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::host::interface::ExternalInterface;
use crate::host::state::LinkId;
use crate::host::tables::{Way, Ways};

/// What a host-gw node publishes.
pub(super) fn introduce(external: &ExternalInterface) -> StartResult<LeaseAttributes> {
    let ExternalInterface { address, public_address, .. } = *external;
    if address != public_address {
        return Err(StartError::NotTheInterfacesAddress { address, public_address });
    }
    Ok(LeaseAttributes::of(BackendKind::HostGw, public_address, None))
}

/// The routes of `leases` over `external`.
pub(super) fn ways<'a>(
    leases: impl Iterator<Item = &'a Lease>,
    external: &ExternalInterface,
) -> Ways {
    let interface = LinkId { index: external.index, name: external.name.clone() };
    let way = |lease: &Lease| {
        let (subnet, host) = (lease.v4()?, lease.attributes.public_ip);
        Some((subnet, Way::direct(subnet, host, interface.clone())))
    };
    leases.filter_map(way).collect()
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

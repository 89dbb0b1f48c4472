//! What is particular to the host-gw backend: its lease, and a route to each peer's subnet by way
//! of its host.

use crate::backend::setup::SetupError;
use crate::backend::tables::{Peer, Wanted};
use crate::backend_kind::BackendKind;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::host::interface::ExternalInterface;
use crate::host::state::LinkId;

/// What a host-gw node publishes.
pub(super) fn introduce(external: &ExternalInterface) -> Result<LeaseAttributes, SetupError> {
    let ExternalInterface { address, public_address, .. } = *external;
    if address != public_address {
        return Err(SetupError::NotTheInterfacesAddress { address, public_address });
    }
    Ok(LeaseAttributes::of(BackendKind::HostGw, public_address, None))
}

/// The routes of `leases` over `external`.
pub(super) fn wanted<'a>(
    leases: impl Iterator<Item = &'a Lease>,
    external: &ExternalInterface,
) -> Wanted {
    let interface = LinkId { index: external.index, name: external.name.clone() };
    let peer = |lease: &Lease| {
        let host = lease.attributes.public_ip;
        (lease.subnet, Peer::direct(lease.subnet, host, interface.clone()))
    };
    leases.map(peer).collect()
}

/// The backend in one line, for the log and the status.
pub(super) fn describe(external: &ExternalInterface) -> String {
    format!("host-gw: routes over {}, mtu {}", external.name, external.mtu_bytes)
}

//! The udp backend: a TUN device, tunnel sockets, workers between them, and a route table made of
//! the other nodes' leases.

mod fallback;
mod families;
pub(super) mod kernel_plane;
mod open;
mod owner;
mod pacing;
mod paths;
mod peers;
mod prober;
mod source_ports;
mod tun_device;
mod tunnel;
mod unresolved;

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;

use crate::backend::error::StartResult;
use crate::backend::handover::Handover;
use crate::backend::setup::Setup;
use crate::backend::status::{Taken, View, note_ignored};
use crate::backend_kind::BackendKind;
use crate::control::changes::next_value;
use crate::control::lease::Peers;
use crate::host::netlink::NetlinkError;
use crate::route::{Prefixes, Published, Table};

use self::kernel_plane::KernelPlane;
use self::peers::next_table;
use self::tun_device::clear_kept;
use self::tunnel::Tunnel;

pub(crate) use self::kernel_plane::pair_names;
pub use self::open::UdpReserved;
pub(super) use self::open::reserve;
pub(crate) use self::tun_device::remove_kept;

/// A running udp backend.
pub struct UdpBackend {
    tunnel: Tunnel,
    kernel_plane: KernelPlane,
    routes: Published,
    /// Tells of each published table.
    tables: watch::Sender<()>,
    handover: Handover,
}

impl UdpBackend {
    /// Configures what was reserved, and starts the workers.
    pub async fn start(setup: Setup, reserved: UdpReserved) -> StartResult<Self> {
        let UdpReserved { settings, tunnel, fast_path } = reserved;
        let routes = Published::new(Table::provisional());
        let handover = setup.handover.clone();
        // What the programs count, if there are any, first: tunnel and programs go by it.
        let counts = fast_path.as_ref().ok().map(|fast_path| Arc::clone(&fast_path.counts));
        let taken = Arc::new(Taken::new(counts));
        let tunnel = Tunnel::start(&setup, settings, tunnel, routes.clone(), taken).await?;
        let tables = watch::Sender::default();
        let kernel_plane = KernelPlane::new(fast_path, tunnel.kernel_inputs(tables.subscribe()));
        Ok(Self { tunnel, kernel_plane, routes, tables, handover })
    }

    pub(super) fn view(&self) -> View {
        self.tunnel.view(self.kernel_plane.state.subscribe())
    }

    /// Ends everything, though `--keep-tunnel` was given: the subnet is not this node's any more.
    pub(super) fn let_go(&mut self) {
        self.kernel_plane.let_go();
        self.tunnel.let_go();
    }

    /// Follows the leases, and rebuilds what breaks; neither waits for the other. Runs until it is
    /// dropped, which stops the workers and removes the device, unless that is kept.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let Self { tunnel, kernel_plane, routes, tables, handover } = self;
        // Of its family, and with this port, are the peers'; the address itself may change.
        let underlay = tunnel.address();
        let follow_leases = async {
            let mut ignored = 0;
            loop {
                let leases = next_value(&mut leases).await;
                note_ignored(&mut ignored, &leases, BackendKind::Udp);
                routes.table.publish(next_table(&routes.table.load(), &leases, underlay));
                tables.send_replace(());
                handover.is_carrying();
            }
        };
        tokio::select! {
            never = follow_leases => never,
            never = tunnel.run() => never,
            never = kernel_plane.run() => never,
        }
    }
}

/// Removes the devices that an earlier weftd with this backend has kept for `network`, with their
/// pairs and filters: they are in another backend's way.
pub(super) async fn remove_leftovers(network: Prefixes) -> Result<(), NetlinkError> {
    clear_kept(|owner| owner.network == network).await
}

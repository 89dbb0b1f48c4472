//! The udp backend: a TUN device, tunnel sockets, workers between them, and a route table made of
//! the other nodes' leases.

mod error;
mod fallback;
mod open;
mod pacing;
mod paths;
mod peers;
mod prober;
mod team;
mod tunnel;

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::watch;

use crate::backend::setup::Setup;
use crate::backend::status::View;
use crate::config::network::UdpBackendConfig;
use crate::control::lease::Peers;
use crate::route::{Published, Table};

use self::peers::PeerSet;
use self::tunnel::Tunnel;

pub use self::error::UdpError;
pub use self::open::UdpReserved;
pub(super) use self::open::reserve;

/// A running udp backend.
pub struct UdpBackend {
    tunnel: Tunnel,
    follower: LeaseFollower,
}

/// The routes, which follow the leases.
struct LeaseFollower {
    port: u16,
    routes: Published,
    peers: PeerSet,
}

impl UdpBackend {
    /// Configures what was reserved, and starts the workers.
    pub async fn start(
        setup: Setup,
        settings: UdpBackendConfig,
        reserved: UdpReserved,
    ) -> Result<Self, UdpError> {
        let routes = Published::new(Table::provisional());
        let follower = LeaseFollower {
            port: settings.port,
            routes: routes.clone(),
            peers: PeerSet::default(),
        };
        Ok(Self { tunnel: Tunnel::start(&setup, settings, reserved, routes).await?, follower })
    }

    pub(super) fn view(&self) -> View {
        self.tunnel.view()
    }

    /// Follows the leases, and rebuilds what breaks; neither waits for the other. Runs until it is
    /// dropped, which stops the workers and removes the device.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let Self { tunnel, follower } = self;
        tokio::select! {
            never = follower.run(leases) => never,
            never = tunnel.run() => never,
        }
    }
}

impl LeaseFollower {
    async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        while leases.changed().await.is_ok() {
            let peers = Arc::clone(&leases.borrow_and_update());
            self.peers.update(&peers, self.port);
            self.routes.publish(self.peers.table());
        }
        // The control plane has ended; routes stay as they were.
        std::future::pending().await
    }
}

//! What the backend does when the interface beneath it changes: the overlay's MTU follows, and so
//! does the tunnel's address; and when a path to a peer turns out to be narrower.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::{info, warn};

use crate::control::lease::LeaseAttributes;
use crate::failure::with_causes;
use crate::host::interface::ExternalInterface;
use crate::host::mtu::{MtuError, followed_mtu_bytes};
use crate::host::netlink::Netlink;
use crate::host::underlay::{Underlay, UnderlayWatch};
use crate::route::Prefix;

use super::take_over::bind_sockets;
use super::{Keeper, UdpError};

/// Paths that one change logs before it sums up: an uplink that became narrow is one piece of news.
const PATHS_LOGGED_MAX: usize = 8;

impl Keeper {
    /// The tunnel's address is gone: takes the next one of the same interface, if it has one.
    pub(super) async fn look_for_address(&mut self) {
        let before = &self.setup.external;
        let look = self.next_address.look(&self.netlink, before);
        let Some(found) = look.await else { return };
        let (name, from, to) = (before.name.clone(), before.address, found.address);
        if let Err(error) = self.move_to(found) {
            return self.next_address.complain(&format!(
                "the address of {name} went from {from} to {to}, but the tunnel cannot follow, \
                 trying on: {}",
                with_causes(&error)
            ));
        }
        self.rebuild(&format!("the address of {name} went from {from} to {to}")).await;
    }

    /// Binds the sockets of the next workers, and tells the peers where they are.
    fn move_to(&mut self, external: ExternalInterface) -> Result<(), UdpError> {
        let address = SocketAddrV4::new(external.address, self.setup.settings.port);
        let sockets = bind_sockets(address, self.setup.offload, self.worker_count)?;
        for (seat, socket) in self.seats.iter_mut().zip(sockets) {
            seat.socket = Arc::new(socket);
        }
        self.underlay.turn_to(external.address);
        let attributes = LeaseAttributes::udp(external.public_address);
        self.setup.external = external;
        self.attributes.send_if_modified(|said| {
            let differs = *said != attributes;
            *said = attributes;
            differs
        });
        Ok(())
    }

    /// Fits the overlay to what the interface beneath it has become.
    pub(super) async fn follow(&mut self, underlay: Underlay) {
        let before = std::mem::replace(&mut self.known, underlay);
        self.setup.external.name.clone_from(&self.known.name);
        self.setup.external.mtu_bytes = self.known.mtu_bytes;
        let Underlay { name, mtu_bytes: external_bytes } = &self.known;
        let ceiling_bytes = match self.ceiling_bytes() {
            Ok(ceiling_bytes) => ceiling_bytes,
            Err(error) => {
                warn!("the overlay keeps its MTU of {}: {}", self.mtu_bytes, with_causes(&error));
                return;
            }
        };
        self.prober.set_ceiling(ceiling_bytes);
        let mtu_bytes = ceiling_bytes;
        if mtu_bytes == self.mtu_bytes {
            self.tell_is_up();
            return;
        }
        // Before the device: what it lets through must not be too long for a worker, which would
        // tell pods of an MTU that is no more.
        self.workers_mtu_bytes.store(mtu_bytes, Ordering::Relaxed);
        let device = self.device_name().to_owned();
        match self.plane.overlay.follow_mtu(mtu_bytes).await {
            Ok(true) => info!(
                "the MTU of {name} went from {} to {external_bytes}, and that of {device} follows \
                 from {} to {mtu_bytes}; pods that are there already keep theirs",
                before.mtu_bytes, self.mtu_bytes
            ),
            Ok(false) => warn!(
                "the MTU of {name} went from {} to {external_bytes}, so {mtu_bytes} would suit \
                 {device}, but someone else set its MTU; left as it is",
                before.mtu_bytes
            ),
            Err(error) => {
                warn!(
                    "{device} cannot follow the MTU of {name}, trying again: {}",
                    with_causes(&error)
                );
                self.known = before;
                self.listen_again(&error).await;
                return;
            }
        }
        self.mtu_bytes = mtu_bytes;
        self.tell_is_up();
    }

    /// The largest MTU of the overlay that the interface beneath it and the configuration allow.
    fn ceiling_bytes(&self) -> Result<u16, MtuError> {
        followed_mtu_bytes(self.known.mtu_bytes, self.setup.settings.mtu_bytes)
    }

    /// Gives the subnets behind narrow paths, and no others, routes with an MTU of their own.
    pub(super) async fn follow_paths(&mut self) {
        let limits = self.prober.limits().clone();
        let news = self.news_of_paths(&limits);
        if let Err(error) = self.plane.overlay.limit_paths(limits).await {
            let device = self.device_name();
            warn!("the routes of {device} cannot follow, trying again: {}", with_causes(&error));
            self.prober.tell_again();
            return self.listen_again(&error).await;
        }
        news.iter().take(PATHS_LOGGED_MAX).for_each(|line| warn!("{line}"));
        if let more @ 1.. = news.len().saturating_sub(PATHS_LOGGED_MAX) {
            warn!("{more} more paths changed; `ip route show dev {}` has all", self.device_name());
        }
    }

    /// What differs between the paths that are limited and those that shall be, for the log.
    fn news_of_paths(&self, limits: &BTreeMap<Prefix, u16>) -> Vec<String> {
        let before = &self.plane.overlay.desired().path_mtus;
        let (table, mtu_bytes, interface) = (self.routes.load(), self.mtu_bytes, &self.known.name);
        let peer = |subnet: &Prefix| table.lookup(subnet.network()).map(|peer| peer.address);
        let changed = limits.iter().filter(|(subnet, bytes)| before.get(*subnet) != Some(bytes));
        let narrow = changed.filter_map(|(subnet, bytes)| {
            let peer = peer(subnet)?;
            Some(format!(
                "packets to {peer} of more than {bytes} bytes get lost: that path is narrower than \
                 {interface}; the route to {subnet} has the MTU {bytes} now, all others keep \
                 {mtu_bytes}; if most paths are so, set MTU in the Backend of the network \
                 configuration"
            ))
        });
        let ended = before.keys().filter(|subnet| !limits.contains_key(*subnet));
        let wide = ended.filter_map(|subnet| {
            let peer = peer(subnet)?;
            Some(format!(
                "the path to {peer} takes {mtu_bytes} bytes again: {subnet} needs no MTU of its own"
            ))
        });
        narrow.chain(wide).collect()
    }

    /// Goes on over another connection to the kernel, if one can be had.
    pub(super) fn reopen_netlink(&mut self) -> bool {
        let address = self.setup.external.address;
        let reopened = Netlink::open().and_then(|netlink| {
            let underlay = UnderlayWatch::new(netlink.clone(), address)?;
            let events = Netlink::events()?.only_about(&[self.setup.network]);
            Ok((events, underlay, netlink))
        });
        match reopened {
            Ok((events, underlay, netlink)) => {
                self.plane.overlay.use_netlink(netlink.clone());
                (self.events, self.underlay, self.netlink) = (events, underlay, netlink);
                true
            }
            Err(error) => {
                warn!("cannot open the kernel's network state again: {}", with_causes(&error));
                false
            }
        }
    }
}

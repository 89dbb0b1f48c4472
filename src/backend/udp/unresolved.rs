//! Finds peers in use whose hosts answer no request for their hardware address, so that workers
//! send them nothing, and goes on asking for it in their place.
//!
//! What is sent to such a host waits in the send buffer for its answer, up to three seconds of it,
//! and a pod that floods some of them leaves the others no room. That the kernel asks is no reason
//! to suspect a host: only who leaves an echo unanswered, too, is looked up.

use std::collections::BTreeSet;
use std::future::pending;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tracing::debug;

use crate::failure::with_causes;
use crate::host::netlink::events::Events;
use crate::host::netlink::neighbours::{self, use_neighbour};
use crate::host::netlink::path_of_datagram;
use crate::route::Published;

/// Between two looks at the neighbours at least: the kernel asks once a second, and a host that
/// came back is not to wait for much more than that.
const PERIOD: Duration = Duration::from_millis(50);

/// A table of thousands takes milliseconds to list: no more than a hundredth of the time.
const PERIOD_PER_LISTING: u32 = 100;

/// How often it is asked whether a host that is known to be unresolved is still reached without a
/// router: who does not answer echoes would never be known to have moved behind one.
const ON_LINK_PERIOD: Duration = Duration::from_secs(1);

/// Neighbours that one look has asked again: each takes a system call. The kernel asks three times
/// before it gives up, so 4,000 hosts that are down at once are too many.
const ASKED_MAX: usize = 64;

/// The hosts that are known to be unresolved.
#[derive(Default)]
pub(super) struct Unresolved {
    hosts: BTreeSet<IpAddr>,
    /// While there are any, what tells that one of them answers, or that the kernel gave it up.
    events: Option<Events>,
    next_look: Option<Instant>,
    next_on_link: Option<Instant>,
}

impl Unresolved {
    /// Looks whether the `suspects` are neighbours without an answer, behind the interface numbered
    /// `interface`, and publishes those that are. Cancel-safe.
    pub(super) async fn look(
        &mut self,
        suspects: BTreeSet<IpAddr>,
        tunnel: SocketAddr,
        interface: u32,
        routes: &Published,
    ) {
        let now = Instant::now();
        // Whoever answered an echo is there, whenever the next look is.
        let still = self.hosts.intersection(&suspects).copied().collect();
        self.settle(still, routes);
        if suspects.is_empty() || self.next_look.is_some_and(|at| now < at) {
            return;
        }
        let listed = neighbours::unresolved(interface, tunnel.ip()).await;
        self.next_look = Some(now + PERIOD.max(now.elapsed() * PERIOD_PER_LISTING));
        let listed = listed.unwrap_or_else(|error| {
            debug!("which neighbours answer is not known: {}", with_causes(&error));
            Default::default()
        });
        let mut hosts = BTreeSet::new();
        let mut asked = 0;
        let (start, are_all_asked) = (Instant::now(), self.next_on_link.is_none_or(|at| now >= at));
        for (host, has_given_up) in listed {
            let is_known = !are_all_asked && self.hosts.contains(&host);
            if !suspects.contains(&host) || !(is_known || is_on_link(tunnel, host, interface).await)
            {
                continue;
            }
            hosts.insert(host);
            if has_given_up && asked < ASKED_MAX {
                asked += 1;
                if let Err(error) = use_neighbour(interface, host).await {
                    // Then packets have to have it asked.
                    debug!("{}", with_causes(&error));
                    hosts.remove(&host);
                }
            }
        }
        if are_all_asked {
            let pause = ON_LINK_PERIOD.max(start.elapsed() * PERIOD_PER_LISTING);
            self.next_on_link = Some(now + pause);
        }
        self.settle(hosts, routes);
    }

    /// Waits until a neighbour has changed and a look is due, for ever while all are resolved.
    /// Cancel-safe: what an event that is lost so told, the next round finds.
    pub(super) async fn changed(&mut self) {
        let Some(events) = &mut self.events else { return pending().await };
        if let Err(error) = events.changed_at_once().await {
            debug!("neighbours are looked at less often: {}", with_causes(&error));
            self.events = None;
        }
        let due = self.next_look.map(|at| at.saturating_duration_since(Instant::now()));
        sleep(due.unwrap_or_default()).await;
    }

    fn settle(&mut self, hosts: BTreeSet<IpAddr>, routes: &Published) {
        if self.hosts != hosts {
            self.hosts = hosts;
            self.events = match self.events.take() {
                _ if self.hosts.is_empty() => None,
                None => Events::of_neighbours().ok(),
                events => events,
            };
            let table = routes.table.load();
            routes.unresolved.publish(self.hosts.iter().map(|it| table.host_key(*it)).collect());
        }
    }
}

/// Whether datagrams to the host go to itself and not to a router. An entry may be of a time when
/// they did.
async fn is_on_link(tunnel: SocketAddr, host: IpAddr, interface: u32) -> bool {
    let path = path_of_datagram(tunnel, SocketAddr::new(host, tunnel.port())).await;
    path.is_ok_and(|path| path.gateway.is_none() && path.interface_index == interface)
}

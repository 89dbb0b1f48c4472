//! Follows the host's network: waits for changes that the kernel reports, lists links, addresses
//! and routes, and keeps the external interface up to date, its next address included. Owns the
//! subscription to the kernel's events and replaces it when it breaks. Edits nothing.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::config::options::InterfaceOptions;
use crate::failure::{LogOnce, with_causes};
use crate::host::interface::{
    ExternalAddress, ExternalInterface, InterfaceError, look, usable_addresses,
};
use crate::host::listing::Listing;
use crate::host::netlink::events::Events;
use crate::host::netlink::{self, NetlinkError};
use crate::host::state::{KernelFamily, Link};
use crate::route::{Families, Prefix};

/// How long the external interface may be without its address before the next one is taken:
/// whoever replaces it removes the old one first. Also how often it is then looked for.
const AWAY: Duration = Duration::from_millis(300);

/// How long an address has to have been beside the one in use to be taken for an address of a
/// service, such as a virtual one, and not for the next one; and how long such an address is not
/// taken, for its service may leave with it.
const STEADY: Duration = Duration::from_secs(10);

/// Pauses before a failure is retried, doubled each time. The first is half of the second within
/// which a repair is promised.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// On a host with a whole internet routing table a listing takes long, and routes change all the
/// time. After each reconciliation this many times its duration passes before the next one, so that
/// they never use more than a fifth of a processor, but no more than half a second.
const REST_FACTOR: u32 = 4;
const REST_MAX: Duration = Duration::from_millis(500);

/// What to follow.
#[derive(Debug, Clone)]
pub struct Following {
    /// The external interface.
    pub external: ExternalInterface,
    /// How it was found, to find its next address.
    pub interface: InterfaceOptions,
    /// Whether its next address is taken.
    pub follow_address: bool,
    /// Routes to these networks are listed.
    pub networks: Vec<Prefix>,
    /// The same of IPv6.
    pub networks_v6: Vec<Prefix<Ipv6Addr>>,
    /// Whether changes of routes to elsewhere matter, too.
    pub all_route_events: bool,
    /// The longest time between two listings, which find what a lost event would have reported.
    pub period: Duration,
}

/// Follows the host's network for one backend.
pub struct HostFollower {
    following: Following,
    events: Events,
    /// Since when no link has had the external interface's address.
    away_since: Option<Instant>,
    /// Links that had its address too while it had it, such as `kube-ipvs0`: they lead nowhere.
    doubles: Vec<u32>,
    /// The interface's other addresses while it had its own, with when they were first seen.
    beside: BTreeMap<IpAddr, Instant>,
    /// What was left for one of these, to return to it.
    left: Option<ExternalInterface>,
    /// The last listing.
    begun: Instant,
    /// No event is taken before this.
    rest_until: Instant,
    /// What the external interface lacks, if its address is not there and none is taken in its
    /// place.
    lost: Option<String>,
    /// Since when the IPv6 address that peers send to is not usable.
    v6_away_since: Option<Instant>,
    /// The next listing, events or not.
    due: Instant,
    retry: Duration,
    logged: LogOnce,
    logged_address: LogOnce,
    logged_carrier: LogOnce,
    had_carrier: bool,
}

impl HostFollower {
    /// Follows from now on: what changes from here on is in a later listing.
    pub fn new(following: Following) -> netlink::Result<Self> {
        // In this order: a change between listing and subscription would be lost.
        let events = subscribe(&following)?;
        let now = Instant::now();
        Ok(Self {
            following,
            events,
            away_since: None,
            doubles: Vec::new(),
            beside: BTreeMap::new(),
            left: None,
            lost: None,
            v6_away_since: None,
            begun: now,
            rest_until: now,
            due: now,
            retry: RETRY.0,
            logged: LogOnce::default(),
            logged_address: LogOnce::default(),
            logged_carrier: LogOnce::default(),
            had_carrier: true,
        })
    }

    /// The external interface at the last listing.
    pub fn external(&self) -> &ExternalInterface {
        &self.following.external
    }

    /// Whether no link has had the external interface's address for a moment: most likely it is
    /// being replaced.
    pub fn is_briefly_away(&self) -> bool {
        self.away_since.is_some_and(|since| since.elapsed() < AWAY)
    }

    /// That the external interface's address is gone for longer than that, if no other was taken in
    /// its place, and what is waited for.
    pub fn lost_address(&self) -> Option<&String> {
        self.lost.as_ref()
    }

    /// The same of the IPv6 address that peers send to beside the one of IPv4, unless that is
    /// `--public-ipv6`.
    pub fn lost_v6_address(&self) -> Option<String> {
        let external = &self.following.external;
        external.v4()?;
        let v6 = external.v6().filter(|v6| v6.address == v6.public_address)?;
        self.v6_away_since.filter(|since| since.elapsed() >= AWAY)?;
        Some(format!(
            "{} has lost its IPv6 address {}, to which peers send, or it must not be used any \
             more: give it back, or the interface another one, which is taken unless \
             --follow-address=false",
            external.name, v6.address
        ))
    }

    /// Waits until there may be something to do, and lists. Call [`Self::finish`] when it is done.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Listing {
        loop {
            let news = async {
                sleep_until(self.rest_until).await;
                self.events.changed().await
            };
            tokio::select! {
                result = news => match result {
                    Ok(()) => self.due = Instant::now(),
                    Err(error) => self.reopen(&error),
                },
                () = sleep_until(self.due) => match self.list().await {
                    Ok(listing) => return listing,
                    Err(error) => self.fail(&error),
                },
            }
        }
    }

    /// Lists the host's tables.
    pub async fn read(&self) -> netlink::Result<Listing> {
        Listing::read(&self.following.networks, &self.following.networks_v6).await
    }

    /// Lists the host's tables and brings the external interface up to date: a link that was
    /// renamed, made again or given another MTU is known by its address.
    pub async fn list(&mut self) -> netlink::Result<Listing> {
        self.begun = Instant::now();
        let listing = self.read().await?;
        let external = &mut self.following.external;
        if let Some(left) = self.left.take_if(|left| {
            carrier(left.address(), &left.name, &[], &listing)
                .is_some_and(|link| link.id.index == external.index)
        }) {
            let (name, from, to) = (&left.name, external.address(), left.address());
            info!("the address of {name} goes back from {from} to {to}, which is there again");
            *external = left;
        }
        let address = external.address();
        let carrier = carrier(address, &external.name, &self.doubles, &listing);
        if let Some(link) = carrier {
            let doubles = owners(address, &listing).filter(|other| other.id != link.id);
            self.doubles = doubles.map(|double| double.id.index).collect();
            external.name.clone_from(&link.id.name);
            (external.index, external.mtu_bytes) = (link.id.index, link.mtu_bytes);
            (self.away_since, self.lost) = (None, None);
            if std::mem::replace(&mut self.had_carrier, link.has_carrier) && !link.has_carrier {
                let text = format!(
                    "the link of {} went down: look at the cable, the switch or the virtual \
                     machine's network; said once a minute if it comes and goes",
                    external.name
                );
                self.logged_carrier.once(&text, |text| warn!("{text}"));
            }
            let all = listing.addresses.iter();
            let owned = all.filter(|owned| owned.interface_index == link.id.index);
            let owned = owned.map(|owned| IpAddr::V4(owned.address));
            let others = owned.filter(|own| *own != address);
            let since = |other| (other, *self.beside.get(&other).unwrap_or(&self.begun));
            self.beside = others.map(since).collect();
            self.follow_v6(&listing);
        } else if self.away_since.get_or_insert_with(Instant::now).elapsed() >= AWAY {
            self.take_next_address().await;
        }
        Ok(listing)
    }

    /// An IPv6 address that is gone, or not to be used any more, has another in its place at once:
    /// hosts have several, and what is carried by IPv4 goes on meanwhile. But not one of the link
    /// alone, which is there before all others when an interface comes up: that is left for any
    /// other.
    fn follow_v6(&mut self, listing: &Listing) {
        let Following { external, interface, follow_address, .. } = &mut self.following;
        let Some(v6) = external.v6() else { return };
        let usable = usable_addresses(&listing.v6(), external.index);
        let is_away = !usable.contains(&v6.address);
        self.v6_away_since = is_away.then(|| self.v6_away_since.unwrap_or_else(Instant::now));
        let next = usable.first().filter(|next| {
            *follow_address && !next.is_of_link() && (v6.address.is_of_link() || is_away)
        });
        let Some(next) = next else { return };
        info!(
            "the IPv6 address of {} went from {} to {next}; following",
            external.name, v6.address
        );
        let v6 = ExternalAddress::of(*next, interface.public_ipv6);
        external.addresses = Families::of_v6(external.v4(), v6);
        self.v6_away_since = None;
    }

    /// Ends the reconciliation after the last listing: complete, or to be retried.
    pub fn finish(&mut self, is_complete: bool) {
        let now = Instant::now();
        let pause = match (self.away_since, is_complete) {
            (Some(_), true) => AWAY,
            (Some(_), false) if self.is_briefly_away() => AWAY,
            (None, true) if self.v6_away_since.is_some_and(|since| since.elapsed() < AWAY) => AWAY,
            (None, true) => self.following.period,
            (_, false) => self.retry,
        };
        self.retry = if is_complete { RETRY.0 } else { (self.retry * 2).min(RETRY.1) };
        let rest = (self.begun.elapsed() * REST_FACTOR).min(REST_MAX);
        (self.due, self.rest_until) = (now + pause, now + rest);
    }

    /// Has the next listing follow at once.
    pub fn look_now(&mut self) {
        self.due = Instant::now();
    }

    /// Ends the reconciliation with an error: logs it once, and has it retried.
    pub fn fail(&mut self, error: &NetlinkError) {
        self.logged.once(&with_causes(error), |text| warn!("{text}; retrying"));
        self.finish(false);
    }

    /// Subscribes to the kernel's events anew.
    fn reopen(&mut self, error: &NetlinkError) {
        self.logged.once(&with_causes(error), |text| {
            warn!("lost the connection to the kernel, opening another: {text}");
        });
        match subscribe(&self.following) {
            Ok(events) => self.events = events,
            Err(error) => self.logged.once(&with_causes(&error), |text| {
                warn!("cannot open a connection to the kernel: {text}; retrying");
            }),
        }
        self.finish(false);
    }

    async fn take_next_address(&mut self) {
        let Following { external, interface, follow_address, .. } = &mut self.following;
        let mut found = look(interface, &mut Vec::new()).await;
        if let (Err(_), Some(v4), Some(v6)) = (&found, external.v4(), external.v6()) {
            // Without an address of IPv6 that of IPv4 is followed all the same.
            let alone = InterfaceOptions { families: Families::default(), ..interface.clone() };
            let looked = look(&alone, &mut Vec::new()).await;
            found = looked.map(|found| {
                let addresses = Families::of_v6(found.v4().or(Some(v4)), v6);
                ExternalInterface { addresses, ..found }
            });
        }
        let now = Instant::now();
        let is_steady = found.as_ref().is_ok_and(|found| {
            let first_seen = self.beside.get(&found.address());
            first_seen.is_some_and(|first_seen| now.duration_since(*first_seen) >= STEADY)
        });
        let away = self.away_since.map_or(Duration::ZERO, |since| now.duration_since(since));
        self.lost = None;
        match next_address(external, found, *follow_address) {
            Ok(Some(found)) if is_steady && away < STEADY => {
                let (name, address) = (&found.name, found.address());
                let (from, seconds) = (external.address(), STEADY.as_secs());
                self.lose(format!(
                    "{name} no longer has the address {from}; without it for {seconds} s, weftd \
                     takes {address}"
                ));
            }
            Ok(Some(found)) => {
                // A way back only from an address that stands in.
                self.left = is_steady.then(|| external.clone());
                let (name, from, to) = (&found.name, external.address(), found.address());
                info!("the address of {name} went from {from} to {to}; following");
                *external = found;
                self.away_since = None;
            }
            Ok(None) => {}
            Err(text) => self.lose(text),
        }
    }

    fn lose(&mut self, text: String) {
        self.logged_address.once(&text, |text| warn!("{text}"));
        self.lost = Some(text);
    }
}

fn subscribe(following: &Following) -> netlink::Result<Events> {
    let Following { all_route_events, networks, networks_v6, .. } = following;
    let events = Events::subscribe(!networks_v6.is_empty())?;
    Ok(if *all_route_events { events } else { events.only_about(networks, networks_v6) })
}

/// The link that has `address`; `None` while no link has it. By the address and not by the name or
/// the index, since a link may be renamed, or deleted and made again. Of several, the one that is
/// known, by its name; else one that leads to other hosts: hosts that announce their address to
/// routers have it on `lo` too, which leads nowhere, nor do its `doubles`.
fn carrier<'a>(
    address: IpAddr,
    known: &str,
    doubles: &[u32],
    host: &'a Listing,
) -> Option<&'a Link> {
    let leads = |link: &&Link| !link.is_loopback && !doubles.contains(&link.id.index);
    let known = owners(address, host).find(|link| link.id.name == known);
    known.or_else(|| owners(address, host).find(leads))
}

/// The links that have `address`, and could carry packets.
fn owners(address: IpAddr, host: &Listing) -> impl Iterator<Item = &Link> {
    host.links.iter().filter(move |link| link.mtu_bytes > 0 && host.has(link, address))
}

/// The address to take in place of a lost one; none if it has come back, or why it is waited for.
/// Another interface's is not taken: it would be gone with the next failure of the first.
fn next_address(
    before: &ExternalInterface,
    found: Result<ExternalInterface, InterfaceError>,
    follow_address: bool,
) -> Result<Option<ExternalInterface>, String> {
    let (name, from) = (&before.name, before.address());
    let lost = format!("{name} no longer has the address {from}");
    let found =
        found.map_err(|error| format!("{lost}; waiting for one: {}", with_causes(&error)))?;
    let (other, to) = (&found.name, found.address());
    match (to == from, other == name) {
        (true, true) => Ok(None),
        (true, false) => Err(format!("{lost}, only {other} has it; waiting for it to come back")),
        (false, false) => Err(format!(
            "{lost}; a restart of weftd would choose {other} with {to}: waiting for an address of \
             {name}, restart weftd to use {other}"
        )),
        (false, true) if !follow_address => Err(format!(
            "the address of {name} is no longer {from} but {to}, and --follow-address=false: weftd \
             must be restarted to use it"
        )),
        (false, true) => Ok(Some(found)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::host::state::Address;
    use crate::host::state::tests::{address, link};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn on(interface_index: u32) -> Address {
        address(interface_index, ADDRESS, 32)
    }

    fn interface(name: &str, last: u8) -> ExternalInterface {
        let v4 = ExternalAddress::of(Ipv4Addr::new(192, 0, 2, last), None);
        let (name, addresses) = (name.to_owned(), Families::of_v4(v4, None));
        ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 }
    }

    #[test]
    fn known_interface_stays_while_it_has_the_address() {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "eth1")];
        let found = |known, owners: &[u32], doubles: &[u32]| {
            let addresses = owners.iter().copied().map(on).collect();
            let host = Listing { links: links.to_vec(), addresses, ..Listing::default() };
            carrier(ADDRESS.into(), known, doubles, &host).map(|link| link.id.name.clone())
        };
        assert_eq!(found("eth1", &[1, 2, 3], &[2]).as_deref(), Some("eth1"));
        assert_eq!(found("eth1", &[1, 2], &[]).as_deref(), Some("eth0"), "renamed, or moved");
        assert_eq!(found("eth1", &[1, 2], &[2]), None, "it had the address all along");
        assert_eq!(found("eth1", &[1], &[]), None, "the loopback leads to nobody");
        assert_eq!(found("lo", &[1, 2], &[]).as_deref(), Some("lo"), "it was asked for");
        assert_eq!(found("eth1", &[], &[]), None);
    }

    #[test]
    fn only_the_same_interfaces_next_address_is_taken() {
        let before = interface("eth0", 1);
        let next = interface("eth0", 2);
        let decide = |found, follow_address| next_address(&before, found, follow_address);
        assert_eq!(decide(Ok(next.clone()), true), Ok(Some(next.clone())));
        assert_eq!(decide(Ok(before.clone()), true), Ok(None));
        let why = |found, follow_address| decide(found, follow_address).unwrap_err();
        let text = why(Ok(next), false);
        assert!(text.contains("no longer 192.0.2.1 but 192.0.2.2"), "{text}");
        assert!(text.contains("--follow-address"), "{text}");
        let text = why(Ok(interface("lo", 1)), true);
        assert!(text.contains(" lo "), "{text}");
        let text = why(Ok(interface("eth1", 9)), true);
        assert!(text.contains("eth1 with 192.0.2.9"), "which one it could be is missing: {text}");
        let none = "vanished".to_owned();
        let text = why(Err(InterfaceError::None(none)), true);
        assert!(text.contains("vanished"), "{text}");
    }
}

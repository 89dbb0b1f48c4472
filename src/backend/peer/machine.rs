//! How each peer is: a state machine over counts, answers, errors and the caller's clock, without
//! I/O.
//!
//! Whoever is sent packets is asked, however much is heard from it: an answer alone shows that both
//! ways work. To ask is to send an echo through the tunnel, which any kernel answers; where it goes
//! unanswered, with it goes an echo that expires at the peer, about which any router has to say
//! so, though it may answer no echoes. Only when both stay unanswered, several times, something is
//! wrong, and what else is known tells what: what the kernel says to a send, ICMP errors, what is
//! heard. An ICMP error alone counts for nothing, for anybody may forge one. Peers that nobody
//! sends to are left alone.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::evidence::{Ask, Evidence, Hosts, Reached, Sample, TICK};
use super::one::{IN_QUESTION, IN_USE, Peer, Urgency, beyond};
use super::state::Contact;

/// Echoes of one tick: nearly twice what all peers in use need, to catch up. Of them to peers in
/// question: each has three companions, so a megabit, and 1,600 dead peers are asked in time.
/// Beyond these, peers take turns.
const TICK_MAX: usize = 256;
const TICK_QUESTIONS_MAX: usize = 80;

/// All peers of one backend, by their hosts.
#[derive(Debug)]
pub(in crate::backend) struct Machine {
    /// In the order of the hosts, each once: all are passed over, several times a second.
    peers: Vec<Entry>,
    /// Those in use that were not quiet at the last tick: between two ticks nobody else is looked
    /// at, and of thousands of peers these are few.
    loud: Vec<IpAddr>,
    /// Whose target this is, or whose echoes expire on the way to it, and the lease's interface.
    addresses: HashMap<IpAddr, (IpAddr, u32)>,
    /// By which what comes from the peers' hosts comes.
    pub(super) external: u32,
    /// How long a peer counts as in use.
    in_use: Duration,
    random: fastrand::Rng,
}

/// What is small lies side by side: most of thousands of peers are passed over.
#[derive(Debug)]
struct Entry {
    host: IpAddr,
    /// [`Peer::quiet_until`], unless an echo was sent since.
    quiet_until: Option<Instant>,
    peer: Box<Peer>,
}

impl Entry {
    fn is_quiet(&self, now: Instant) -> bool {
        self.quiet_until.is_some_and(|until| now < until)
    }
}

impl Machine {
    /// Nobody is known yet. `in_use` where use is known at times only.
    pub(super) fn new(is_use_rare: bool, seed: u64) -> Self {
        Self {
            peers: Vec::new(),
            loud: Vec::new(),
            addresses: HashMap::new(),
            external: 0,
            in_use: if is_use_rare { IN_QUESTION } else { IN_USE },
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// These are the peers from now on, behind the interface with this index.
    pub(in crate::backend) fn set_hosts(&mut self, hosts: Hosts, external: u32) {
        self.external = external;
        let mut before = std::mem::take(&mut self.peers).into_iter().peekable();
        self.addresses.clear();
        for (host, leases) in hosts {
            for Reached { subnet, target, interface } in &leases {
                let place = (host, *interface);
                self.addresses.extend([(*target, place), (beyond(*subnet), place)]);
            }
            while before.next_if(|entry| entry.host < host).is_some() {}
            let known = before.next_if(|entry| entry.host == host);
            let new = || Entry { host, quiet_until: None, peer: Box::default() };
            let mut entry = known.unwrap_or_else(new);
            entry.peer.leases = leases;
            self.peers.push(entry);
        }
    }

    fn position(&self, host: IpAddr) -> Option<usize> {
        self.peers.binary_search_by_key(&host, |entry| entry.host).ok()
    }

    fn entry(&self, host: IpAddr) -> Option<&Entry> {
        self.peers.get(self.position(host)?)
    }

    fn peer_mut(&mut self, host: IpAddr) -> Option<&mut Peer> {
        let at = self.position(host)?;
        self.peers.get_mut(at).map(|entry| &mut *entry.peer)
    }

    /// The host that answers at this address, or behind which it is, and by which interface what
    /// comes from there comes.
    pub(super) fn place_of(&self, address: IpAddr) -> Option<(IpAddr, u32)> {
        let place = self.addresses.get(&address).copied();
        place.or_else(|| self.position(address).map(|_| (address, self.external)))
    }

    /// Whether packets were sent to this peer lately.
    pub(in crate::backend) fn is_in_use(&self, host: IpAddr, now: Instant) -> bool {
        self.entry(host).is_some_and(|entry| entry.peer.is_in_use(self.in_use, now))
    }

    /// Whether its host said of late that nobody is at the tunnel's port.
    pub(in crate::backend) fn has_no_daemon(&self, host: IpAddr, now: Instant) -> bool {
        self.entry(host).is_some_and(|entry| entry.peer.has_no_daemon(host, now))
    }

    /// Whether this is an address whose echo is asked for.
    pub(super) fn is_target(&self, address: IpAddr) -> bool {
        self.addresses.contains_key(&address)
    }

    /// Whether this is an address behind a peer, at which echoes expire on purpose.
    pub(super) fn is_beyond(&self, address: IpAddr) -> bool {
        let entry = self.addresses.get(&address).and_then(|(host, _)| self.entry(*host));
        let mut leases = entry.iter().flat_map(|entry| &entry.peer.leases);
        leases.any(|lease| beyond(lease.subnet) == address)
    }

    /// Looks at what was counted of each peer.
    pub(super) fn look(
        &mut self,
        mut count: impl FnMut(IpAddr, &[Reached]) -> Sample,
        now: Instant,
    ) {
        for Entry { host, peer, .. } in &mut self.peers {
            peer.note(count(*host, &peer.leases), self.in_use, now);
        }
    }

    /// Whether the last look may have missed that a peer is used: another one soon tells.
    pub(super) fn is_use_in_doubt(&self) -> bool {
        self.peers.iter().any(|entry| entry.peer.is_in_doubt)
    }

    /// Gives the echoes that are due.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<Ask> {
        let in_use = self.in_use;
        let (mut due, mut used) = (Vec::new(), 0);
        self.loud.clear();
        for entry in &mut self.peers {
            if entry.is_quiet(now) {
                used += 1;
                continue;
            }
            entry.quiet_until = entry.peer.quiet_until();
            if !entry.peer.is_in_use(in_use, now) {
                continue;
            }
            used += 1;
            self.loud.push(entry.host);
            if let Some(urgency) = entry.peer.urgency(in_use, now) {
                due.push((urgency, entry));
            }
        }
        // Of equally urgent ones, who has waited longest.
        due.sort_by_key(|(urgency, entry)| (*urgency, entry.peer.last_asked()));
        let mut questions = 0;
        due.retain(|(urgency, _)| {
            questions += usize::from(*urgency != Urgency::Steady);
            *urgency == Urgency::Steady || questions <= TICK_QUESTIONS_MAX
        });
        let random = &mut self.random;
        let asked = due.into_iter().take(TICK_MAX);
        let ask = |(_, entry): (_, &mut Entry)| {
            entry.quiet_until = None;
            entry.peer.ask(entry.host, used, random, now)
        };
        asked.filter_map(ask).collect()
    }

    /// Takes in what came to be known of a peer.
    pub(super) fn note(&mut self, host: IpAddr, mut evidence: Evidence, now: Instant) {
        if let Evidence::Foreign(source, is_anothers) = &mut evidence {
            let mut leases = self.peers.iter().flat_map(|entry| &entry.peer.leases);
            *is_anothers = leases.any(|lease| lease.subnet.contains(*source));
        }
        if let Some(peer) = self.peer_mut(host) {
            peer.take_in(evidence, now);
        }
    }

    /// The peers in use of which not all echoes were answered when they were last looked at.
    fn loud(&self, now: Instant) -> impl Iterator<Item = (IpAddr, &Peer)> {
        let loud = self.loud.iter().filter_map(|host| self.entry(*host));
        loud.filter(move |entry| !entry.is_quiet(now)).map(|entry| (entry.host, &*entry.peer))
    }

    /// Whether an answer is waited for, or one was missed of late.
    pub(super) fn is_waiting(&self, now: Instant) -> bool {
        let in_use = self.in_use;
        self.loud(now).any(|(_, peer)| {
            (peer.unanswered > 0 || peer.lost(now).0 > 0) && peer.is_in_use(in_use, now)
        })
    }

    /// How long until the next tick; `None` while no peer is in use.
    pub(super) fn until_tick(&self, now: Instant) -> Option<Duration> {
        if self.is_waiting(now) {
            return Some(TICK);
        }
        let peers = self.peers.iter().map(|entry| &entry.peer);
        let used = peers.filter(|peer| peer.is_in_use(self.in_use, now));
        let next = used.map(|peer| peer.last_asked().map_or(now, |at| at + peer.steady)).min()?;
        Some(next.saturating_duration_since(now).max(TICK))
    }

    /// The peers in use that left an echo unanswered, with their leases.
    pub(super) fn in_question(&self, now: Instant) -> impl Iterator<Item = (IpAddr, &[Reached])> {
        let is_meant = move |peer: &Peer| peer.missed(now) > 0 && peer.is_in_use(self.in_use, now);
        let meant = self.loud(now).filter(move |(_, peer)| is_meant(peer));
        meant.map(|(host, peer)| (host, peer.leases.as_slice()))
    }

    /// What is known of each peer.
    pub(super) fn contacts(&self, now: Instant) -> BTreeMap<IpAddr, Contact> {
        let contact = |peer: &Peer| Contact {
            state: peer.state(self.in_use, now),
            heard: peer.noted.heard,
            in_use_since: peer.used.map(|(since, _)| since),
            round_trip: peer.round_trip,
        };
        self.peers.iter().map(|entry| (entry.host, contact(&entry.peer))).collect()
    }
}

#[cfg(test)]
mod tests;

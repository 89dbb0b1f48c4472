//! Whether what workers send from ports of their own arrives: a firewall may know the tunnel's port
//! only. That an echo from such a port is answered shows it. Until one is, and as soon as several
//! in a row are not, all packets to that peer leave from the tunnel's port, as flanneld's do. Pure.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::route::HostSet;

/// Between two echoes to a peer, whether they arrive or not: one packet a minute. A firewall that
/// is closed later costs packets for a minute and the tries below.
const PERIOD: Duration = Duration::from_secs(60);

/// How long an answer is waited for: beyond a path by satellite.
const ANSWER: Duration = Duration::from_secs(1);

/// So many in a row show that they don't arrive: of a path that loses three in ten, one time in
/// thirty.
const TRIES: u32 = 4;

/// Peers that are asked in one round, so that thousands are no burst.
const ASKED_MAX: usize = 32;

/// Of one peer.
#[derive(Debug)]
struct Trial {
    /// What answers echoes there.
    target: Ipv4Addr,
    due: Instant,
    asked: Option<(u16, Instant)>,
    missed: u32,
    arrives: bool,
}

impl Trial {
    fn new(target: Ipv4Addr, now: Instant) -> Self {
        Self { target, due: now, asked: None, missed: 0, arrives: false }
    }
}

/// The peers that take datagrams from further ports, by their hosts.
#[derive(Debug, Default)]
pub(super) struct SourcePorts {
    trials: BTreeMap<Ipv4Addr, Trial>,
    open: HashMap<u16, Ipv4Addr>,
    is_changed: bool,
}

impl SourcePorts {
    /// These are the peers from now on, each with what answers echoes there.
    pub(super) fn set_peers(&mut self, peers: &BTreeMap<Ipv4Addr, Ipv4Addr>, now: Instant) {
        let before = self.trials.len();
        self.trials.retain(|host, trial| peers.get(host) == Some(&trial.target));
        self.is_changed |= self.trials.len() < before;
        for (host, target) in peers {
            self.trials.entry(*host).or_insert_with(|| Trial::new(*target, now));
        }
    }

    /// The hosts to ask now, each with its target, among those to which packets are sent.
    pub(super) fn tick(
        &mut self,
        is_in_use: impl Fn(Ipv4Addr) -> bool,
        now: Instant,
    ) -> Vec<(Ipv4Addr, Ipv4Addr)> {
        let mut due = Vec::new();
        for (host, trial) in &mut self.trials {
            if let Some((sequence, _)) = trial.asked.take_if(|(_, at)| now >= *at + ANSWER) {
                self.open.remove(&sequence);
                trial.missed += 1;
                if trial.missed == TRIES {
                    self.is_changed |= trial.arrives;
                    (trial.missed, trial.arrives, trial.due) = (0, false, now + PERIOD);
                }
            }
            let is_due = trial.asked.is_none() && now >= trial.due;
            if is_due && due.len() < ASKED_MAX && is_in_use(*host) {
                due.push((*host, trial.target));
            }
        }
        due
    }

    /// The echo with this number was sent to `host`.
    pub(super) fn asked(&mut self, host: Ipv4Addr, sequence: u16, now: Instant) {
        if let Some(trial) = self.trials.get_mut(&host) {
            trial.asked = Some((sequence, now));
            self.open.insert(sequence, host);
        }
    }

    /// `source` answered an echo; whether that was one of these.
    pub(super) fn answered(&mut self, source: Ipv4Addr, sequence: u16, now: Instant) -> bool {
        let Some(host) = self.open.get(&sequence) else { return false };
        let Some(trial) = self.trials.get_mut(host).filter(|trial| trial.target == source) else {
            return false;
        };
        self.open.remove(&sequence);
        self.is_changed |= !trial.arrives;
        let target = trial.target;
        *trial = Trial { arrives: true, due: now + PERIOD, ..Trial::new(target, now) };
        true
    }

    /// Where they arrive, if that has changed since the last call.
    pub(super) fn changed(&mut self) -> Option<HostSet> {
        let arrives = |(host, trial): (&Ipv4Addr, &Trial)| trial.arrives.then_some(*host);
        std::mem::take(&mut self.is_changed)
            .then(|| self.trials.iter().filter_map(arrives).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const TARGET: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);

    /// Runs for so many seconds, ten rounds each, with a peer that answers at once what arrives;
    /// returns when the set of hosts changed, to how many, and how many echoes were sent.
    fn run(
        ports: &mut SourcePorts,
        start: Instant,
        seconds: u64,
        arrives: impl Fn(u64) -> bool,
    ) -> (Vec<(u64, usize)>, usize) {
        let (mut changes, mut sent) = (Vec::new(), 0);
        for round in 0..seconds * 10 {
            let now = start + Duration::from_millis(round * 100);
            for (host, target) in ports.tick(|_| true, now) {
                sent += 1;
                ports.asked(host, sent as u16, now);
                if arrives(round / 10) {
                    assert!(ports.answered(target, sent as u16, now));
                }
            }
            let changed = ports.changed();
            changes.extend(changed.map(|set| (round / 10, set.hosts().len())));
        }
        (changes, sent)
    }

    fn one_peer(now: Instant) -> SourcePorts {
        let mut ports = SourcePorts::default();
        ports.set_peers(&BTreeMap::from([(HOST, TARGET)]), now);
        ports
    }

    #[test]
    fn own_ports_are_used_where_they_arrive() {
        let start = Instant::now();
        let (changes, sent) = run(&mut one_peer(start), start, 600, |_| true);
        assert_eq!((changes, sent), (vec![(0, 1)], 10));
    }

    #[test]
    fn a_firewall_that_knows_one_port_only_costs_nothing() {
        let start = Instant::now();
        let (changes, sent) = run(&mut one_peer(start), start, 600, |_| false);
        assert!(changes.is_empty(), "packets went where none arrive: {changes:?}");
        assert!(sent <= 50, "{sent} echoes in ten minutes");
    }

    #[test]
    fn a_firewall_that_is_closed_and_opened_is_noticed() {
        let start = Instant::now();
        let (changes, _) = run(&mut one_peer(start), start, 600, |at| !(90..300).contains(&at));
        let sizes: Vec<_> = changes.iter().map(|(_, size)| *size).collect();
        assert_eq!(sizes, [1, 0, 1]);
        assert!(changes[1].0 <= 90 + 65 && changes[2].0 <= 300 + 65, "{changes:?}");
    }

    #[test]
    fn nobody_else_answers_and_idle_peers_are_left_alone() {
        let now = Instant::now();
        let mut ports = one_peer(now);
        assert!(ports.tick(|_| false, now).is_empty(), "an idle network has packets");
        assert_eq!(ports.tick(|_| true, now), [(HOST, TARGET)]);
        ports.asked(HOST, 7, now);
        assert!(!ports.answered(Ipv4Addr::new(10, 5, 9, 0), 7, now));
        assert!(!ports.answered(TARGET, 8, now));
        assert!(ports.changed().is_none());
        assert!(ports.answered(TARGET, 7, now));
        assert_eq!(ports.changed().unwrap().hosts(), [HOST]);
        ports.set_peers(&BTreeMap::new(), now);
        assert!(ports.changed().unwrap().hosts().is_empty(), "who takes no more ports gets some");
    }
}

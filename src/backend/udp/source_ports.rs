//! Whether what workers send from ports of their own arrives: a firewall may know the tunnel's port
//! only, and of several paths between two hosts, which routers choose by the ports, one may be
//! dead. That an echo from each such port is answered shows it. Until all are, and as soon as
//! several in a row from one are not, all packets to that peer leave from the tunnel's port, as
//! flanneld's do. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// In this time each port is tried once, or [`PER_PERIOD_MAX`] of them if there are more. What is
/// closed or dies later costs the packets of its port until then and for the tries below.
const PERIOD: Duration = Duration::from_secs(60);

/// So many echoes a minute are little even of thousands of peers in use.
const PER_PERIOD_MAX: usize = 4;

/// How long an answer is waited for: beyond a path by satellite.
const ANSWER: Duration = Duration::from_secs(1);

/// So many in a row from one port show that they don't arrive: of a path that loses three in ten,
/// one time in a hundred.
pub(super) const TRIES: u32 = 4;

/// Peers that are asked in one round, so that thousands are no burst.
const ASKED_MAX: usize = 32;

/// Of one peer.
#[derive(Debug)]
struct Trial {
    /// What answers echoes there.
    target: IpAddr,
    due: Instant,
    asked: Option<(u16, Instant)>,
    missed: u32,
    /// The port whose turn it is, counted from the first, and how many in a row were answered.
    port: usize,
    answered: usize,
    arrives: bool,
}

impl Trial {
    fn new(target: IpAddr, now: Instant) -> Self {
        let (due, asked) = (now, None);
        Self { target, due, asked, missed: 0, port: 0, answered: 0, arrives: false }
    }
}

/// An echo that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) host: IpAddr,
    /// What answers there.
    pub(super) target: IpAddr,
    /// Of the ports, which.
    pub(super) port: usize,
}

/// The peers that take datagrams from further ports, by their hosts.
#[derive(Debug, Default)]
pub(super) struct SourcePorts {
    /// How many there are.
    ports: usize,
    trials: BTreeMap<IpAddr, Trial>,
    open: HashMap<u16, IpAddr>,
    is_changed: bool,
    /// Hosts to which they were used until an echo from this one was not answered.
    given_up: Vec<(IpAddr, usize)>,
}

impl SourcePorts {
    /// Workers have so many ports, and these are the peers from now on, each with what answers
    /// echoes there.
    pub(super) fn set_peers(
        &mut self,
        ports: usize,
        peers: &BTreeMap<IpAddr, IpAddr>,
        now: Instant,
    ) {
        self.ports = ports;
        let before = self.trials.len();
        self.trials.retain(|host, trial| peers.get(host) == Some(&trial.target));
        self.is_changed |= self.trials.len() < before;
        for (host, target) in peers {
            self.trials.entry(*host).or_insert_with(|| Trial::new(*target, now));
        }
    }

    /// What to ask now of the hosts to which packets are sent.
    pub(super) fn tick(&mut self, is_in_use: impl Fn(IpAddr) -> bool, now: Instant) -> Vec<Ask> {
        let mut due = Vec::new();
        for (host, trial) in &mut self.trials {
            if let Some((sequence, _)) = trial.asked.take_if(|(_, at)| now >= *at + ANSWER) {
                self.open.remove(&sequence);
                trial.missed += 1;
                if trial.missed == TRIES {
                    if std::mem::take(&mut trial.arrives) {
                        self.is_changed = true;
                        self.given_up.push((*host, trial.port));
                    }
                    (trial.missed, trial.answered, trial.due) = (0, 0, now + PERIOD);
                }
            }
            let is_due = trial.asked.is_none() && now >= trial.due;
            if is_due && due.len() < ASKED_MAX && is_in_use(*host) {
                due.push(Ask { host: *host, target: trial.target, port: trial.port });
            }
        }
        due
    }

    /// The echo with this number was sent to `host`.
    pub(super) fn asked(&mut self, host: IpAddr, sequence: u16, now: Instant) {
        if let Some(trial) = self.trials.get_mut(&host) {
            trial.asked = Some((sequence, now));
            self.open.insert(sequence, host);
        }
    }

    /// `source` answered an echo; whether that was one of these.
    pub(super) fn answered(&mut self, source: IpAddr, sequence: u16, now: Instant) -> bool {
        let Some(host) = self.open.get(&sequence) else { return false };
        let Some(trial) = self.trials.get_mut(host).filter(|trial| trial.target == source) else {
            return false;
        };
        self.open.remove(&sequence);
        (trial.asked, trial.missed) = (None, 0);
        trial.port = (trial.port + 1) % self.ports.max(1);
        trial.answered += 1;
        if trial.answered >= self.ports {
            self.is_changed |= !trial.arrives;
            trial.arrives = true;
            let a_period = self.ports.clamp(1, PER_PERIOD_MAX);
            trial.due = now + PERIOD / a_period as u32;
        }
        true
    }

    /// The hosts given up since the last call, each with the port from which echoes to it are not
    /// answered.
    pub(super) fn given_up(&mut self) -> Vec<(IpAddr, usize)> {
        std::mem::take(&mut self.given_up)
    }

    /// Where they arrive, if that has changed since the last call.
    pub(super) fn changed(&mut self) -> Option<BTreeSet<IpAddr>> {
        let arrives = |(host, trial): (&IpAddr, &Trial)| trial.arrives.then_some(*host);
        std::mem::take(&mut self.is_changed)
            .then(|| self.trials.iter().filter_map(arrives).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 5, 1, 0));
    const PORTS: usize = 3;

    /// Runs for so many seconds, ten rounds each, with a peer that answers at once what arrives;
    /// returns when the set of hosts changed, to how many, and how many echoes were sent.
    fn run(
        ports: &mut SourcePorts,
        start: Instant,
        seconds: u64,
        arrives: impl Fn(u64, usize) -> bool,
    ) -> (Vec<(u64, usize)>, usize) {
        let (mut changes, mut sent) = (Vec::new(), 0);
        for round in 0..seconds * 10 {
            let now = start + Duration::from_millis(round * 100);
            for ask in ports.tick(|_| true, now) {
                sent += 1;
                ports.asked(ask.host, sent as u16, now);
                if arrives(round / 10, ask.port) {
                    assert!(ports.answered(ask.target, sent as u16, now));
                }
            }
            let changed = ports.changed();
            changes.extend(changed.map(|set| (round / 10, set.len())));
        }
        (changes, sent)
    }

    fn one_peer(now: Instant) -> SourcePorts {
        let mut ports = SourcePorts::default();
        ports.set_peers(PORTS, &BTreeMap::from([(HOST, TARGET)]), now);
        ports
    }

    #[test]
    fn own_ports_are_used_where_they_arrive() {
        let start = Instant::now();
        let (changes, sent) = run(&mut one_peer(start), start, 600, |_, _| true);
        assert_eq!(changes, [(0, 1)]);
        assert!(sent <= 11 * PORTS, "{sent} echoes in ten minutes");
    }

    #[test]
    fn a_firewall_that_knows_one_port_only_costs_nothing() {
        let start = Instant::now();
        let (changes, sent) = run(&mut one_peer(start), start, 600, |_, _| false);
        assert!(changes.is_empty(), "packets went where none arrive: {changes:?}");
        assert!(sent <= 50, "{sent} echoes in ten minutes");
    }

    #[test]
    fn a_firewall_that_is_closed_and_opened_is_noticed() {
        let start = Instant::now();
        let (changes, _) = run(&mut one_peer(start), start, 600, |at, _| !(90..300).contains(&at));
        let sizes: Vec<_> = changes.iter().map(|(_, size)| *size).collect();
        assert_eq!(sizes, [1, 0, 1]);
        assert!(changes[1].0 <= 90 + 65 && changes[2].0 <= 300 + 65, "{changes:?}");
    }

    #[test]
    fn one_dead_port_of_several_is_noticed() {
        for dead in 0..PORTS {
            let start = Instant::now();
            let mut ports = one_peer(start);
            let (changes, _) = run(&mut ports, start, 600, |at, port| at < 90 || port != dead);
            let sizes: Vec<_> = changes.iter().map(|(_, size)| *size).collect();
            assert_eq!(sizes, [1, 0], "a third of the flows reaches nobody");
            assert!(changes[1].0 <= 90 + 65, "{changes:?}");
            assert_eq!(ports.given_up(), [(HOST, dead)]);
            assert!(ports.given_up().is_empty(), "it is told again and again");
        }
    }

    #[test]
    fn nobody_else_answers_and_idle_peers_are_left_alone() {
        let now = Instant::now();
        let mut ports = one_peer(now);
        assert!(ports.tick(|_| false, now).is_empty(), "an idle network has packets");
        for port in 0..PORTS {
            let ask = Ask { host: HOST, target: TARGET, port };
            assert_eq!(ports.tick(|_| true, now), [ask]);
            ports.asked(HOST, 7, now);
            assert!(!ports.answered(IpAddr::V4(Ipv4Addr::new(10, 5, 9, 0)), 7, now));
            assert!(!ports.answered(TARGET, 8, now));
            assert!(ports.changed().is_none());
            assert!(ports.answered(TARGET, 7, now));
        }
        assert_eq!(ports.changed().unwrap(), BTreeSet::from([HOST]));
        ports.set_peers(PORTS, &BTreeMap::new(), now);
        assert!(ports.changed().unwrap().is_empty(), "who takes no more ports gets some");
    }
}

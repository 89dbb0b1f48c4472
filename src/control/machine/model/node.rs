//! A simulated node: a machine, or an attempt to acquire, its one request, its watch, and what
//! an observer knows that the node was told.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::super::{Command, Event, Machine, Now, OwnEntry, Write};
use super::claims::Claims;
use super::store::{Claim, Point, Request, SimStore, unavailable};
use super::{World, network, timing};
use crate::backend_kind::BackendKind;
use crate::config::network::NetworkConfig;
use crate::control::cache::Known;
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::snapshot::{Change, Granted, Snapshot, Vacancy};
use crate::route::Prefixes;

/// What a node asks of the store.
#[derive(Debug, Clone)]
pub(super) enum Op {
    List,
    Watch {
        revision: i64,
        own: Lease,
    },
    Renew {
        held: Lease,
    },
    Update {
        held: Lease,
        claimed: Claimed,
    },
    Create {
        wanted: Lease,
        vacancy: Box<Vacancy>,
        claimed: Claimed,
    },
    /// At the claim of the own address.
    Look,
    Take {
        revision: i64,
    },
}

/// The claim that a write compares, of a node that starts.
pub(super) type Claimed = Option<(IpAddr, i64)>;

#[derive(Debug)]
pub(super) enum Answer {
    Listed(Result<Snapshot, StoreError>),
    Opened(Result<(), StoreError>),
    Written(Result<Granted, StoreError>),
    Looked(Result<Option<Claim>, StoreError>),
    Taken(Result<i64, StoreError>),
}

#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) op: Op,
    /// The node's boot clock when it asked.
    pub(super) asked: Duration,
    /// Who asked, with which address and which etcd lease for its claims.
    pub(super) claims: Claims,
    pub(super) address: IpAddr,
    pub(super) run: u32,
    /// Of the node's last listing.
    pub(super) past: u64,
    /// Once the store has carried it out, with the point after it.
    pub(super) answer: Option<(Answer, Point)>,
}

#[derive(Debug)]
pub(super) enum Life {
    Down,
    /// From this moment of the boot clock on, it asks for a subnet.
    Acquiring {
        at: Duration,
    },
    Running(Box<Machine>),
}

#[derive(Debug)]
pub(super) struct Watching {
    pub(super) past: u64,
    pub(super) after: i64,
    pub(super) live: Option<i64>,
}

#[derive(Debug)]
pub(super) struct Node {
    number: u8,
    /// Whether its network has IPv4. Without it is known by its IPv6 addresses.
    pub(super) has_v4: bool,
    pub(super) address: IpAddr,
    /// All that it may have.
    pub(super) addresses: [IpAddr; 2],
    pub(super) life: Life,
    pub(super) request: Option<InFlight>,
    pub(super) watch: Option<Watching>,
    pub(super) is_paused: bool,
    pub(super) is_cut: bool,
    pub(super) boot_offset: Duration,
    pub(super) wall_offset: u64,
    /// How many IPv6 subnets the configuration of this run has; none without IPv6.
    pub(super) v6_subnets: u16,
    pub(super) previous: Option<Prefixes>,
    /// What the node remembers on disk.
    pub(super) known: Option<Known>,
    /// The past that this is of, which the node does not know.
    known_past: u64,
    pub(super) claims: Claims,
    /// How often it was started.
    pub(super) run: u32,
    /// When its claim is kept next, by the world's time.
    pub(super) keep_at: Duration,
    /// The point at which the store last told it whose the claim of its address is.
    pub(super) claim_seen: Point,
    /// Whether another node has the same addresses.
    pub(super) has_twin: bool,
    /// Whether it goes by that, because the store has not answered yet.
    pub(super) is_from_cache: bool,
    /// Whether this run began so; the cache may be of before the node was elsewhere.
    pub(super) began_from_cache: bool,
    /// The id of the cluster of the last listing.
    pub(super) cluster: u64,

    /// What the node's mirror shows.
    pub(super) mirror: Point,
    /// The newest point that the node was told of.
    pub(super) told: Point,
    /// Whether an event was withheld since the last listing.
    pub(super) is_deceived: bool,
    /// When the last listing was asked for that was answered.
    pub(super) read: Option<Duration>,
    pub(super) published: BTreeMap<Prefixes, IpAddr>,
    /// What has to be held, until when, by the boot clock.
    pub(super) held: BTreeMap<Prefixes, (IpAddr, Duration)>,
    /// Whether it is without the store, and nothing that it holds ends.
    pub(super) is_away: bool,
    /// Whether what was just told is an accident, in which the own lease is not given up.
    pub(super) is_accident: bool,
}

impl Node {
    /// `number` gives the addresses, which twins share; `identity` tells twins apart, or does not.
    pub(super) fn new(
        number: u8,
        has_v4: bool,
        identity: NodeIdentity,
        boot_offset: Duration,
    ) -> Self {
        let addresses = [0, 100].map(|offset| {
            let v4 = Ipv4Addr::new(192, 0, 2, number + offset);
            if has_v4 { v4.into() } else { v6_of(v4).into() }
        });
        Self {
            number,
            has_v4,
            address: addresses[0],
            addresses,
            life: Life::Down,
            request: None,
            watch: None,
            is_paused: false,
            is_cut: false,
            boot_offset,
            wall_offset: 0,
            v6_subnets: 0,
            previous: None,
            known: None,
            known_past: 0,
            claims: Claims::of(identity),
            run: 0,
            keep_at: Duration::ZERO,
            claim_seen: (0, 0),
            has_twin: false,
            is_from_cache: false,
            began_from_cache: false,
            cluster: 0,
            mirror: (0, 0),
            told: (0, 0),
            is_deceived: false,
            read: None,
            published: BTreeMap::new(),
            held: BTreeMap::new(),
            is_away: false,
            is_accident: false,
        }
    }

    pub(super) fn boot(&self, time: Duration) -> Duration {
        time + self.boot_offset
    }

    pub(super) fn now(&self, time: Duration) -> Now {
        let boot = self.boot(time);
        Now { boot, unix_seconds: 1_800_000_000 + boot.as_secs() + self.wall_offset }
    }

    pub(super) fn attributes(&self) -> LeaseAttributes {
        attributes(self.address, self.v6_subnets > 0)
    }

    /// By which this run began.
    pub(super) fn config(&self) -> NetworkConfig {
        network(self.has_v4, self.v6_subnets)
    }

    /// The subnet that the node takes for its own, unless its time is over.
    pub(super) fn believes(&self, time: Duration) -> Option<Prefixes> {
        let Life::Running(machine) = &self.life else { return None };
        let holds = matches!(machine.own_entry, OwnEntry::AsWritten | OwnEntry::Rewritten { .. });
        let lives = machine.own.expires.is_none_or(|end| end > self.boot(time));
        (holds && lives).then_some(machine.own.lease.subnets)
    }

    /// When the node next does something by itself, in the world's time.
    pub(super) fn wake(&self) -> Option<Duration> {
        let at = match &self.life {
            Life::Down => None,
            Life::Acquiring { at } if self.request.is_none() => Some(*at),
            Life::Acquiring { .. } => None,
            Life::Running(machine) => machine.next_wake(),
        };
        let keep_at = self.runs().then_some(self.keep_at);
        at.map(|at| at.saturating_sub(self.boot_offset)).into_iter().chain(keep_at).min()
    }

    pub(super) fn runs(&self) -> bool {
        matches!(self.life, Life::Running(_))
    }

    pub(super) fn ask(&mut self, op: Op, time: Duration) {
        assert!(self.request.is_none(), "two requests at once: {op:?} after {:?}", self.request);
        let (asked, claims) = (self.boot(time), self.claims.clone());
        let (address, run) = (self.address, self.run);
        let past = self.mirror.0;
        self.request = Some(InFlight { op, asked, claims, address, run, past, answer: None });
    }

    pub(super) fn try_later(&mut self, time: Duration) {
        self.pause(time, if self.has_twin { 4_000 } else { 500 });
    }

    pub(super) fn pause(&mut self, time: Duration, pause: u64) {
        self.life = Life::Acquiring { at: self.boot(time) + Duration::from_millis(pause) };
    }

    pub(super) fn crash(&mut self) {
        let (number, has_v4, identity) = (self.number, self.has_v4, self.claims.node.clone());
        let (run, known_past) = (self.run + 1, self.known_past);
        let fresh = Self::new(number, has_v4, identity, self.boot_offset);
        let fresh = Self { run, known_past, ..fresh };
        let (previous, wall_offset, is_cut) = (self.previous, self.wall_offset, self.is_cut);
        let (address, known, has_twin) = (self.address, self.known.take(), self.has_twin);
        let fresh = Self { v6_subnets: self.v6_subnets, ..fresh };
        *self = Self { address, previous, known, has_twin, wall_offset, is_cut, ..fresh };
    }
}

/// What the node of `address` publishes.
pub(super) fn attributes(address: IpAddr, has_v6: bool) -> LeaseAttributes {
    match address {
        IpAddr::V4(v4) => {
            let public_ipv6 = has_v6.then(|| v6_of(v4));
            LeaseAttributes { public_ipv6, ..LeaseAttributes::udp(v4) }
        }
        IpAddr::V6(v6) => LeaseAttributes::at(BackendKind::Udp, None, Some(v6)),
    }
}

fn v6_of(address: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits((0xFD99 << 112) | u128::from(address.to_bits()))
}

/// Where and when an operation is carried out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) time: Duration,
    /// The node's boot clock when it asked.
    pub(super) asked: Duration,
    pub(super) cluster: u64,
    /// Of the node when it asked.
    pub(super) address: IpAddr,
    /// Of its last listing then.
    pub(super) past: u64,
}

/// Carries out `op` as of now.
pub(super) fn execute(store: &mut SimStore, op: &Op, claims: &Claims, moment: Moment) -> Answer {
    let Moment { time, asked, cluster, address, past } = moment;
    let (written, claimed) = match op {
        Op::List => return Answer::Listed(Ok(store.list())),
        Op::Watch { revision, own } => return Answer::Opened(store.watch(*revision, own, cluster)),
        Op::Look => return Answer::Looked(Ok(store.claims.get(&address).cloned())),
        Op::Take { revision } => {
            return Answer::Taken(store.take_claim(claims, address, *revision, time));
        }
        Op::Update { claimed, .. } | Op::Create { claimed, .. } if !store.is_claimed(*claimed) => {
            return Answer::Written(Err(StoreError::Conflict(format!("{claimed:?}"))));
        }
        Op::Renew { held } => (store.renew(&Request { held, time, asked, past }), &None),
        Op::Update { held, claimed } => {
            (store.update(&Request { held, time, asked, past }), claimed)
        }
        Op::Create { wanted: held, vacancy, claimed } => {
            (store.create(&Request { held, time, asked, past }, vacancy), claimed)
        }
    };
    if let Some((address, _)) = claimed.filter(|_| written.is_ok()) {
        store.assert_free(&claims.node, address, time);
    }
    Answer::Written(written)
}

pub(super) fn failure(op: &Op) -> Answer {
    match op {
        Op::List => Answer::Listed(Err(unavailable())),
        Op::Watch { .. } => Answer::Opened(Err(unavailable())),
        Op::Renew { .. } | Op::Update { .. } | Op::Create { .. } => {
            Answer::Written(Err(unavailable()))
        }
        Op::Look => Answer::Looked(Err(unavailable())),
        Op::Take { .. } => Answer::Taken(Err(unavailable())),
    }
}

impl World {
    /// Starts a node without asking the store for anything.
    pub(super) fn start_from_cache(&mut self, index: usize, known: Known) {
        let (time, node) = (self.time, &mut self.nodes[index]);
        node.previous = Some(known.own.subnets);
        node.cluster = known.cluster;
        node.told = (node.known_past, known.revision);
        node.keep_at = time;
        (node.is_from_cache, node.began_from_cache) = (true, true);
        let random = fastrand::Rng::with_seed(self.random.u64(..));
        let machine = Machine::from_cache(known, timing(), random, node.now(time));
        node.life = Life::Running(Box::new(machine));
        self.log(index, "starts from its cache");
        self.handle(index, Event::Timer);
    }

    /// Gives a node the answer to its request.
    pub(super) fn deliver_answer(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let Some(InFlight { op, asked, answer: Some((answer, point)), .. }) = node.request.take()
        else {
            panic!("there is no answer to deliver");
        };
        if let (Op::Watch { revision, .. }, Answer::Opened(Ok(()))) = (&op, &answer) {
            node.watch = Some(Watching { past: point.0, after: *revision, live: Some(point.1) });
        }
        if let Answer::Listed(Ok(snapshot)) = &answer {
            self.told_listing(index, snapshot, asked, point);
        } else if let Answer::Written(Ok(_)) = &answer {
            let node = &mut self.nodes[index];
            node.told = node.told.max(point);
        } else if let Answer::Looked(Ok(_)) | Answer::Taken(Ok(_)) = &answer {
            self.nodes[index].claim_seen = point;
            self.log(index, &format!("claims: {answer:?}"));
        }
        if let Life::Acquiring { .. } = self.nodes[index].life {
            return self.acquire_on(index, answer);
        }
        self.handle(
            index,
            match answer {
                Answer::Listed(answer) => Event::Listed(answer),
                Answer::Opened(answer) => Event::Opened(answer),
                Answer::Written(answer) => Event::Written(answer),
                Answer::Looked(_) | Answer::Taken(_) => panic!("only a start asks for it"),
            },
        );
    }

    /// Brings the node what its watch has, up to the revision `until`. Returns whether it had
    /// anything.
    pub(super) fn deliver_changes(&mut self, index: usize, until: i64, loses: bool) -> bool {
        let (store, node) = (&self.store, &mut self.nodes[index]);
        let Life::Running(machine) = &node.life else { return false };
        let Some(watch) = node.watch.as_mut().filter(|_| machine.wants_changes()) else {
            return false;
        };
        if store.is_down || node.is_cut || watch.past != store.past {
            self.handle(index, Event::Changed(Err(unavailable())));
            return true;
        }
        if watch.after < store.compacted {
            self.handle(index, Event::Changed(Err(StoreError::HistoryLost)));
            return true;
        }
        if let Some(revision) = watch.live.take() {
            self.handle(index, Event::Changed(Ok(vec![Change::Live { revision }])));
            return true;
        }
        let first = store.history.partition_point(|(revision, _)| *revision <= watch.after);
        let last = store.history.partition_point(|(revision, _)| *revision <= until);
        if first >= last {
            return false;
        }
        let mut changes: Vec<_> = store.history[first..last].to_vec();
        let point = (store.past, changes.last().map_or(0, |(revision, _)| *revision));
        watch.after = point.1;
        if loses {
            node.is_deceived = true;
            changes.remove(self.random.usize(..changes.len()));
        }
        if !changes.is_empty() {
            self.told_changes(index, &changes, point);
            let changes = changes.into_iter().map(|(_, change)| change).collect();
            self.handle(index, Event::Changed(Ok(changes)));
        }
        true
    }

    /// Lets the machine handle an event and does what it says.
    pub(super) fn handle(&mut self, index: usize, event: Event) {
        let (time, is_told) = (self.time, self.is_told);
        let node = &mut self.nodes[index];
        let now = node.now(time);
        let Life::Running(machine) = &mut node.life else { return };
        let told = is_told.then(|| format!("{event:?}"));
        let commands = machine.handle(event, now);
        let is_away = machine.outage.is_some();
        node.note_outage(is_away, now.boot);
        if let Some(told) = told {
            println!("{time:?} node {index} {told}\n    -> {commands:?}");
        }
        let (mut counted, mut ended) = (None, None);
        for command in commands {
            let node = &mut self.nodes[index];
            match command {
                Command::List => node.ask(Op::List, time),
                Command::Watch { revision, own } => {
                    assert!(node.watch.is_none(), "a second watch");
                    node.ask(Op::Watch { revision, own }, time);
                }
                Command::DropWatch => node.watch = None,
                Command::Write { what, held } => {
                    let claimed = None;
                    let op = match what {
                        Write::Renew => Op::Renew { held },
                        Write::Restore | Write::Repair | Write::Retake => {
                            Op::Update { held, claimed }
                        }
                    };
                    self.ask_write(index, op);
                }
                Command::Retake { held, last_written } => {
                    let wanted = Lease::wanted(held.subnets, held.attributes);
                    let vacancy = Box::new(Vacancy { last_written, replaces: None });
                    self.ask_write(index, Op::Create { wanted, vacancy, claimed: None });
                }
                Command::Publish(peers) => {
                    let peers = peers.iter();
                    node.published =
                        peers.map(|(p, l)| (*p, l.attributes.node_address())).collect();
                }
                Command::Count { peers, held } => counted = Some((peers, held)),
                // The disk lags behind.
                Command::Remember(known) if self.random.u8(..4) > 0 => {
                    (node.known, node.known_past) = (Some(known), node.told.0);
                }
                Command::Remember(_) => {}
                Command::Confirmed => self.check_confirmed(index),
                Command::End(end) => ended = Some(end),
                Command::Unused(_)
                | Command::Expires(_)
                | Command::CountForeignWrite
                | Command::Log(..) => {}
            }
        }
        if let Some((peers, held)) = counted {
            self.check_published(index, peers, held);
        }
        if let Some(end) = ended {
            self.restart_after(index, end);
        }
        self.nodes[index].is_accident = false;
    }

    /// Whether a twin has the same address now.
    pub(super) fn shares_address(&self, index: usize) -> bool {
        let [one, other] = [index, 1_usize.wrapping_sub(index)].map(|at| self.nodes.get(at));
        let both = one.zip(other).filter(|(one, _)| one.has_twin);
        both.is_some_and(|(one, other)| one.address == other.address)
    }
}

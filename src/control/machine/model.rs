//! Random schedules of everything that can go wrong between nodes and their store, against
//! invariants that must hold after every step.
//!
//! Each seed is one schedule: two to five nodes on a simulated store with etcd's rules, 60 to 160
//! steps of faults, after each crash a start with the store or from what was last remembered, then
//! quiet, in which everybody has to agree within bounded steps. A failing
//! seed is named; `WEFT_MODEL_SEED=n cargo test model` runs just that one and tells its steps.
//!
//! In every third schedule the second node has the addresses of the first. If it is another
//! machine, no start gets the subnet while the other's claim lives. What runs goes on: a node that
//! starts from its cache, or whose claim lapsed while the store was away, may share the subnet of
//! the other, and then one of the two has the alarm as soon as both have looked at the claim. If it
//! is a copy, with the same machine-id, each start takes the claim of the other, and that one has
//! the alarm. A copy of a running process has its etcd lease, too; claims cannot tell the two
//! apart, so they are not modelled. Both kinds move; the last to write the entry with its address
//! then has the subnet.
//!
//! In every fifth schedule the network has no IPv4, and nodes are known by their IPv6 addresses;
//! `WEFT_MODEL_WITHOUT_IPV4=1` makes all of them so. In two of three others there is IPv6, too,
//! with hardly more subnets than nodes: a node has both families or IPv4 alone, and may have the
//! other configuration after a crash. Its entry then gets another key in one step. Up to two nodes
//! run flanneld, which compares its own key alone. Entries of theirs may overlap with a node's,
//! those of two nodes never, in neither family.
//!
//! That it can fail is tried by `scripts/mutate`, which breaks one guard or comparison at a time;
//! `scripts/mutations.md` has what caught each, and what nothing did.

mod acquire;
mod check;
mod claims;
mod faults;
mod flannel;
mod node;
mod store;

use std::net::Ipv6Addr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::network::{NetworkConfig, SubnetRange};
use crate::control::choose::tests::config;
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::control::lease::Lease;
use crate::control::timing::Timing;
use crate::route::{Families, Prefix};
use flannel::Flannel;
use node::{Answer, InFlight, Life, Moment, Node, Op, execute, failure};
use store::SimStore;

/// Without WEFT_MODEL_SCHEDULES; `scripts/test --all` runs five times as many.
const SCHEDULES: u64 = 2_000;
const TTL: Duration = Duration::from_secs(60);
const MARGIN: Duration = Duration::from_secs(15);
/// Pause after a failed renewal, and rest of a hold after an outage.
const RETRY: Duration = Duration::from_secs(5);
const STALE_HOLD: Duration = Duration::from_secs(30);
/// Listing, expiry of what nobody renews, and the end of a hold, one after the other.
const SETTLING: Duration = Duration::from_secs(72 + 60 + 30 + 8);
/// The life of a claim, and a few tries.
const HANDING_OVER: Duration = Duration::from_secs(30 + 10);
/// For how long a request may go in after its process has ended, and its connection with it.
const OUTLIVES: Duration = Duration::from_secs(10);
/// Far above what a settling cluster of five needs, and far below what a loop makes.
const CALM_STEPS_MAX: u32 = 3_000;

fn timing() -> Timing {
    Timing {
        lease_ttl: TTL,
        renew_margin: MARGIN,
        renew_retry: RETRY,
        relist_period: Duration::from_secs(60),
        stale_hold: STALE_HOLD,
        ..Timing::default()
    }
}

/// With so many IPv6 subnets, or without IPv6 if there are none.
fn network(has_v4: bool, v6_subnets: u16) -> NetworkConfig {
    let v4 = config("10.5.0.0/16", 24, "10.5.1.0", "10.5.10.0");
    let v6 = (v6_subnets > 0).then(|| SubnetRange {
        network: Prefix::new(V6_NETWORK, 48).unwrap(),
        subnet_length_bits: 64,
        subnet_min: v6_subnet(1),
        subnet_max: v6_subnet(v6_subnets),
    });
    let ranges = Families::new(v4.v4().filter(|_| has_v4), v6).unwrap_or(v4.ranges);
    NetworkConfig { ranges, ..v4 }
}

const V6_NETWORK: Ipv6Addr = v6_subnet(0);

const fn v6_subnet(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xFD00, 5, 0, number, 0, 0, 0, 0)
}

/// Nodes, their store, and the time.
#[derive(Debug)]
struct World {
    random: fastrand::Rng,
    time: Duration,
    store: SimStore,
    nodes: Vec<Node>,
    /// Requests that their nodes gave up, and that the network carries out all the same.
    late: Vec<(usize, InFlight)>,
    has_operator: bool,
    foreigners: u8,
    flannels: Vec<Flannel>,
    /// Whether nodes have IPv4.
    has_v4: bool,
    /// How many IPv6 subnets there are in this schedule; none if it has IPv4 alone.
    v6_subnets: u16,
    /// The same by the configuration that the next start of a twin reads: they have one.
    twins_v6_subnets: u16,
    is_told: bool,
}

impl World {
    fn new(seed: u64, is_told: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let has_v4 =
            !seed.is_multiple_of(5) && std::env::var_os("WEFT_MODEL_WITHOUT_IPV4").is_none();
        let count = random.u8(2..=5);
        let offset = |_| Duration::from_secs(random.u64(100..100_000));
        let offsets: Vec<_> = (0..count).map(offset).collect();
        let has_ids = random.bool();
        let named = |number| {
            let (hostname, boot_id) = ("node".to_owned(), format!("boot {number}"));
            let machine_id = has_ids.then(|| format!("machine {number}"));
            NodeIdentity { hostname, machine_id, boot_id }
        };
        let nodes = (1..=count).zip(offsets);
        let mut nodes: Vec<_> =
            nodes.map(|(number, it)| Node::new(number, has_v4, named(number), it)).collect();
        if random.u8(..3) == 0 {
            // Another machine with the addresses of the first, or a copy of it.
            let (offset, is_copy) = (nodes[0].boot_offset, random.bool());
            nodes[1] = Node::new(1, has_v4, named(if is_copy { 1 } else { 2 }), offset);
            for node in &mut nodes[..2] {
                node.has_twin = true;
            }
        }
        let has_operator = random.bool();
        let (time, store, late) = (Duration::ZERO, SimStore::new(), Vec::new());
        // flannel's nodes cannot tell each other apart without IPv4.
        let flannels = if has_v4 && random.u8(..3) == 0 { random.u8(1..=2) } else { 0 };
        let v6_subnets =
            if !has_v4 || random.u8(..3) > 0 { u16::from(count + flannels) + 1 } else { 0 };
        let mut some = || if !has_v4 || random.bool() { v6_subnets } else { 0 };
        let twins_v6_subnets = some();
        nodes.iter_mut().for_each(|node| node.v6_subnets = some());
        let flannels = (1..=flannels).map(|number| Flannel::new(number, some())).collect();
        Self {
            random,
            time,
            store,
            nodes,
            late,
            has_operator,
            foreigners: 0,
            flannels,
            has_v4,
            v6_subnets,
            twins_v6_subnets,
            is_told,
        }
    }

    fn log(&self, index: usize, what: &str) {
        if self.is_told {
            println!("{:?} {:?} node {index} {what}", self.time, self.store.point());
        }
    }

    fn run(&mut self) {
        for index in 0..self.nodes.len() {
            self.start(index);
        }
        if self.random.u8(..8) > 0 {
            self.calm(Duration::from_secs(2));
        }
        for _ in 0..self.random.u32(60..160) {
            self.step();
            self.check();
        }
        self.settle();
    }

    fn start(&mut self, index: usize) {
        let Life::Down = self.nodes[index].life else { return };
        self.read_config(index);
        // A cache of another address or configuration is refused, or with the own address in it.
        let (address, config) = (self.nodes[index].address, self.nodes[index].config());
        let known = self.nodes[index].known.clone();
        let known = known.filter(|known| known.own.attributes.node_address() == address);
        let known = known.filter(|known| known.networks == config.networks());
        let is_own = |peer: &Arc<Lease>| peer.attributes.node_address() == address;
        let known = known.filter(|known| !known.peers.values().any(is_own));
        let known = known.filter(|_| self.random.bool());
        if let Some(known) = known {
            self.start_from_cache(index, known);
        } else {
            let node = &mut self.nodes[index];
            node.life = Life::Acquiring { at: node.boot(self.time) };
        }
    }

    /// Twins have one configuration.
    fn read_config(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.has_twin {
            node.v6_subnets = self.twins_v6_subnets;
        }
    }

    fn step(&mut self) {
        let index = self.random.usize(..self.nodes.len());
        match self.random.u8(..100) {
            0..=59 => {
                let number = self.random.usize(..self.nodes.len() + self.flannels.len());
                let acted = match number.checked_sub(self.nodes.len()) {
                    Some(number) => self.act_as_flannel(number, true),
                    None => self.act(number, true),
                };
                if !acted {
                    self.pass(None);
                }
            }
            60..=66 => {
                let most = [200, 3_000, 20_000, 45_000];
                let most = most[self.random.usize(..most.len())];
                let pass = Duration::from_millis(self.random.u64(1..most));
                self.pass(Some(self.time + pass));
            }
            67..=74 => {
                let calm = Duration::from_millis(self.random.u64(50..3_000));
                self.calm(calm);
            }
            75..=76 => self.crash(index),
            77..=79 => {
                self.nodes[index].is_paused = true;
                self.log(index, "is paused");
            }
            80..=81 => self.nodes[index].is_cut = true,
            82 => self.store.is_down = true,
            83..=88 => self.heal(index),
            89 => {
                self.store.compacted = self.store.revision;
                self.log(index, "saw a compaction");
            }
            90 => self.nodes[index].wall_offset = self.random.u64(..100_000_000),
            91..=92 => self.carry_out_late(),
            93 if !self.flannels.is_empty() => {
                let number = self.random.usize(..self.flannels.len());
                let v6_subnets = self.other_families(self.flannels[number].v6_subnets);
                let at = self.time + Duration::from_secs(self.random.u64(..20));
                self.flannels[number].restart(v6_subnets, at);
            }
            94 => self.move_node(index),
            95..=99 if self.has_operator => self.operate(),
            _ => {}
        }
    }

    /// Ends what is wrong with a node, after a while.
    fn heal(&mut self, index: usize) {
        if self.nodes[index].is_paused {
            let pause = Duration::from_secs(self.random.u64(..120));
            self.pass(Some(self.time + pause));
        }
        let node = &mut self.nodes[index];
        (node.is_paused, node.is_cut, self.store.is_down) = (false, false, false);
        self.start(index);
        self.log(index, "is well again");
    }

    /// Lets everybody work undisturbed, as far as what is wrong already allows it.
    fn calm(&mut self, time: Duration) {
        let end = self.time + time;
        let mut steps = 0;
        while self.time < end {
            let mut idle = true;
            for index in 0..self.nodes.len() {
                while self.act(index, false) {
                    self.check();
                    (idle, steps) = (false, steps + 1);
                    assert!(steps < CALM_STEPS_MAX, "it goes round and round");
                }
            }
            for number in 0..self.flannels.len() {
                while self.act_as_flannel(number, false) {
                    idle = false;
                }
            }
            if idle {
                self.pass(None);
            }
        }
    }

    /// Lets time pass until `to`, or until somebody has something to do.
    fn pass(&mut self, to: Option<Duration>) {
        let running = self.nodes.iter().filter(|node| !node.is_paused);
        let flannels = self.flannels.iter().filter(|_| !self.store.is_down);
        let flannels = flannels.map(|flannel| flannel.at);
        let next = running.filter_map(Node::wake).chain(self.store.next_end()).chain(flannels);
        let next = next.min();
        let next = to.or(next).unwrap_or(self.time + Duration::from_secs(1));
        self.time = self.time.max(next);
        self.store.advance(self.time);
    }

    /// One step of one node. Returns whether there was one to make.
    fn act(&mut self, index: usize, faulty: bool) -> bool {
        let node = &mut self.nodes[index];
        if node.is_paused {
            return false;
        }
        let waits = node.request.as_ref().map(|request| request.answer.is_some());
        let first = !faulty || self.random.bool();
        match waits {
            Some(false) if first => {
                self.carry_out(index, faulty);
                return true;
            }
            Some(true) if first => {
                self.deliver_answer(index);
                return true;
            }
            Some(_) | None => {}
        }
        if node.runs() && node.keep_at <= self.time {
            self.keep_claim(index, faulty);
            return true;
        }
        let until = match faulty {
            true if self.random.u8(..4) == 0 => self.random.i64(..=self.store.revision),
            _ => self.store.revision,
        };
        let loses = faulty && self.random.u8(..40) == 0;
        if self.deliver_changes(index, until, loses) {
            return true;
        }
        let node = &mut self.nodes[index];
        if node.wake().is_none_or(|at| at > self.time) {
            return false;
        }
        match node.life {
            Life::Acquiring { .. } => {
                if !node.is_cut && !self.store.is_down {
                    self.store.keep_lease(&mut node.claims, self.time);
                }
                node.ask(Op::Look, self.time);
            }
            Life::Down | Life::Running(_) => self.handle(index, super::Event::Timer),
        }
        true
    }

    /// The request reaches the store, or not, or twice, or its answer is lost.
    fn carry_out(&mut self, index: usize, faulty: bool) {
        let (time, World { nodes, store, random, late, .. }) = (self.time, self);
        let node = &mut nodes[index];
        let Some(request) = node.request.as_mut() else { return };
        let (op, asked, cluster) = (request.op.clone(), request.asked, node.cluster);
        let (claims, address, past) = (request.claims.clone(), request.address, request.past);
        let moment = Moment { time, asked, cluster, address, past };
        let mut execute = || execute(store, &op, &claims, moment);
        let reachable = !node.is_cut;
        let fault = if faulty { random.u8(..30) } else { u8::MAX };
        let answer = match fault {
            _ if !reachable => failure(&op),
            0 | 1 => {
                execute();
                failure(&op)
            }
            2 | 3 => {
                let claims = request.claims.clone();
                let (run, again) = (node.run, op.clone());
                let answer = None;
                let again = InFlight { op: again, asked, claims, address, run, past, answer };
                late.push((index, again));
                failure(&op)
            }
            4 if !matches!(op, Op::Watch { .. }) => {
                execute();
                execute()
            }
            5 => failure(&op),
            _ => execute(),
        };
        let answer: Answer = if store.is_down { failure(&op) } else { answer };
        request.answer = Some((answer, store.point()));
    }

    /// Keeps the claim, beside all that goes on; the answer may be lost.
    fn keep_claim(&mut self, index: usize, faulty: bool) {
        let (time, World { nodes, store, random, .. }) = (self.time, &mut *self);
        let node = &mut nodes[index];
        node.keep_at = time + Duration::from_secs(3);
        if node.is_cut || store.is_down {
            return;
        }
        let mut claims = node.claims.clone();
        let kept = store.keep_claim(&mut claims, node.address, time);
        if faulty && random.u8(..15) == 0 {
            return;
        }
        claims.is_alarmed = matches!(kept, Err(StoreError::Duplicate { .. }));
        let is_gone = node.claims.lease.is_some_and(|lease| store.end_of(lease).is_none());
        let is_lost = is_gone && !node.claims.is_of_before(node.address);
        node.claims = claims;
        node.claim_seen = store.point();
        if kept.is_ok() {
            node.keep_at = time + Duration::from_secs(10);
        }
        self.log(index, &format!("keeps its claim: {kept:?}"));
        if is_lost {
            self.handle(index, super::Event::Doubted);
        }
    }

    /// No more faults: everything is delivered, and everybody has to agree in the end.
    fn settle(&mut self) {
        self.log(usize::MAX, "faults are over");
        self.late.clear();
        self.store.is_down = false;
        for index in 0..self.nodes.len() {
            self.nodes[index].is_cut = false;
            self.nodes[index].is_paused = false;
            self.start(index);
        }
        self.calm(SETTLING);
        self.check_settled();
        self.hand_over();
    }

    /// The twin that has the subnet ends for good, and the other gets one.
    fn hand_over(&mut self) {
        let owns = |node: &Node| node.has_twin && node.believes(self.time).is_some();
        let Some(first) = self.nodes.iter().position(owns) else { return };
        self.nodes[first].crash();
        self.calm(HANDING_OVER);
        // Its own of before, if that is there still, or that of its address; unless reservations
        // and what can't be read have all.
        let has_one = self.nodes[1 - first].believes(self.time).is_some();
        let listed = self.store.list();
        assert!(has_one || self.choose(1 - first, &listed).is_none(), "a clone gets no subnet");
    }
}

#[test]
fn every_schedule_keeps_the_invariants() {
    if let Some(seed) = std::env::var("WEFT_MODEL_SEED").ok().and_then(|text| text.parse().ok()) {
        return World::new(seed, true).run();
    }
    let began = Instant::now();
    let schedules = std::env::var("WEFT_MODEL_SCHEDULES").ok().and_then(|text| text.parse().ok());
    let schedules = schedules.unwrap_or(SCHEDULES);
    for seed in 0..schedules {
        let run = || World::new(seed, false).run();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            println!("WEFT_MODEL_SEED={seed} cargo test model    replays this");
            resume_unwind(panic);
        }
    }
    println!("{schedules} schedules in {:?}", began.elapsed());
}

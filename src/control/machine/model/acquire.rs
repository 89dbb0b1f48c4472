//! How a simulated node gets its subnet, by the same choices as `acquire`.

use super::super::{Event, Machine};
use super::node::{Answer, Life, Op};
use super::{World, timing};
use crate::control::choose::{free_of, free_subnets, held_by};
use crate::control::lease::Lease;
use crate::control::snapshot::{Granted, OwnLease, Snapshot};
use crate::route::Prefixes;

impl World {
    /// The next step of acquiring.
    pub(super) fn acquire_on(&mut self, index: usize, answer: Answer) {
        let time = self.time;
        let node = &mut self.nodes[index];
        match answer {
            Answer::Looked(Ok(found)) => match node.claims.validate(node.address, found.as_ref()) {
                Ok(None) => node.ask(Op::List, time),
                Ok(Some(revision)) => node.ask(Op::Take { revision }, time),
                Err(_) => node.try_later(time),
            },
            Answer::Taken(Ok(revision)) => {
                node.claims.written(node.address, revision);
                node.ask(Op::List, time);
            }
            Answer::Listed(Ok(snapshot)) => {
                let op = self.choose(index, &snapshot);
                let node = &mut self.nodes[index];
                match op {
                    Some(op) => node.ask(op, time),
                    None => node.pause(time, 10_000),
                }
            }
            Answer::Written(Ok(Granted { lease, expires })) => {
                node.previous = Some(lease.subnets);
                // What acquiring listed, the machine has not seen.
                node.mirror = (0, 0);
                node.keep_at = time;
                let own = OwnLease { lease, expires, networks: node.config().networks() };
                let random = fastrand::Rng::with_seed(self.random.u64(..));
                let machine = Machine::new(own, timing(), random, node.now(time));
                node.life = Life::Running(Box::new(machine));
                self.handle(index, Event::Timer);
            }
            Answer::Listed(Err(_))
            | Answer::Written(Err(_))
            | Answer::Opened(_)
            | Answer::Looked(Err(_))
            | Answer::Taken(Err(_)) => node.try_later(time),
        }
    }

    /// What a node that starts writes by a listing; `None` if nothing is free.
    pub(super) fn choose(&mut self, index: usize, snapshot: &Snapshot) -> Option<Op> {
        let node = &self.nodes[index];
        let (config, attributes) = (node.config(), node.attributes());
        let claimed = node.claims.still_claimed(node.address);
        let held = held_by(&snapshot.leases, &attributes, &config, node.previous);
        if let Some(held) = held.filter(|held| config.is_leasable(held.subnets)) {
            let held = Lease { attributes, ..held.clone() };
            return Some(Op::Update { held, claimed });
        }
        let taken: Vec<_> = snapshot.taken_beside(held, config.networks()).collect();
        let kept = match (held.map(|held| held.subnets), node.previous) {
            (Some(kept), Some(previous)) => Some(kept.or(previous)),
            (kept, previous) => kept.or(previous),
        };
        let kept = kept.and_then(|kept| config.leasable(free_of(kept, &taken)?));
        let (mut v4, mut v6) = (None, None);
        if let Some(range) = &config.v4() {
            let taken = taken.iter().filter_map(|it| it.v4()).collect();
            let free = free_subnets(range, taken, 100);
            let picked = kept.and_then(Prefixes::v4);
            v4 = Some(picked.or_else(|| self.random.choice(&free).copied())?);
        }
        if let Some(range) = &config.v6() {
            let taken = taken.iter().filter_map(|it| it.v6()).collect();
            let free = free_subnets(range, taken, 100);
            let picked = kept.and_then(Prefixes::v6);
            v6 = Some(picked.or_else(|| self.random.choice(&free).copied())?);
        }
        let vacancy = snapshot.vacancy(held.cloned());
        let wanted = Lease::wanted(Prefixes::new(v4, v6)?, attributes);
        Some(Op::Create { wanted, vacancy: Box::new(vacancy), claimed })
    }
}

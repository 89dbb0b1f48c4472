//! What goes wrong, and what is done to a cluster: crashes, late requests, other addresses, and
//! what somebody writes by hand.

use std::net::Ipv4Addr;

use super::super::Event;
use super::node::{InFlight, Life, Moment, execute};
use super::{OUTLIVES, World, network, v6_subnet};
use crate::control::lease::LeaseAttributes;
use crate::route::{Prefix, Prefixes};

impl World {
    pub(super) fn crash(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if let Some(request) = node.request.take().filter(|request| request.answer.is_none()) {
            self.late.push((index, request));
        }
        let node = &mut self.nodes[index];
        // Stopped, and not crashed.
        if self.random.bool() && !node.is_cut && !self.store.is_down {
            self.store.release_claims(&node.claims);
        }
        node.crash();
        if self.random.bool() {
            node.claims.node.boot_id = format!("boot {}", self.random.u64(..));
        }
        let has_twin = self.nodes[index].has_twin;
        if has_twin {
            self.twins_v6_subnets = self.other_families(self.twins_v6_subnets);
        } else {
            self.nodes[index].v6_subnets = self.other_families(self.nodes[index].v6_subnets);
        }
        self.log(index, "crashed");
        if self.random.u8(..4) > 0 {
            self.start(index);
        }
    }

    /// Those of the other configuration, or not.
    pub(super) fn other_families(&mut self, v6_subnets: u16) -> u16 {
        let stays = self.random.u8(..4) > 0 || !self.has_v4;
        if stays { v6_subnets } else { self.v6_subnets - v6_subnets }
    }

    /// Gives a node another address, of which it has two.
    pub(super) fn move_node(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if let Life::Acquiring { .. } = node.life {
            return;
        }
        node.address =
            if node.address == node.addresses[0] { node.addresses[1] } else { node.addresses[0] };
        // What it was told of is the claim of the other address.
        node.claim_seen = (0, 0);
        let attributes = node.attributes();
        self.log(index, &format!("moves to {}", attributes.node_address()));
        self.handle(index, Event::Moved(attributes));
    }

    pub(super) fn carry_out_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let at = self.random.usize(..self.late.len());
        let (index, request) = self.late.swap_remove(at);
        let InFlight { op, asked, claims, address, run, past, .. } = request;
        let node = &self.nodes[index];
        if run != node.run && asked + OUTLIVES < node.boot(self.time) {
            return;
        }
        let moment = Moment { time: self.time, asked, cluster: node.cluster, address, past };
        execute(&mut self.store, &op, &claims, moment);
        self.log(index, &format!("has a late {op:?}"));
    }

    /// Somebody writes to the store by hand, or loses its data.
    pub(super) fn operate(&mut self) {
        let taken: Vec<_> = self.store.entries.keys().copied().collect();
        let Some(subnet) = self.random.choice(&taken).copied() else { return };
        let value = self.store.entries.get(&subnet).and_then(|entry| entry.value.clone());
        let kind = self.random.u8(..9);
        self.log(usize::MAX, &format!("operator {kind} at {subnet}"));
        match kind {
            0 => self.store.operator_deletes(&[subnet]),
            1 => self.store.operator_puts(subnet, None, self.random.bool()),
            2 | 3 => self.store.operator_puts(subnet, value, false),
            4 => {
                let value = value.map(|mut value| {
                    value.backend_type = "vxlan".into();
                    value
                });
                self.store.operator_puts(subnet, value, true);
            }
            5 if self.foreigners == 0 => {
                self.foreigners += 1;
                let foreign = Ipv4Addr::new(198, 51, 100, self.foreigners);
                let value = LeaseAttributes::udp(foreign);
                self.store.operator_puts(subnet, Some(value), false);
            }
            6 => self.store.operator_deletes(&taken),
            7 if self.foreigners < 2 => {
                self.foreigners += 1;
                let beside = self.beside(subnet);
                if !self.store.entries.contains_key(&beside) {
                    self.store.operator_puts(beside, None, false);
                }
            }
            _ => {
                let revision = self.random.i64(1..=self.store.revision * 2);
                let network = network(self.has_v4, self.v6_subnets).networks();
                self.store.wipe(revision, self.random.bool(), network);
                self.late.clear();
            }
        }
    }

    /// A key that names one of these subnets, of whichever family, and another of the other.
    fn beside(&mut self, subnets: Prefixes) -> Prefixes {
        let (v4, v6) = (subnets.v4(), subnets.v6());
        let other = Prefix::new(v6_subnet(self.random.u16(1..=self.v6_subnets + 1)), 64);
        let third = self.random.u8(1..=10);
        match (v4, v6) {
            (Some(v4), Some(_)) if self.random.bool() => v4.into(),
            (_, Some(_)) if self.random.bool() => {
                Prefixes::new(Prefix::new(Ipv4Addr::new(10, 5, third, 0), 24), v6).unwrap()
            }
            _ => Prefixes::new(v4, other).unwrap(),
        }
    }
}

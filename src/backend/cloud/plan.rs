//! What to change in a route table of a cloud, by what is in it. Pure.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use crate::config::network::SubnetRange;
use crate::route::Prefix;

/// Whose route weftd keeps, and where its former ones may lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Own {
    /// This node's subnet.
    pub(super) subnet: Prefix,
    /// From which subnets nodes get theirs.
    pub(super) range: SubnetRange,
    /// The interface's address.
    pub(super) address: Ipv4Addr,
}

/// Where a route leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leads {
    /// To this instance.
    Here,
    /// To an instance or interface that is gone or stopped: a black hole.
    Nowhere,
    /// To another instance or interface.
    Elsewhere,
    /// To where weftd changes nothing: it is the cloud's own route, or an operator's to a gateway
    /// or another network.
    Fixed,
}

/// A route as the provider tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// To where.
    pub(super) destination: Prefix,
    /// By way of what.
    pub(super) leads: Leads,
    /// What the provider knows it by, or the next hop, where deleting asks for that.
    pub(super) id: String,
    /// The next hop, as operators are told.
    pub(super) hop: String,
}

/// A route table with what concerns weftd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    /// What the provider knows it by.
    pub(super) id: String,
    /// Its routes to IPv4 prefixes.
    pub(super) entries: Vec<Entry>,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// A route that nobody needs any more goes.
    Delete(Entry),
    /// The own route leads elsewhere.
    Replace(Entry),
    /// The own route is not there.
    Create,
}

/// What is known of the leases.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leases<'a> {
    /// The others' subnets, once all of them are known.
    pub(super) leased: Option<&'a BTreeSet<Prefix>>,
    /// Whether the store says that the own subnet is this node's still.
    pub(super) is_own_confirmed: bool,
}

/// Why the own route can't be put right at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hindrance {
    /// A route is in the way that weftd never replaces.
    Fixed,
    /// It leads to another instance, which may have the subnet meanwhile.
    Unconfirmed,
}

impl Hindrance {
    /// As an operator is told.
    pub(super) fn told(self, table: &str, subnet: Prefix) -> String {
        match self {
            Self::Fixed => format!(
                "the route to {subnet} in table {table} is the cloud's own, or leads to a gateway \
                 or another network, and stays: choose another Network, or delete that route"
            ),
            Self::Unconfirmed => format!(
                "the route to {subnet} in table {table} leads to another instance, and stays until \
                 the store confirms that this node has the subnet still"
            ),
        }
    }
}

/// What is to become of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// What makes it right. Deletions come first, for a table may be full.
    pub(super) changes: Vec<Change>,
    /// Why the own route stays wrong, if it does.
    pub(super) hindrance: Option<Hindrance>,
    /// A route that leads a part of the own subnet elsewhere, and stays: somebody may want it.
    pub(super) stray: Option<Entry>,
}

impl Plan {
    /// Whether the own route is right as it is.
    pub(super) fn is_in_place(&self) -> bool {
        let is_of_others = |change: &Change| matches!(change, Change::Delete(_));
        self.hindrance.is_none() && self.changes.iter().all(is_of_others)
    }
}

/// What makes `entries` right. Besides the own route only routes go that lead to subnets which
/// nodes lease here, and nobody has leased: those of this instance, left from an earlier lease, and
/// black holes. As long as it is unknown who has leased what, none.
pub(super) fn plan(
    entries: &[Entry],
    own: &Own,
    Leases { leased, is_own_confirmed }: Leases<'_>,
) -> Plan {
    let is_stale = |entry: &&Entry| {
        let is_needed = leased.is_none_or(|all| {
            entry.destination == own.subnet
                || all.iter().any(|subnet| entry.destination.overlaps(*subnet))
        });
        own.range.leasable(entry.destination)
            && !is_needed
            && matches!(entry.leads, Leads::Here | Leads::Nowhere)
    };
    let is_stray = |entry: &&Entry| {
        let is_part = own.subnet.covers(entry.destination) && entry.destination != own.subnet;
        is_part && entry.leads != Leads::Here
    };
    let stray = entries.iter().find(is_stray).cloned();
    let mut changes: Vec<_> =
        entries.iter().filter(is_stale).cloned().map(Change::Delete).collect();
    let of_own = || entries.iter().filter(|entry| entry.destination == own.subnet);
    let leads = |to: Leads| of_own().any(|entry| entry.leads == to);
    // Some clouds have several routes to one prefix.
    let hindrance = match of_own().next() {
        _ if leads(Leads::Here) => None,
        _ if leads(Leads::Fixed) => Some(Hindrance::Fixed),
        _ if leads(Leads::Elsewhere) && !is_own_confirmed => Some(Hindrance::Unconfirmed),
        None => {
            changes.push(Change::Create);
            None
        }
        Some(entry) => {
            changes.push(Change::Replace(entry.clone()));
            None
        }
    };
    Plan { changes, hindrance, stray }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// In 10.5.0.0/16, of which 10.5.1.0/24 and the like are leased, up to 10.5.250.0/24.
    pub(in crate::backend::cloud) fn own() -> Own {
        let range = SubnetRange {
            network: "10.5.0.0/16".parse().unwrap(),
            subnet_length_bits: 24,
            subnet_min: Ipv4Addr::new(10, 5, 1, 0),
            subnet_max: Ipv4Addr::new(10, 5, 250, 0),
        };
        let subnet = "10.5.3.0/24".parse().unwrap();
        Own { subnet, range, address: Ipv4Addr::new(172, 31, 0, 3) }
    }

    fn entry(destination: &str, leads: Leads) -> Entry {
        let (id, hop) = (destination.to_owned(), "eni-9".to_owned());
        Entry { destination: destination.parse().unwrap(), leads, id, hop }
    }

    /// With a lease that is confirmed.
    fn made(entries: &[Entry], own: &Own, leased: Option<&BTreeSet<Prefix>>) -> Vec<Change> {
        plan(entries, own, Leases { leased, is_own_confirmed: true }).changes
    }

    fn leased(subnets: &[&str]) -> BTreeSet<Prefix> {
        subnets.iter().map(|it| it.parse().unwrap()).collect()
    }

    #[test]
    fn the_own_route_is_made_or_led_here_and_left_alone_where_it_is_right() {
        let none = leased(&[]);
        let of = |entries: &[Entry]| made(entries, &own(), Some(&none));
        assert_eq!(of(&[]), [Change::Create]);
        assert_eq!(of(&[entry("10.5.3.0/24", Leads::Here)]), []);
        for leads in [Leads::Elsewhere, Leads::Nowhere] {
            let wrong = entry("10.5.3.0/24", leads);
            assert_eq!(of(std::slice::from_ref(&wrong)), [Change::Replace(wrong)]);
        }
        let [fixed, here] = [Leads::Fixed, Leads::Here].map(|it| entry("10.5.3.0/24", it));
        assert_eq!(of(&[fixed, here]), [], "it is there beside another, and is made again");
    }

    #[test]
    fn what_is_not_weftd_s_stays_and_is_told() {
        let none = leased(&[]);
        let of = |leads, is_own_confirmed| {
            let leases = Leases { leased: Some(&none), is_own_confirmed };
            let plan = plan(&[entry("10.5.3.0/24", leads)], &own(), leases);
            (plan.changes, plan.hindrance)
        };
        for is_own_confirmed in [true, false] {
            let found = of(Leads::Fixed, is_own_confirmed);
            assert_eq!(found, (vec![], Some(Hindrance::Fixed)), "the VPC's own route is gone");
            assert_eq!(of(Leads::Nowhere, is_own_confirmed).0.len(), 1, "a black hole stays");
        }
        let found = of(Leads::Elsewhere, false);
        assert_eq!(found, (vec![], Some(Hindrance::Unconfirmed)), "the new owner is cut off");
        let stale = [entry("10.5.9.0/24", Leads::Fixed)];
        let leases = Leases { leased: Some(&none), is_own_confirmed: true };
        assert_eq!(plan(&stale, &own(), leases).changes, [Change::Create], "the cloud's own goes");
    }

    #[test]
    fn nothing_goes_that_is_not_the_overlays() {
        let entries = [
            entry("10.5.3.0/24", Leads::Here),
            entry("0.0.0.0/0", Leads::Here),
            entry("10.5.0.0/16", Leads::Here),
            entry("10.0.0.0/8", Leads::Nowhere),
            entry("192.168.0.0/16", Leads::Nowhere),
            entry("10.5.4.0/24", Leads::Elsewhere),
            entry("10.5.5.0/24", Leads::Nowhere),
            entry("10.5.6.0/24", Leads::Nowhere),
            entry("10.5.7.0/24", Leads::Here),
            // Nodes lease nothing of these lengths, and nothing beyond the bounds.
            entry("10.5.77.5/32", Leads::Here),
            entry("10.5.80.0/28", Leads::Nowhere),
            entry("10.5.90.0/23", Leads::Here),
            entry("10.5.128.0/17", Leads::Here),
            entry("10.5.0.0/24", Leads::Here),
            entry("10.5.251.0/24", Leads::Nowhere),
        ];
        let stale = [7, 8].map(|at: usize| Change::Delete(entries[at].clone()));
        let known = leased(&["10.5.5.0/24"]);
        assert_eq!(made(&entries, &own(), Some(&known)), stale);
        assert_eq!(made(&entries, &own(), None), [], "gone before the leases are known");
    }

    #[test]
    fn a_part_of_the_own_subnet_that_leads_elsewhere_is_told_and_stays() {
        let of = |destination, leads| {
            let entries = [entry("10.5.3.0/24", Leads::Here), entry(destination, leads)];
            let leases = Leases { leased: Some(&leased(&[])), is_own_confirmed: true };
            let plan = plan(&entries, &own(), leases);
            assert!(plan.is_in_place() && plan.changes.is_empty(), "{plan:?}");
            plan.stray.map(|entry| entry.destination.to_string())
        };
        for leads in [Leads::Elsewhere, Leads::Nowhere, Leads::Fixed] {
            assert_eq!(of("10.5.3.0/25", leads).as_deref(), Some("10.5.3.0/25"), "{leads:?}");
        }
        assert_eq!(of("10.5.3.7/32", Leads::Here), None, "it leads to this node all the same");
        assert_eq!(of("10.5.2.0/25", Leads::Elsewhere), None, "another node's");
        assert_eq!(of("10.5.0.0/16", Leads::Elsewhere), None, "the own one goes before it");
    }

    /// A table as the changes leave it.
    fn applied(entries: &[Entry], changes: &[Change]) -> Vec<Entry> {
        let mut after = entries.to_vec();
        for change in changes {
            match change {
                Change::Delete(gone) => after.retain(|entry| entry != gone),
                Change::Replace(_) => after
                    .iter_mut()
                    .filter(|entry| entry.destination == own().subnet)
                    .for_each(|entry| entry.leads = Leads::Here),
                Change::Create => after.push(entry("10.5.3.0/24", Leads::Here)),
            }
        }
        after
    }

    fn any_entry() -> impl Strategy<Value = Entry> {
        let leads = prop_oneof![Just(Leads::Here), Just(Leads::Nowhere), Just(Leads::Elsewhere)];
        (4u8..7, 0u8..8, leads)
            .prop_map(|(second, third, leads)| entry(&format!("10.{second}.{third}.0/24"), leads))
    }

    proptest! {
        #[test]
        fn one_round_is_enough_and_takes_nothing_of_others(
            entries in proptest::collection::vec(any_entry(), 0..20),
            known in proptest::collection::btree_set(0u8..8, 0..4),
        ) {
            let mut seen = BTreeSet::new();
            let entries: Vec<_> =
                entries.into_iter().filter(|it| seen.insert(it.destination)).collect();
            let known: BTreeSet<Prefix> =
                known.iter().map(|third| format!("10.5.{third}.0/24").parse().unwrap()).collect();
            let after = applied(&entries, &made(&entries, &own(), Some(&known)));
            prop_assert_eq!(made(&after, &own(), Some(&known)), vec![]);
            // The slow twin: entry by entry, by the rule as documents say it.
            for entry in &entries {
                let text = entry.destination.to_string();
                let may_go = text.starts_with("10.5.")
                    && text != "10.5.3.0/24"
                    && text != "10.5.0.0/24"
                    && !known.contains(&entry.destination)
                    && entry.leads != Leads::Elsewhere;
                let stays = after.iter().any(|it| it.destination == entry.destination);
                prop_assert_eq!(stays, !may_go, "{}", text);
            }
        }
    }
}

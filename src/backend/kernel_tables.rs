//! What a backend of the kernel's has set in the tables of one family, and the edits that make them
//! what they must be.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::host::listing::FamilyListing;
use crate::host::netlink::NetlinkError;
use crate::host::state::{KernelFamily, Route};
use crate::host::tables::edit::apply_all;
use crate::host::tables::{Desired, Diff, Edit, Ways};
use crate::route::Prefix;

/// What is repaired again within this time, somebody else removes.
const REMOVED_AGAIN: Duration = Duration::from_secs(60);

/// The tables of one family.
#[derive(Debug)]
pub(super) struct FamilyTables<A: KernelFamily> {
    /// Where our routes may lie.
    pub(super) networks: Vec<Prefix<A>>,
    /// What the last comparison left in place.
    pub(super) set: Ways<A>,
    /// When what somebody had removed was last set again.
    repaired: BTreeMap<Prefix<A>, Instant>,
}

/// What came of a comparison.
#[derive(Debug)]
pub(super) struct Made<A: KernelFamily> {
    /// Those that could not be set up in full.
    pub(super) failed: BTreeSet<Prefix<A>>,
    /// Those whose entries or routes somebody removes again and again.
    pub(super) removed: BTreeSet<Prefix<A>>,
    /// Those that somebody had changed.
    pub(super) repaired: Vec<Prefix<A>>,
    /// Why some could not be set up.
    pub(super) refused: Vec<NetlinkError>,
    /// Why something is still there.
    pub(super) kept: Vec<NetlinkError>,
}

impl<A: KernelFamily> FamilyTables<A> {
    pub(super) fn new(networks: Vec<Prefix<A>>) -> Self {
        Self { networks, set: Ways::new(), repaired: BTreeMap::new() }
    }

    /// Gives peers what they lack by `diff`, and then `removes` what no peer asks for.
    pub(super) async fn make(
        &mut self,
        mut diff: Diff<A>,
        desired: &Desired<A>,
        found: &FamilyListing<'_, A>,
        removes: bool,
    ) -> Made<A> {
        let (mut failed, mut removed) = (BTreeSet::new(), BTreeSet::new());
        let (mut repaired, mut refused) = (Vec::new(), Vec::new());
        self.repaired.retain(|_, at| at.elapsed() < REMOVED_AGAIN);
        for (edit, result) in apply_all(&diff.sets).await {
            let Edit::Set(step) = edit else { continue };
            if let Err(error) = result {
                failed.insert(step.destination);
                refused.push(error);
            } else if self.set.get(&step.destination) == desired.ways.get(&step.destination) {
                repaired.push(step.destination);
                if self.repaired.insert(step.destination, Instant::now()).is_some() {
                    removed.insert(step.destination);
                }
            }
        }
        if desired.device.is_none() {
            // A peer that moved to where no route leads must not get its packets at the old place.
            let old = found.routes.iter().filter(|route| desired.owns(route));
            let old = old.filter(|route| failed.contains(&route.destination));
            diff.removals.extend(old.filter_map(Route::removal).map(Edit::RemoveRoute));
        }
        let results = if removes { apply_all(&diff.removals).await } else { Vec::new() };
        let kept = results.into_iter().filter_map(|(_, result)| result.err()).collect();
        self.set.clone_from(&desired.ways);
        self.set.retain(|subnet, _| !failed.contains(subnet));
        Made { failed, removed, repaired, refused, kept }
    }
}

impl<A: KernelFamily> Made<A> {
    pub(super) fn is_complete(&self) -> bool {
        self.failed.is_empty() && self.kept.is_empty()
    }

    /// Those that are not set up, or not for long.
    pub(super) fn lacking(&self) -> BTreeSet<Prefix<A>> {
        &self.failed | &self.removed
    }
}

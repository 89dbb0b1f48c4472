//! What a backend of the kernel's has set in the tables of one family, and the edits that make them
//! what they must be.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::backend::family::CarriedFamily;
use crate::backend::host_gw;
use crate::backend::status::{Reporter, Unusable};
use crate::backend::tunnel_device::TunnelDevice;
use crate::control::lease::Lease;
use crate::failure::{LogOnce, with_causes};
use crate::host::follower::HostFollower;
use crate::host::interface::ExternalInterface;
use crate::host::listing::{FamilyListing, Listing};
use crate::host::netlink::{NetlinkError, neighbours};
use crate::host::state::{KernelFamily, Route};
use crate::host::tables::edit::apply_all;
use crate::host::tables::{Desired, Diff, Edit, Ways};
use crate::route::Prefix;

/// What is repaired again within this time, somebody else removes.
const REMOVED_AGAIN: Duration = Duration::from_secs(60);

/// The tables of one family.
#[derive(Debug)]
pub(super) struct FamilyTables<A: CarriedFamily> {
    /// Where our routes may lie.
    networks: Vec<Prefix<A>>,
    /// The overlay's own device, if it has one.
    pub(super) device: Option<TunnelDevice<A>>,
    /// What the last comparison left in place.
    pub(super) set: Ways<A>,
    /// When what somebody had removed was last set again.
    repaired: BTreeMap<Prefix<A>, Instant>,
    logged: BTreeMap<&'static str, LogOnce>,
}

/// What a comparison goes by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Goal<'a> {
    /// The leases of this backend; nothing before the first listing of them, when it is unknown
    /// which of the kernel's entries are stale.
    pub(super) leases: Option<&'a [&'a Lease]>,
    /// Whether routes by way of the hosts lead to them where there is no device.
    pub(super) has_routes: bool,
    /// Whether what no peer asks for goes.
    pub(super) removes: bool,
}

/// What came of a comparison.
#[derive(Debug)]
pub(super) struct Made<A: KernelFamily> {
    /// Those that could not be set up in full.
    failed: BTreeSet<Prefix<A>>,
    /// Those whose entries or routes somebody removes again and again.
    pub(super) removed: BTreeSet<Prefix<A>>,
    /// Those that somebody had changed.
    repaired: Vec<Prefix<A>>,
    /// Why some could not be set up.
    refused: Vec<NetlinkError>,
    /// Why something is still there.
    kept: Vec<NetlinkError>,
    /// The leases that can't be set up.
    pub(super) unusable: Unusable,
    /// Whether the device vanished meanwhile.
    has_vanished: bool,
}

impl<A: CarriedFamily> FamilyTables<A> {
    /// This host's addresses: the external interface's, and the device's.
    pub(super) fn own(&self, external: &ExternalInterface) -> impl Iterator<Item = IpAddr> {
        let device = self.device.as_ref().map(TunnelDevice::address);
        A::own(external).into_iter().chain(device).map(Into::into)
    }

    pub(super) fn new(networks: Vec<Prefix<A>>, device: Option<TunnelDevice<A>>) -> Self {
        let (set, repaired, logged) = Default::default();
        Self { networks, device, set, repaired, logged }
    }

    /// Makes sure of the device, compares and edits.
    pub(super) async fn reconcile(
        &mut self,
        goal: Goal<'_>,
        host: &HostFollower,
        listing: &mut Listing,
        reporter: &Reporter,
    ) -> Result<Made<A>, NetlinkError> {
        let leases = goal.leases.unwrap_or_default().iter().copied();
        let mut made = Made::default();
        let (mut device, mut ways, mut entries) = (None, Ways::new(), Vec::new());
        if let Some(tunnel) = &mut self.device {
            let it = tunnel.ensure(host, listing, reporter).await?;
            (ways, made.unusable) = tunnel.ways(leases.clone(), &it.link).await;
            entries = neighbours::entries(&it.link).await?;
            device = Some(it);
        } else if goal.has_routes {
            ways = host_gw::ways(leases.clone().filter_map(A::peer), host.external());
        }
        if self.device.is_some() || goal.has_routes {
            let lost = leases.filter_map(|lease| Some((lease.subnets, A::without_host(lease)?)));
            made.unusable.extend(lost);
        }
        let desired = Desired { device, networks: self.networks.clone(), ways };
        let found = A::found(listing);
        let Some(diff) = desired.diff(&found, &entries) else {
            return Ok(Made { has_vanished: true, ..made });
        };
        for edit in &diff.device {
            edit.apply().await?;
        }
        let imposed = desired.device.as_ref().and_then(|device| device.mtu_bytes);
        if let (Some(tunnel), Some(mtu_bytes)) = (&mut self.device, imposed) {
            tunnel.note_imposed(mtu_bytes, host.external());
        }
        if goal.leases.is_some() {
            self.make(diff, &desired, &found, goal.removes, &mut made).await;
        }
        self.tell(&made, host, reporter);
        Ok(made)
    }

    /// Gives peers what they lack by `diff`, and then `removes` what no peer asks for.
    async fn make(
        &mut self,
        mut diff: Diff<A>,
        desired: &Desired<A>,
        found: &FamilyListing<'_, A>,
        removes: bool,
        made: &mut Made<A>,
    ) {
        self.repaired.retain(|_, at| at.elapsed() < REMOVED_AGAIN);
        for (edit, result) in apply_all(&diff.sets).await {
            let Edit::Set(step) = edit else { continue };
            if let Err(error) = result {
                made.failed.insert(step.destination);
                made.refused.push(error);
            } else if self.set.get(&step.destination) == desired.ways.get(&step.destination) {
                made.repaired.push(step.destination);
                if self.repaired.insert(step.destination, Instant::now()).is_some() {
                    made.removed.insert(step.destination);
                }
            }
        }
        if desired.device.is_none() {
            // A peer that moved to where no route leads must not get its packets at the old place.
            let old = found.routes.iter().filter(|route| desired.owns(route));
            let old = old.filter(|route| made.failed.contains(&route.destination));
            diff.removals.extend(old.filter_map(Route::removal).map(Edit::RemoveRoute));
        }
        let results = if removes { apply_all(&diff.removals).await } else { Vec::new() };
        made.kept = results.into_iter().filter_map(|(_, result)| result.err()).collect();
        self.set.clone_from(&desired.ways);
        self.set.retain(|subnet, _| !made.failed.contains(subnet));
    }

    /// Counts and logs what came of a comparison.
    fn tell(&mut self, made: &Made<A>, host: &HostFollower, reporter: &Reporter) {
        let Made { removed, repaired, refused, kept, unusable, .. } = made;
        reporter.count(|done| {
            done.repairs += repaired.len() as u64;
            done.failures += (refused.len() + kept.len()) as u64;
        });
        if let Some(first) = unusable.values().next() {
            self.log("unusable", &format!("ignored lease {first}{}", more(unusable.len())));
        }
        if let Some(first) = repaired.first() {
            let what = if self.device.is_some() { "Entries and route" } else { "Route" };
            let why = match removed.contains(first) {
                true => "; another program removes them again and again, find it (`ip monitor`)",
                false => "",
            };
            let text = format!("{what} recovered for {first}{}{why}", more(repaired.len()));
            self.log("repaired", &text);
        }
        let advice = match self.device {
            Some(_) => "retrying".to_owned(),
            None => host_gw::advice(host.external()),
        };
        for (subject, errors, advice) in
            [("peer", refused, advice.as_str()), ("removal", kept, "retrying")]
        {
            if let Some(first) = errors.first() {
                let text = format!("{}{}; {advice}", with_causes(first), more(errors.len()));
                self.log(subject, &text);
            }
        }
    }

    /// Logs something about `subject` when it is new, and once a minute while it lasts.
    pub(super) fn log(&mut self, subject: &'static str, text: &str) {
        self.logged.entry(subject).or_default().once(text, |text| warn!("{text}"));
    }

    /// Has what is said of `subject` next be new.
    pub(super) fn forget(&mut self, subject: &'static str) {
        self.logged.remove(subject);
    }
}

/// That there are more than the one that is shown.
fn more(count: usize) -> String {
    if count > 1 { format!(" (and {} more)", count - 1) } else { String::new() }
}

impl<A: KernelFamily> Default for Made<A> {
    fn default() -> Self {
        Self {
            failed: BTreeSet::new(),
            removed: BTreeSet::new(),
            repaired: Vec::new(),
            refused: Vec::new(),
            kept: Vec::new(),
            unusable: Unusable::new(),
            has_vanished: false,
        }
    }
}

impl<A: KernelFamily> Made<A> {
    pub(super) fn is_complete(&self) -> bool {
        self.failed.is_empty() && self.kept.is_empty() && !self.has_vanished
    }

    /// Those that are not set up, or not for long.
    pub(super) fn lacking(&self) -> BTreeSet<Prefix<A>> {
        &self.failed | &self.removed
    }
}

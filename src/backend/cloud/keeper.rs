//! Looks after the own route of a cloud's backend: at the start until it is there, then once in a
//! period, and when there is another reason to. What to change is decided in `plan`.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::error::CloudError;
use super::http::Http;
use super::plan::{Change, Entry, Hindrance, Leads, Leases, Own, Plan, Table, plan};
use super::provider::{Found, Result};
use super::providers::Provider;
use crate::backend::error::{StartError, StartResult};
use crate::backend::family::CarriedFamily;
use crate::backend::kernel::CloudRoute;
use crate::backend::status::PlaneState;
use crate::backend_kind::BackendKind;
use crate::control::backoff::{Backoff, jittered};
use crate::control::changes::next_change;
use crate::control::clock::unix_seconds;
use crate::control::lease::Peers;
use crate::control::status::ControlStatus;
use crate::failure::LogOnce;

/// By so much of it the period differs, so that nodes which start together do not ask together.
const PERIOD_SPREAD: f64 = 0.2;
/// The first wait after a failure: as long as an API takes to show what was just changed. Waits
/// double up to the period, so that a failure that lasts makes no more requests than success.
const RETRY_MIN: Duration = Duration::from_secs(2);
/// Routes that one round deletes: AWS grants an account some five changes in a second, and every
/// node sees the same black holes.
const DELETIONS_MAX: usize = 10;

/// How long a start waits for its route: nobody renews its lease meanwhile. flannel's renew margin
/// is an hour before the lease ends, so four such waits fit in; after each the lease is taken anew.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// A change that takes longer is told in the status.
const SLOW: Duration = Duration::from_secs(5);
/// For so many periods it is told that somebody else leads the own route to another instance: who
/// does so once in a period is seen all the time.
const CONTESTED_PERIODS: u32 = 10;

/// The peers, and each change of them.
pub(super) type PeersReceiver = watch::Receiver<Arc<Peers>>;

/// Looks after the own route.
pub(super) struct Keeper {
    kind: BackendKind,
    provider: Provider,
    own: Own,
    route: watch::Sender<CloudRoute>,
    told: LogOnce,
    /// Whether this run has seen the route in place.
    was_in_place: bool,
    /// How often it led to another instance, and was led here.
    taken: u32,
    /// That it was taken again, and when.
    contested: Option<(String, Instant)>,
    period: Duration,
}

/// What a look and the changes after it have shown.
struct Outcome {
    /// What the own route leads to.
    target: String,
    /// Why it is not in place, if it isn't.
    missing: Option<CloudError>,
    /// What else went wrong.
    trouble: Option<CloudError>,
    /// What is in the tables, works, and needs a person.
    warning: Option<String>,
}

impl Keeper {
    pub(super) fn new(
        kind: BackendKind,
        provider: Provider,
        own: Own,
        route: watch::Sender<CloudRoute>,
        period: Duration,
    ) -> Self {
        let (told, was_in_place) = (LogOnce::default(), false);
        Self { kind, provider, own, route, told, was_in_place, taken: 0, contested: None, period }
    }

    /// How the route is, and each change of that.
    pub(super) fn follow(&self) -> watch::Receiver<CloudRoute> {
        self.route.subscribe()
    }

    fn backoff(&self) -> Backoff {
        Backoff::between((RETRY_MIN.min(self.period), self.period))
    }

    /// Gives up in time for a new lease.
    pub(super) async fn register_in_time(&mut self, control: &ControlStatus) -> StartResult {
        let in_time = timeout(REGISTER_TIMEOUT, self.register(control)).await;
        in_time.map_err(|_elapsed| {
            let wrong = self.route.borrow().wrong.clone().unwrap_or_default();
            StartError::Cloud(CloudError::Unusable(format!(
                "the route to {} is not there after {} min, so that the lease has to be taken \
                 anew: {wrong}",
                self.own.subnet,
                REGISTER_TIMEOUT.as_secs() / 60
            )))
        })
    }

    /// Tries until the own route is in place.
    async fn register(&mut self, control: &ControlStatus) {
        let mut backoff = self.backoff();
        loop {
            self.round(None, control).await;
            let CloudRoute { is_in_place, wrong, .. } = self.route.borrow().clone();
            // With a lease from the cache the store is not there. It is asked again only after the
            // start, and nothing is lost by that: pods have run with this subnet.
            if is_in_place || control.read().cached_as_of_unix.is_some() {
                return;
            }
            control.start_is_hindered(&wrong.unwrap_or_default());
            sleep(backoff.next_wait()).await;
        }
    }

    /// Follows the leases and looks after the route.
    pub(super) async fn run(
        &mut self,
        mut leases: PeersReceiver,
        mut plane: watch::Receiver<PlaneState>,
        control: Arc<ControlStatus>,
    ) -> Infallible {
        let mut backoff = self.backoff();
        // The start has just looked, and the first listing, which comes next, is another reason to.
        let rest = if self.route.borrow().is_in_place { self.period } else { Duration::ZERO };
        let (mut next_round, mut are_known) = (Instant::now() + rest, false);
        loop {
            tokio::select! {
                () = sleep_until(next_round) => {}
                // The first listing; what is left of earlier leases can go.
                () = next_change(&mut leases), if !are_known => {
                    are_known = true;
                }
                address = moved(&mut plane, self.own.address) => self.own.address = address,
            }
            let pause = if self.round(are_known.then_some(&leases), &control).await {
                backoff = self.backoff();
                jittered(self.period, PERIOD_SPREAD, &mut fastrand::Rng::new())
            } else {
                backoff.next_wait()
            };
            next_round = Instant::now() + pause;
        }
    }

    /// Looks, changes what is not right, and reports; whether the cloud did all that it was asked.
    async fn round(&mut self, leases: Option<&PeersReceiver>, control: &ControlStatus) -> bool {
        let outcome = self.look_and_apply(leases, control).await;
        let is_in_place = outcome.as_ref().ok().map(|outcome| outcome.missing.is_none());
        let to = |target: &str| format!("{}: {} leads to {target}", self.kind, self.own.subnet);
        let description = outcome.as_ref().ok().map(|outcome| to(&outcome.target));
        let (failure, warning) = match outcome {
            Ok(Outcome { missing, trouble, warning, .. }) => (missing.or(trouble), warning),
            Err(error) => (Some(error), None),
        };
        let is_done = failure.is_none();
        let wrong = failure.map(|error| error.to_string()).or(warning);
        let again = if is_done { "" } else { "; retrying" };
        match &wrong {
            Some(text) => self.told.once(text, |text| warn!("{}: {text}{again}", self.kind)),
            None if self.told.forget() => info!("{}: all is well again", self.kind),
            None => {}
        }
        self.route.send_if_modified(|route| {
            let before = route.clone();
            route.wrong = wrong;
            route.is_in_place = is_in_place.unwrap_or(route.is_in_place);
            route.description = description.unwrap_or_else(|| before.description.clone());
            *route != before
        });
        is_done
    }

    /// Looks, changes what is not right, and looks once more if that concerned the own route: in
    /// place is what a table shows, whatever a change was answered with.
    async fn look_and_apply(
        &mut self,
        leases: Option<&PeersReceiver>,
        control: &ControlStatus,
    ) -> Result<Outcome> {
        let http = Http::new()?;
        let Found { tables, target, trouble } = self.provider.look(&http, &self.own).await?;
        let plans = self.plans(&tables, leases, control);
        let missing = self.hindrance(&tables, &plans);
        let stray = tables
            .iter()
            .zip(&plans)
            .find_map(|(table, plan)| plan.stray.as_ref().map(|entry| self.of_stray(table, entry)));
        let changes_own = missing.is_none() && !plans.iter().all(Plan::is_in_place);
        let mut outcome = Outcome { target, missing, trouble, warning: None };
        self.apply(&http, (&tables, plans), leases, control, &mut outcome).await;
        if changes_own && outcome.missing.is_none() {
            let Found { tables, .. } = self.provider.look(&http, &self.own).await?;
            let mut plans = tables.iter().zip(self.plans(&tables, leases, control));
            outcome.missing = plans.find(|(_, plan)| !plan.is_in_place()).map(|(table, _)| {
                CloudError::Unusable(format!(
                    "table {} does not show the route to {}, though the change was answered as \
                     done",
                    table.id, self.own.subnet
                ))
            });
        }
        self.was_in_place |= outcome.missing.is_none();
        self.contested.take_if(|(_, at)| at.elapsed() > self.period * CONTESTED_PERIODS);
        outcome.warning = self.contested.as_ref().map(|(text, _)| text.clone()).or(stray);
        Ok(outcome)
    }

    /// What is to become of each table.
    fn plans(
        &self,
        tables: &[Table],
        leases: Option<&PeersReceiver>,
        control: &ControlStatus,
    ) -> Vec<Plan> {
        let is_own_confirmed = is_confirmed(control);
        let of_peers = |all: &PeersReceiver| {
            all.borrow().values().filter_map(|it| Ipv4Addr::subnet(it)).collect()
        };
        let leased = leases.filter(|_| is_own_confirmed).map(of_peers);
        let known = Leases { leased: leased.as_ref(), is_own_confirmed };
        tables.iter().map(|table| plan(&table.entries, &self.own, known)).collect()
    }

    fn hindrance(&self, tables: &[Table], plans: &[Plan]) -> Option<CloudError> {
        let mut all = tables.iter().zip(plans);
        let told = all
            .find_map(|(table, plan)| plan.hindrance.map(|it| it.told(&table.id, self.own.subnet)));
        told.map(CloudError::Unusable)
    }

    /// That a part of the own subnet leads elsewhere.
    fn of_stray(&self, table: &Table, Entry { destination, hop, .. }: &Entry) -> String {
        format!(
            "table {} has a route to {destination}, a part of this node's subnet {}, that leads to \
             {hop} and goes before the node's own: pods there are not reached. weftd leaves it: \
             delete it, if nobody needs it",
            table.id, self.own.subnet
        )
    }

    /// Makes the changes, and notes in `outcome` what does not succeed.
    async fn apply(
        &mut self,
        http: &Http,
        (tables, plans): (&[Table], Vec<Plan>),
        leases: Option<&PeersReceiver>,
        control: &ControlStatus,
        outcome: &mut Outcome,
    ) {
        let own = self.own;
        let of_table =
            |(table, plan): (_, Plan)| plan.changes.into_iter().map(move |it| (table, it));
        let (mut all, mut deleted) = (tables.iter().zip(plans).flat_map(of_table), 0);
        while let Some((table, change)) = all.next() {
            let is_deletion = matches!(change, Change::Delete(_));
            deleted += usize::from(is_deletion);
            let is_overtaken = is_overtaken(leases, is_confirmed(control), &change);
            if is_overtaken && !is_deletion {
                let told = Hindrance::Unconfirmed.told(&table.id, own.subnet);
                outcome.missing.get_or_insert(CloudError::Unusable(told));
            }
            if is_overtaken || is_deletion && deleted > DELETIONS_MAX {
                continue;
            }
            let applied = self.provider.apply(http, &own, table, &change);
            let Err(error) = self.told_if_slow(control, table, applied).await else {
                self.tell(table, &change, &outcome.target);
                continue;
            };
            let is_end = error.asks_for_a_pause();
            let is_own_left = |(_, left): (_, Change)| !matches!(left, Change::Delete(_));
            if !is_deletion || is_end && all.any(is_own_left) {
                outcome.missing.get_or_insert(error);
            } else {
                outcome.trouble.get_or_insert(error);
            }
            if is_end {
                break;
            }
        }
    }

    /// Waits for a change, and says so if it takes long.
    async fn told_if_slow<T>(
        &self,
        control: &ControlStatus,
        table: &Table,
        change: impl Future<Output = T>,
    ) -> T {
        let mut change = pin!(change);
        if let Ok(done) = timeout(SLOW, &mut change).await {
            return done;
        }
        let text = format!(
            "the cloud has not finished a change of table {} for {}; weftd waits for it",
            table.id, self.own.subnet
        );
        if control.read().start_step.is_some() {
            control.start_is_hindered(&text);
        }
        self.route.send_modify(|route| route.wrong = Some(text));
        change.await
    }

    fn tell(&mut self, table: &Table, change: &Change, target: &str) {
        let (table, subnet) = (&table.id, self.own.subnet);
        match change {
            Change::Delete(entry) => {
                info!("Removed route from table {table}: {}, which nobody has", entry.destination);
            }
            Change::Replace(Entry { leads: Leads::Elsewhere, hop, .. }) => {
                warn!(
                    "Route taken in table {table}: {subnet} led to {hop}, now to {target}. If \
                     another cluster has the same Network in this cloud network, give one of the \
                     two another"
                );
                self.taken += 1;
                if self.taken > 1 {
                    let text = format!(
                        "the route to {subnet} in table {table} was led to {hop} again, and weftd \
                         has led it here, {} times since its start: another cluster with the same \
                         Network in this cloud network may do so",
                        self.taken
                    );
                    self.contested = Some((text, Instant::now()));
                }
            }
            Change::Create | Change::Replace(_) if self.was_in_place => {
                warn!("Route recovered in table {table}: {subnet} - {target}");
            }
            Change::Create | Change::Replace(_) => {
                info!("Route added to table {table}: {subnet} - {target}");
            }
        }
    }
}

/// Whether the store answers, and says what it said before: that this node has its lease still,
/// and the others theirs. Else another may have the subnet, and the route leads to that one; and a
/// store that has lost most leases, or is another one, knows too little of who has what.
fn is_confirmed(control: &ControlStatus) -> bool {
    let state = control.read();
    let is_valid = state.store.lease_expires_unix.is_none_or(|end| end > unix_seconds());
    let is_whole = state.store.up && state.held_peers == 0;
    state.cached_as_of_unix.is_none() && is_whole && is_valid
}

/// Whether since the look a node has leased what `change` would cut it off from, or the store has
/// gone, without which nothing of others is touched.
fn is_overtaken(leases: Option<&PeersReceiver>, is_confirmed: bool, change: &Change) -> bool {
    match change {
        Change::Delete(entry) => {
            let leased_now = |all: &PeersReceiver| {
                let all = all.borrow();
                let mut subnets = all.values().filter_map(|it| Ipv4Addr::subnet(it));
                subnets.any(|it| it.overlaps(entry.destination))
            };
            !is_confirmed || leases.is_some_and(leased_now)
        }
        Change::Replace(entry) => entry.leads == Leads::Elsewhere && !is_confirmed,
        Change::Create => false,
    }
}

/// The interface's address, once it is not `known` any more.
async fn moved(plane: &mut watch::Receiver<PlaneState>, known: Ipv4Addr) -> Ipv4Addr {
    loop {
        let address = Ipv4Addr::own(&plane.borrow_and_update().external);
        if let Some(address) = address.filter(|address| *address != known) {
            return address;
        }
        next_change(plane).await;
    }
}

#[cfg(test)]
mod tests {
    use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
    use crate::route::Prefixes;

    use super::*;

    #[test]
    fn what_was_leased_since_the_look_is_not_deleted() {
        let (peers, leases) = watch::channel(Arc::new(Peers::new()));
        let destination = "10.5.3.0/24".parse().unwrap();
        let entry =
            |leads| Entry { destination, leads, id: String::new(), hop: "eni-9".to_owned() };
        let change = Change::Delete(entry(Leads::Nowhere));
        assert!(!is_overtaken(Some(&leases), true, &change), "a black hole stays");
        assert!(is_overtaken(Some(&leases), false, &change), "deleted without a store");
        let subnets: Prefixes = "10.5.3.0/24".parse().unwrap();
        let attributes = LeaseAttributes::of(BackendKind::AwsVpc, [192, 0, 2, 3].into(), None);
        let lifetime = Lifetime::Leased { id: 0, expires_unix: None };
        let key = subnets.key();
        let lease = Lease { subnets, key, attributes, revision: 1, created_revision: 1, lifetime };
        peers.send_replace(Arc::new(Peers::from([(subnets, lease.into())])));
        let is_cut_off = !is_overtaken(Some(&leases), true, &change);
        assert!(!is_cut_off, "a node that has just started is cut off");
        assert!(!is_overtaken(Some(&leases), false, &Change::Create));
        let own = |leads| Change::Replace(entry(leads));
        assert!(is_overtaken(None, false, &own(Leads::Elsewhere)), "another's without a store");
        assert!(!is_overtaken(None, true, &own(Leads::Elsewhere)));
        assert!(!is_overtaken(None, false, &own(Leads::Nowhere)), "a black hole stays");
    }

    #[test]
    fn a_lease_is_confirmed_by_the_store_while_it_answers_and_until_it_ends() {
        let control = ControlStatus::default();
        assert!(!is_confirmed(&control), "nobody has answered");
        control.edit().store.up = true;
        assert!(is_confirmed(&control), "one without an end");
        for (end, expected) in [(unix_seconds() + 1000, true), (unix_seconds() - 1, false)] {
            control.edit().store.lease_expires_unix = Some(end);
            assert_eq!(is_confirmed(&control), expected);
        }
        control.edit().store.lease_expires_unix = None;
        control.edit().held_peers = 1;
        assert!(!is_confirmed(&control), "a store that has lost most leases is believed");
        control.edit().held_peers = 0;
        control.edit().cached_as_of_unix = Some(77);
        assert!(!is_confirmed(&control), "the cache is taken for the store");
    }
}

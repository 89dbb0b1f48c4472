//! The backends of clouds: the cloud's network carries the packets, by one route for each node,
//! which leads to its instance. weftd makes the own one before anything goes by it, and looks after
//! it from then on. What a provider's API is like is in the file of each.

#[cfg(feature = "ali-vpc")]
mod ali;
#[cfg(feature = "aws-vpc")]
mod aws;
#[cfg(feature = "aws-vpc")]
mod aws_answers;
#[cfg(feature = "aws-vpc")]
mod aws_credentials;
#[cfg(feature = "aws-vpc")]
mod aws_metadata;
pub mod error;
#[cfg(feature = "gce")]
mod gce;
#[cfg(feature = "gce")]
mod gce_credentials;
mod http;
mod plan;
mod provider;
mod sign;
#[cfg(feature = "tencent-vpc")]
mod tencent;

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::backend::error::{StartError, StartResult};
use crate::backend::family::CarriedFamily;
use crate::backend::kernel::{CloudRoute, KernelBackend, Means};
use crate::backend::setup::Setup;
use crate::backend::status::PlaneState;
use crate::backend_kind::BackendKind;
use crate::config::network::{AccessKey, CloudBackendConfig};
use crate::config::options::Secret;
use crate::control::backoff::{Backoff, jittered};
use crate::control::changes::next_change;
use crate::control::clock::unix_seconds;
use crate::control::lease::Peers;
use crate::control::status::ControlStatus;
use crate::failure::LogOnce;
use crate::route::Prefix;

use self::error::CloudError;
use self::http::{Http, variable};
use self::plan::{Change, Leads, Leases, Own, Table, changes};
use self::provider::{Found, Result};

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

type PeersReceiver = watch::Receiver<Arc<Peers>>;

/// What a cloud's backend starts with.
pub(super) struct CloudReserved {
    kind: BackendKind,
    provider: Provider,
    previous_subnet: Option<Prefix>,
}

impl std::fmt::Debug for CloudReserved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)
    }
}

/// Finds out what can be known without the cloud: whether this weftd knows it, and whether there is
/// a key, where that can't come later.
pub(super) fn prepare(
    kind: BackendKind,
    settings: &CloudBackendConfig,
    previous_subnet: Option<Prefix>,
) -> StartResult<CloudReserved> {
    let provider = provider(kind, settings).map_err(StartError::Cloud)?;
    info!("{kind}: this weftd was never tried in a real cloud of this kind, see docs/backends.md");
    Ok(CloudReserved { kind, provider, previous_subnet })
}

/// A cloud's API.
enum Provider {
    #[cfg(feature = "ali-vpc")]
    Ali(ali::Ali),
    #[cfg(feature = "aws-vpc")]
    Aws(aws::Aws),
    #[cfg(feature = "gce")]
    Gce(gce::Gce),
    #[cfg(feature = "tencent-vpc")]
    Tencent(tencent::Tencent),
}

impl Provider {
    /// Looks anew each time: an instance may be moved, an interface replaced, credentials expire.
    async fn look(&mut self, http: &Http, own: &Own) -> Result<Found> {
        match *self {
            #[cfg(feature = "ali-vpc")]
            Self::Ali(ref mut it) => it.look(http).await,
            #[cfg(feature = "aws-vpc")]
            Self::Aws(ref mut it) => it.look(http, own).await,
            #[cfg(feature = "gce")]
            Self::Gce(ref mut it) => it.look(http, own).await,
            #[cfg(feature = "tencent-vpc")]
            Self::Tencent(ref mut it) => it.look(http, own).await,
        }
    }

    async fn apply(&self, http: &Http, own: &Own, table: &Table, change: &Change) -> Result {
        match *self {
            #[cfg(feature = "ali-vpc")]
            Self::Ali(ref it) => it.apply(http, own, table, change).await,
            #[cfg(feature = "aws-vpc")]
            Self::Aws(ref it) => it.apply(http, own, table, change).await,
            #[cfg(feature = "gce")]
            Self::Gce(ref it) => it.apply(http, own, change).await,
            #[cfg(feature = "tencent-vpc")]
            Self::Tencent(ref it) => it.apply(http, own, table, change).await,
        }
    }
}

fn provider(kind: BackendKind, settings: &CloudBackendConfig) -> Result<Provider> {
    match kind {
        #[cfg(feature = "aws-vpc")]
        BackendKind::AwsVpc => Ok(Provider::Aws(aws::Aws::new(settings.route_tables.clone()))),
        #[cfg(feature = "gce")]
        BackendKind::Gce => Ok(Provider::Gce(gce::Gce::new())),
        #[cfg(feature = "ali-vpc")]
        BackendKind::AliVpc => Ok(Provider::Ali(ali::Ali::new(access_key(kind, settings)?))),
        #[cfg(feature = "tencent-vpc")]
        BackendKind::TencentVpc => {
            Ok(Provider::Tencent(tencent::Tencent::new(access_key(kind, settings)?)))
        }
        unbuilt => Err(CloudError::Unusable(format!(
            "this weftd was built without the backend {unbuilt} (cargo feature {unbuilt})"
        ))),
    }
}

/// That of the configuration, else of the environment, by flannel's names.
fn access_key(kind: BackendKind, settings: &CloudBackendConfig) -> Result<AccessKey> {
    let given = settings.access_key.clone();
    let of_environment = || {
        let (id, secret) = variable("ACCESS_KEY_ID").zip(variable("ACCESS_KEY_SECRET"))?;
        Some(AccessKey { id, secret: Secret(secret) })
    };
    given.or_else(of_environment).ok_or_else(|| {
        CloudError::Unusable(format!(
            "ACCESS_KEY_ID and ACCESS_KEY_SECRET must be provided: {kind} needs both in weftd's \
             environment, or AccessKeyID and AccessKeySecret in the Backend of the network \
             configuration"
        ))
    })
}

/// A running backend of a cloud.
pub struct CloudBackend {
    /// Follows the host and the peers, and leaves the kernel's tables empty.
    pub(super) kernel: KernelBackend,
    keeper: Keeper,
}

impl CloudBackend {
    /// Makes the own route. As long as that fails the start waits, for no packet would reach the
    /// pods. If the last run had this subnet, its route is taken to be there unless the cloud says
    /// that it isn't.
    pub(super) async fn start(setup: &Setup, reserved: CloudReserved) -> StartResult<Self> {
        let CloudReserved { kind, provider, previous_subnet } = reserved;
        let (Some(subnet), Some(network)) = (setup.subnets.v4(), setup.networks.v4()) else {
            return Err(StartError::NoSubnet);
        };
        let Some(address) = Ipv4Addr::own(&setup.external) else {
            return Err(StartError::NoUnderlay);
        };
        let is_kept = previous_subnet == Some(subnet);
        let description = format!("{kind}: the route of the last run");
        let route = CloudRoute { is_in_place: is_kept, wrong: None, description };
        let mut keeper = Keeper {
            kind,
            provider,
            own: Own { subnet, network, address },
            route: watch::Sender::new(route),
            told: LogOnce::default(),
            was_in_place: false,
            period: setup.cloud_period,
        };
        keeper.register_in_time(&setup.control).await?;
        let means = Means::Cloud { kind, route: keeper.route.subscribe() };
        let kernel = KernelBackend::start(setup, means).await?;
        Ok(Self { kernel, keeper })
    }

    /// Follows the leases and looks after the route, which stays when this is dropped.
    pub async fn run(&mut self, leases: PeersReceiver) -> Infallible {
        let Self { kernel, keeper } = self;
        let plane = kernel.reporter.view(Vec::new(), None).state;
        let control = kernel.control();
        tokio::select! {
            never = kernel.run(leases.clone()) => never,
            never = keeper.run(leases, plane, control) => never,
        }
    }
}

/// Looks after the own route.
struct Keeper {
    kind: BackendKind,
    provider: Provider,
    own: Own,
    route: watch::Sender<CloudRoute>,
    told: LogOnce,
    /// Whether this run has seen the route in place.
    was_in_place: bool,
    period: Duration,
}

impl Keeper {
    fn backoff(&self) -> Backoff {
        Backoff::between((RETRY_MIN.min(self.period), self.period))
    }

    /// Gives up in time for a new lease.
    async fn register_in_time(&mut self, control: &ControlStatus) -> StartResult {
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

    async fn run(
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

    /// Looks, changes what is not right, and reports; whether all is well.
    async fn round(&mut self, leases: Option<&PeersReceiver>, control: &ControlStatus) -> bool {
        let (is_in_place, description, trouble) = match self.look_and_apply(leases, control).await {
            Ok((target, missing, trouble)) => {
                let to = format!("{}: {} leads to {target}", self.kind, self.own.subnet);
                (Some(missing.is_none()), Some(to), missing.or(trouble))
            }
            Err(error) => (None, None, Some(error)),
        };
        let wrong = trouble.map(|error| error.to_string());
        match &wrong {
            Some(text) => self.told.once(text, |text| warn!("{}: {text}; retrying", self.kind)),
            None if self.told.forget() => info!("{}: all is well again", self.kind),
            None => {}
        }
        let is_well = wrong.is_none();
        self.route.send_if_modified(|route| {
            let before = route.clone();
            route.wrong = wrong;
            route.is_in_place = is_in_place.unwrap_or(route.is_in_place);
            route.description = description.unwrap_or_else(|| before.description.clone());
            *route != before
        });
        is_well
    }

    /// Gives what the own route leads to, why it is not in place if it isn't, and what else went
    /// wrong.
    async fn look_and_apply(
        &mut self,
        leases: Option<&PeersReceiver>,
        control: &ControlStatus,
    ) -> Result<(String, Option<CloudError>, Option<CloudError>)> {
        let (http, own) = (Http::new()?, self.own);
        let Found { tables, target, mut trouble } = self.provider.look(&http, &own).await?;
        let is_own_confirmed = is_confirmed(control);
        let of_peers = |all: &PeersReceiver| {
            all.borrow().values().filter_map(|it| Ipv4Addr::subnet(it)).collect()
        };
        let leased = leases.filter(|_| is_own_confirmed).map(of_peers);
        let known = Leases { leased: leased.as_ref(), is_own_confirmed };
        let (mut all, mut missing) = (Vec::new(), None);
        for table in &tables {
            let (changes, hindrance) = changes(&table.entries, &own, known);
            let hindrance = hindrance.map(|it| it.told(&table.id, own.subnet));
            missing = missing.or_else(|| hindrance.map(CloudError::Unusable));
            all.extend(changes.into_iter().map(|change| (table, change)));
        }
        let (mut all, mut deleted) = (all.into_iter(), 0);
        while let Some((table, change)) = all.next() {
            let is_deletion = matches!(change, Change::Delete(_));
            deleted += usize::from(is_deletion);
            if is_deletion && deleted > DELETIONS_MAX
                || is_overtaken(leases, is_confirmed(control), &change)
            {
                continue;
            }
            let Err(error) = self.provider.apply(&http, &own, table, &change).await else {
                self.tell(table, &change, &target);
                continue;
            };
            let is_end = error.asks_for_a_pause();
            let is_own_left = |(_, left): (_, Change)| !matches!(left, Change::Delete(_));
            if !is_deletion || is_end && all.any(is_own_left) {
                missing = missing.or(Some(error));
            } else {
                trouble = trouble.or(Some(error));
            }
            if is_end {
                break;
            }
        }
        self.was_in_place |= missing.is_none();
        Ok((target, missing, trouble))
    }

    fn tell(&self, table: &Table, change: &Change, target: &str) {
        let (table, subnet) = (&table.id, self.own.subnet);
        match change {
            Change::Delete(entry) => {
                info!("Removed route from table {table}: {}, which nobody has", entry.destination);
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

/// Whether the store answers, and says what it said before: that this node has its lease still, and
/// the others theirs. Else another may have the subnet, and the route leads to that one; and a store
/// that has lost most leases, or is another one, knows too little of who has what.
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

    use super::plan::Entry;
    use super::*;

    #[test]
    fn what_was_leased_since_the_look_is_not_deleted() {
        let (peers, leases) = watch::channel(Arc::new(Peers::new()));
        let destination = "10.5.3.0/24".parse().unwrap();
        let gone = Entry { destination, leads: Leads::Nowhere, id: String::new() };
        let change = Change::Delete(gone);
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
        let own = |leads| Change::Replace(Entry { destination, leads, id: String::new() });
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

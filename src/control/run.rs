//! Drives the lease machine against the real store, clock and log: carries out its commands and
//! brings back the results. Decides nothing.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, OptionFuture};
use tokio::sync::Notify;
use tokio::sync::watch::{Receiver, Sender};
use tokio::time::sleep;
use tracing::{Level, debug, info, warn};

use crate::control::cache::Known;
use crate::control::changes::next_value;
use crate::control::clock;
use crate::control::error::StoreResult;
use crate::control::identity::Phase;
use crate::control::lease::{Lease, LeaseAttributes, Peers};
pub use crate::control::machine::End;
use crate::control::machine::{Command, Event, Machine, Now, Write};
use crate::control::manager::SubnetManager;
use crate::control::snapshot::{Granted, LastWritten, OwnLease, Vacancy};
use crate::control::store::{Store, Watch};
use crate::route::Prefixes;

/// Longest sleep before the machine looks at the boot clock again, which runs on while the host is
/// suspended and a timer does not.
const CLOCK_CHECK_MAX: Duration = Duration::from_secs(60);

/// The subnet that a run begins with.
#[derive(Debug, Clone)]
pub enum Held {
    /// From the store.
    Leased(OwnLease),
    /// From the cache, or from an earlier run of this process, until the store answers: then it is
    /// taken again, if nobody else has it.
    Cached(Known),
}

impl Held {
    /// The subnets themselves.
    pub fn subnets(&self) -> Prefixes {
        match self {
            Self::Leased(own) => own.lease.subnets,
            Self::Cached(known) => known.own.subnets,
        }
    }

    /// What the store shows of this node.
    pub fn attributes(&mut self) -> &mut LeaseAttributes {
        match self {
            Self::Leased(own) => &mut own.lease.attributes,
            Self::Cached(known) => &mut known.own.attributes,
        }
    }
}

impl SubnetManager {
    /// Renews what is `held` before it ends, follows the other nodes and publishes all of them in
    /// `peers` after each change. While the store is away the last known peers stay. When this
    /// node's `attributes` change, the subnet stays and its lease follows. Ends when the subnet is
    /// lost; may be dropped at any time.
    pub async fn run(
        &self,
        held: Held,
        peers: &Sender<Arc<Peers>>,
        attributes: Receiver<LeaseAttributes>,
    ) -> End {
        let (timing, random, now, may_be_changed) =
            (self.timing, fastrand::Rng::new(), now(), Notify::new());
        let from_cache = matches!(held, Held::Cached(_));
        let machine = match held {
            Held::Leased(own) => Machine::new(own, timing, random, now),
            Held::Cached(known) => {
                self.status.edit().cached_as_of_unix = Some(known.as_of_unix);
                Machine::from_cache(known, timing, random, now)
            }
        };
        let told = attributes.borrow().clone();
        let driver = Driver {
            manager: self,
            peers,
            may_be_changed: &may_be_changed,
            attributes: attributes.clone(),
            told,
            request: None,
            watch: None,
        };
        let keep = async {
            match &self.store {
                Store::Leased(store) => self.keep_claim(store, attributes, peers.subscribe()).await,
                Store::Assigned(store) => store.keep(&self.status).await,
            }
        };
        let end = tokio::select! {
            end = driver.drive(machine) => end,
            never = keep => match never {},
            never = self.check_config(from_cache, &may_be_changed) => match never {},
        };
        // flannel's last words on a lost lease, however it was lost.
        warn!("Lease has been revoked. Shutting down daemon.");
        end
    }

    async fn write(&self, what: Write, held: &Lease) -> StoreResult<Granted> {
        let ttl = self.timing.lease_ttl;
        let written = match (&self.store, what) {
            (Store::Leased(store), Write::Renew) => store.renew(held, ttl).await,
            (Store::Leased(store), _) => store.write(held, ttl, Phase::Runs).await,
            (Store::Assigned(store), _) => store.publish(held.subnets, &held.attributes).await,
        };
        if what == Write::Renew && written.is_ok() {
            self.status.edit().store.renewals += 1;
        }
        written
    }

    async fn retake(
        &self,
        held: &Lease,
        last_written: Option<LastWritten>,
    ) -> StoreResult<Granted> {
        match &self.store {
            Store::Leased(store) => {
                let wanted = Lease::wanted(held.subnets, held.attributes.clone());
                let vacancy = Vacancy { last_written, replaces: None };
                store.create(&wanted, &vacancy, self.timing.lease_ttl, Phase::Runs).await
            }
            Store::Assigned(store) => store.publish(held.subnets, &held.attributes).await,
        }
    }
}

fn now() -> Now {
    Now { boot: clock::boot_time(), unix_seconds: clock::unix_seconds() }
}

/// What came of a request, and the watch that it opened.
type Answer = (Option<Watch>, Event);

struct Driver<'a> {
    manager: &'a SubnetManager,
    peers: &'a Sender<Arc<Peers>>,
    /// Told when the network configuration may be another one: after each listing, and when a peer
    /// has another backend.
    may_be_changed: &'a Notify,
    attributes: Receiver<LeaseAttributes>,
    /// As last seen.
    told: LeaseAttributes,
    request: Option<BoxFuture<'a, Answer>>,
    watch: Option<Watch>,
}

impl<'a> Driver<'a> {
    async fn drive(mut self, mut machine: Machine) -> End {
        info!("Watching for new subnet leases");
        // The subnet may be held from before the node had this address.
        let mut event = Event::Moved(self.told.clone());
        loop {
            for command in machine.handle(event, now()) {
                if let Some(end) = self.obey(command) {
                    return end;
                }
            }
            event = self.next_event(machine.next_wake(), machine.wants_changes()).await;
        }
    }

    /// Carries out a command, as far as that needs no waiting.
    fn obey(&mut self, command: Command) -> Option<End> {
        let (manager, status) = (self.manager, &self.manager.status);
        match command {
            Command::List => {
                self.ask(async { (None, Event::Listed(manager.noted(manager.store.list().await))) })
            }
            Command::Watch { revision, own } => self.ask(async move {
                match manager.noted(manager.store.watch(revision, &own).await) {
                    Ok(watch) => (Some(watch), Event::Opened(Ok(()))),
                    Err(error) => (None, Event::Opened(Err(error))),
                }
            }),
            Command::Write { what, held } => self.ask(async move {
                let written = manager.write(what, &held).await;
                (None, Event::Written(manager.noted_write(written)))
            }),
            Command::Retake { held, last_written } => self.ask(async move {
                let written = manager.retake(&held, last_written).await;
                (None, Event::Written(manager.noted_write(written)))
            }),
            Command::DropWatch => self.watch = None,
            Command::Publish(peers) => {
                let ours = &self.told.backend_type;
                if peers.values().any(|peer| peer.attributes.backend_type != *ours) {
                    self.may_be_changed.notify_one();
                }
                self.peers.send_replace(peers);
            }
            Command::Remember(known) => {
                manager.known.send_replace(Some(Arc::new(known)));
            }
            Command::Confirmed => status.edit().cached_as_of_unix = None,
            Command::Count { peers, held } => {
                let mut state = status.edit();
                (state.peers, state.held_peers) = (peers, held);
            }
            Command::Unused(unused) => status.set_unused(&unused),
            Command::Expires(unix_seconds) => status.edit().store.lease_expires_unix = unix_seconds,
            Command::CountForeignWrite => status.edit().store.written_by_others += 1,
            Command::Log(Level::WARN, text) => warn!("{text}"),
            Command::Log(Level::INFO, text) => info!("{text}"),
            Command::Log(_, text) => debug!("{text}"),
            Command::End(end) => return Some(end),
        }
        None
    }

    fn ask(&mut self, request: impl Future<Output = Answer> + Send + 'a) {
        self.request = Some(Box::pin(request));
    }

    /// Waits for the answer, for changes if the machine `wants_changes`, and until `wake`.
    async fn next_event(&mut self, wake: Option<Duration>, wants_changes: bool) -> Event {
        let left = wake.map_or(CLOCK_CHECK_MAX, |wake| wake.saturating_sub(clock::boot_time()));
        tokio::select! {
            Some((watch, event)) = OptionFuture::from(self.request.as_mut()) => {
                self.request = None;
                self.watch = watch.or_else(|| self.watch.take());
                if let Event::Listed(Ok(_)) = event {
                    self.manager.status.edit().relists += 1;
                    self.may_be_changed.notify_one();
                }
                event
            }
            Some(Some(changes)) = OptionFuture::from(self.watch.as_mut().map(StreamExt::next)),
                if wants_changes =>
            {
                Event::Changed(self.manager.noted(changes))
            }
            attributes = next_value(&mut self.attributes) => {
                let before = std::mem::replace(&mut self.told, attributes.clone());
                // Told again without a change: another address, behind the same PublicIP.
                if before == attributes || before.node_address() != attributes.node_address() {
                    self.manager.store.moved();
                }
                Event::Moved(attributes)
            }
            () = self.manager.store.doubted() => Event::Doubted,
            () = sleep(left.min(CLOCK_CHECK_MAX)) => Event::Timer,
        }
    }
}

#[cfg(test)]
mod tests;

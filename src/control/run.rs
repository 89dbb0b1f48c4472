//! Drives the lease machine against the real store, clock and log: carries out its commands and
//! brings it what came of them. Decides nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::{Receiver, Sender};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::control::cache::Known;
use crate::control::clock;
use crate::control::config_check::ConfigCheck;
use crate::control::lease::{LeaseAttributes, Peers};
pub use crate::control::machine::End;
use crate::control::machine::{Command, Event, Machine, Now, Say};
use crate::control::manager::{OwnLease, SubnetManager};
use crate::control::store::{Event as Change, StoreError, Watch};

/// Longest sleep before the machine looks at the boot clock again, which runs on while the host is
/// suspended and a timer does not.
const CLOCK_CHECK_MAX: Duration = Duration::from_secs(60);

impl SubnetManager {
    /// Renews `own` when less than `renew_margin` of it is left, follows the other nodes and
    /// publishes all of them in `peers` after each change. While the store is away the last known
    /// peers stay. Ends when the subnet is lost; may be dropped at any time.
    pub async fn run(
        &self,
        own: OwnLease,
        renew_margin: Duration,
        peers: &Sender<Arc<Peers>>,
    ) -> End {
        let (_fixed, attributes) = tokio::sync::watch::channel(own.lease.attributes.clone());
        self.run_moving(own, renew_margin, peers, attributes).await
    }

    /// As `run`, of a node that may say something else of itself while it runs: the subnet stays,
    /// its lease follows.
    pub async fn run_moving(
        &self,
        own: OwnLease,
        renew_margin: Duration,
        peers: &Sender<Arc<Peers>>,
        attributes: Receiver<LeaseAttributes>,
    ) -> End {
        let machine = Machine::new(own, renew_margin, self.timing, fastrand::Rng::new(), now());
        let check = ConfigCheck::new(self, false);
        self.keep(machine, Driver::new(self, peers, attributes, check)).await
    }

    /// As `run_moving`, by what the last run knew, until the store answers: then the same subnet
    /// is taken again, if nobody else has it.
    pub async fn run_from_cache(
        &self,
        known: Known,
        renew_margin: Duration,
        peers: &Sender<Arc<Peers>>,
        attributes: Receiver<LeaseAttributes>,
    ) -> End {
        self.status.started_from_cache(known.as_of_unix);
        let random = fastrand::Rng::new();
        let machine = Machine::from_cache(known, renew_margin, self.timing, random, now());
        let check = ConfigCheck::new(self, true);
        self.keep(machine, Driver::new(self, peers, attributes, check)).await
    }

    async fn keep(&self, machine: Machine, driver: Driver<'_>) -> End {
        let attributes = driver.attributes.clone();
        let end = tokio::select! {
            end = driver.drive(machine) => end,
            never = self.keep_claim(attributes) => match never {},
            never = self.store.keep_assigned(&self.status) => match never {},
        };
        // flannel's last words on a lost lease, however it was lost.
        warn!("Lease has been revoked. Shutting down daemon.");
        end
    }
}

fn now() -> Now {
    Now { boot: clock::boot_time(), unix_seconds: clock::unix_seconds() }
}

/// What a request came to.
enum Answer {
    Opened(Result<Watch, StoreError>),
    Other(Event),
}

struct Driver<'a> {
    manager: &'a SubnetManager,
    peers: &'a Sender<Arc<Peers>>,
    attributes: Receiver<LeaseAttributes>,
    request: Option<Pin<Box<dyn Future<Output = Answer> + Send + 'a>>>,
    watch: Option<Watch>,
    config_check: ConfigCheck<'a>,
}

impl<'a> Driver<'a> {
    fn new(
        manager: &'a SubnetManager,
        peers: &'a Sender<Arc<Peers>>,
        attributes: Receiver<LeaseAttributes>,
        config_check: ConfigCheck<'a>,
    ) -> Self {
        Self { manager, peers, attributes, request: None, watch: None, config_check }
    }

    async fn drive(mut self, mut machine: Machine) -> End {
        info!("Watching for new subnet leases");
        let mut event = Event::Timer;
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
        let (store, status) = (&self.manager.store, &self.manager.status);
        match command {
            Command::List => {
                self.request =
                    Some(Box::pin(async { Answer::Other(Event::Listed(store.list().await)) }));
            }
            Command::Watch { revision } => {
                let open = async move { Answer::Opened(store.watch(revision).await) };
                self.request = Some(Box::pin(open));
            }
            Command::Renew { held, ttl } => {
                self.request = Some(Box::pin(async move {
                    let renewed = store.renew(&held, ttl).await;
                    if renewed.is_ok() {
                        status.renewed();
                    }
                    Answer::Other(Event::Written(renewed))
                }));
            }
            Command::Update { held, ttl } => {
                self.request = Some(Box::pin(async move {
                    let updated = store.update(&held, &held.attributes, ttl).await;
                    Answer::Other(Event::Written(updated))
                }));
            }
            Command::Create { subnet, attributes, ttl } => {
                self.request = Some(Box::pin(async move {
                    let created = store.create(subnet, &attributes, ttl).await;
                    Answer::Other(Event::Written(created))
                }));
            }
            Command::DropWatch => self.watch = None,
            Command::Publish(peers) => {
                self.peers.send_replace(peers);
            }
            Command::Remember(known) => {
                self.manager.known.send_replace(Some(Arc::new(known)));
            }
            Command::Confirmed => status.confirmed(),
            Command::Count { peers, held } => status.published(peers, held),
            Command::Reject(rejected) => status.reject(&rejected),
            Command::Expires(unix_seconds) => status.lease_expires(unix_seconds),
            Command::Say(say) => {
                if let Say::WrittenInOurName { .. } = say {
                    status.written_by_others();
                }
                log(&say);
            }
            Command::End(end) => return Some(end),
        }
        None
    }

    /// Waits for the answer, for changes if the machine `wants_changes`, and until `wake`.
    async fn next_event(&mut self, wake: Option<Duration>, wants_changes: bool) -> Event {
        let left = wake.map_or(CLOCK_CHECK_MAX, |wake| wake.saturating_sub(clock::boot_time()));
        let answer = tokio::select! {
            answer = next_answer(&mut self.request) => answer,
            changes = next_changes(&mut self.watch), if wants_changes => {
                Answer::Other(Event::Changed(changes))
            }
            () = self.config_check.done() => return Event::Timer,
            attributes = next_attributes(&mut self.attributes) => {
                return Event::Moved(attributes);
            }
            () = sleep(left.min(CLOCK_CHECK_MAX)) => return Event::Timer,
        };
        match answer {
            Answer::Opened(Ok(watch)) => {
                self.watch = Some(watch);
                self.noted(Event::Opened(Ok(())))
            }
            Answer::Opened(Err(error)) => self.noted(Event::Opened(Err(error))),
            Answer::Other(event) => self.noted(event),
        }
    }

    /// Keeps the status up to date with what the store just did.
    fn noted(&mut self, event: Event) -> Event {
        match &event {
            Event::Listed(answer) => {
                self.manager.note(answer);
                if answer.is_ok() {
                    self.manager.status.listed();
                    self.config_check.begin();
                }
            }
            Event::Opened(answer) => self.manager.note(answer),
            Event::Changed(changes) => self.manager.note(changes),
            Event::Written(answer) => self.manager.note_write(answer),
            Event::Timer | Event::Moved(_) => {}
        }
        event
    }
}

async fn next_answer<F: Future<Output = Answer> + Unpin>(request: &mut Option<F>) -> Answer {
    match request {
        Some(under_way) => {
            let answer = under_way.await;
            *request = None;
            answer
        }
        None => std::future::pending().await,
    }
}

async fn next_changes(watch: &mut Option<Watch>) -> Result<Vec<Change>, StoreError> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

/// The next attributes, once they change.
pub(super) async fn next_attributes(attributes: &mut Receiver<LeaseAttributes>) -> LeaseAttributes {
    match attributes.changed().await {
        Ok(()) => attributes.borrow_and_update().clone(),
        // Nobody changes them any more.
        Err(_) => std::future::pending().await,
    }
}

fn log(say: &Say) {
    if say.is_warning() {
        warn!("{say}");
    } else if let Say::WrittenInOurName { .. } = say {
        // Counted, and said lately.
        debug!("{say}");
    } else {
        info!("{say}");
    }
}

#[cfg(test)]
mod tests;

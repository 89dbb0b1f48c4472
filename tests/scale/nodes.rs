//! The nodes: live ones, those that are replayed, and the lease that changes.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_client::{Client, WatchOptions};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use weft::config::options::StoreOptions;
use weft::control::identity::NodeIdentity;
use weft::control::lease::{Lease, LeaseAttributes};
use weft::control::manager::SubnetManager;
use weft::control::snapshot::OwnLease;
use weft::route::Prefixes;

use crate::support::control::{
    Running, acquire_at_last, connect, subnet_path, wait_for_config, wide_network,
};
use crate::support::members::Members;
use crate::{KNOWN, OTHER};

/// The subnet whose lease changes, which no node gets.
const SUBJECT: &str = "10.0.0.0-24";
/// Of a write that may meet a member without a leader.
const PUT_MAX: Duration = Duration::from_secs(1);
const PUT_PAUSE: Duration = Duration::from_millis(20);
/// Watches that share a connection.
const WATCHES_PER_CONNECTION: usize = 100;

/// A node that has its subnet.
pub(crate) struct Started {
    manager: SubnetManager,
    own: OwnLease,
    number: usize,
}

/// A node's start, up to its subnet; with a `previous` one, a later start.
pub(crate) async fn start(members: &Members, number: usize, previous: Option<Prefixes>) -> Started {
    let host = u32::try_from(number).unwrap();
    let attributes = LeaseAttributes::udp(Ipv4Addr::from_bits(0xAC10_0001 + host));
    let name = format!("node-{number}");
    let boot_id = format!("boot of {name}");
    let identity = NodeIdentity { hostname: name, machine_id: None, boot_id };
    let options = StoreOptions::Etcd(members.options(KNOWN));
    let manager = connect(&options, previous).unwrap().with_identity(identity);
    wait_for_config(&manager).await;
    let own = acquire_at_last(&manager, &wide_network(), &attributes).await;
    Started { manager, own, number }
}

impl Started {
    /// Subnets that others were faster to take.
    pub(crate) fn races(&self) -> u64 {
        self.manager.status().read().conflicts
    }

    pub(crate) fn run(self) -> Live {
        let subnets = self.own.lease.subnets;
        Live { running: Running::start(self.manager, self.own), number: self.number, subnets }
    }
}

/// A node that follows the others.
pub(crate) struct Live {
    running: Running,
    number: usize,
    subnets: Prefixes,
}

impl Live {
    /// Waits until it has published so many peers.
    pub(crate) async fn knows(&mut self, peers: usize) {
        self.running.peers.wait_for(|it| it.len() == peers).await.unwrap();
    }

    /// Waits until it has published a change, and says how long after `began` that was.
    pub(crate) async fn has(&mut self, change: Change, began: Instant) -> Duration {
        let is_there = |lease: &Arc<Lease>| lease.revision >= change.revision;
        let peers = &mut self.running.peers;
        peers.wait_for(|it| it.get(&change.subnets).is_some_and(is_there)).await.unwrap();
        began.elapsed()
    }

    /// Ends, and starts again with the subnet that it had.
    pub(crate) async fn restart(&mut self, members: &Members) {
        self.running.task.abort();
        *self = start(members, self.number, Some(self.subnets)).await.run();
    }
}

/// The lease that changes.
pub(crate) struct Subject {
    client: Client,
    subnets: Prefixes,
    changes: u32,
}

/// One write of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) subnets: Prefixes,
    pub(crate) revision: i64,
}

impl Subject {
    pub(crate) async fn put_first(members: &Members) -> Self {
        let client = Client::connect([members.url(OTHER)], None).await.unwrap();
        let subnets = Prefixes::from("10.0.0.0/24".parse::<weft::route::Prefix>().unwrap());
        let mut subject = Self { client, subnets, changes: 0 };
        subject.change().await;
        subject
    }

    /// Its node moves to another address. Tried until etcd takes it.
    pub(crate) async fn change(&mut self) -> Change {
        self.changes += 1;
        let address = Ipv4Addr::from_bits(0xC0A8_0000 + self.changes);
        let value = format!(r#"{{"PublicIP":"{address}","PublicIPv6":null,"BackendType":"udp"}}"#);
        loop {
            let put = self.client.put(subnet_path(SUBJECT), value.as_str(), None);
            if let Ok(Ok(answer)) = timeout(PUT_MAX, put).await {
                let revision = answer.header().unwrap().revision();
                return Change { subnets: self.subnets, revision };
            }
            sleep(PUT_PAUSE).await;
        }
    }
}

/// Watches that stand for the nodes that are not live.
pub(crate) struct Replayed {
    watches: u64,
    seen: Arc<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    events: AtomicU64,
    wanted: AtomicU64,
    all: Notify,
}

impl Replayed {
    pub(crate) async fn watch(members: &Members, watches: usize) -> Self {
        let seen = Arc::new(Seen::default());
        let mut client = None;
        for number in 0..watches {
            if number % WATCHES_PER_CONNECTION == 0 {
                let member = KNOWN[number / WATCHES_PER_CONNECTION % KNOWN.len()];
                client = Some(Client::connect([members.url(member)], None).await.unwrap());
            }
            let mut watcher = client.as_ref().unwrap().watch_client();
            let options = WatchOptions::new().with_prefix();
            let mut stream = watcher.watch(subnet_path(""), Some(options)).await.unwrap();
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                while let Ok(Some(message)) = stream.message().await {
                    let events = message.events().len() as u64;
                    let now = seen.events.fetch_add(events, Ordering::Relaxed) + events;
                    if now >= seen.wanted.load(Ordering::Relaxed) {
                        seen.all.notify_one();
                    }
                }
            });
        }
        Self { watches: watches as u64, seen }
    }

    /// Call before a change.
    pub(crate) fn expect_one_more(&self) -> Expected<'_> {
        self.seen
            .wanted
            .store(self.seen.events.load(Ordering::Relaxed) + self.watches, Ordering::Relaxed);
        Expected(&self.seen)
    }
}

/// A change that all watches are about to see.
pub(crate) struct Expected<'a>(&'a Seen);

impl Expected<'_> {
    /// Waits until they have, and says how long after `began` that was.
    pub(crate) async fn all(self, began: Instant) -> Duration {
        let is_short =
            || self.0.events.load(Ordering::Relaxed) < self.0.wanted.load(Ordering::Relaxed);
        while is_short() {
            self.0.all.notified().await;
        }
        began.elapsed()
    }
}

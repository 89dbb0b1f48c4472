//! The route table in force, and which of its peers can't be reached: each replaced whole by the
//! control plane, read by the workers without a lock. What they contain is decided elsewhere.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;
use arc_swap::cache::Cache;

use crate::route::Table;
use crate::stats::HostKey;

/// One worker's view of something published: a load costs one comparison while nothing changes.
/// Load once per batch; an idle reader keeps what it loaded last alive.
pub type Reader<T> = Cache<Arc<ArcSwap<T>>, Arc<T>>;

/// Hosts, by what workers know them by.
pub type HostSet = BTreeSet<HostKey>;

/// A place where something is published. Clones share it.
#[derive(Debug)]
pub struct Place<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Place<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Place<T> {
    /// With this in it at first.
    pub fn new(first: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(first)))
    }

    /// Replaces what is there. Readers see it at their next load; the old one is freed when the
    /// last of them has moved on.
    pub fn publish(&self, next: T) {
        self.0.store(Arc::new(next));
    }

    /// What is there. For the control plane; a worker uses [`Self::reader`].
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// One worker's view of it.
    pub fn reader(&self) -> Reader<T> {
        Cache::new(Arc::clone(&self.0))
    }
}

/// What the workers go by. Clones share it.
#[derive(Debug, Clone)]
pub struct Published {
    /// The table in force.
    pub table: Place<Table>,
    /// Hosts that can't be reached.
    pub unresolved: Place<HostSet>,
    /// Hosts to which each worker sends from a port of its own.
    pub spread: Place<HostSet>,
    /// Hosts whose packets the kernel received lately, past the workers.
    pub heard: Place<HostSet>,
}

impl Published {
    /// Publishes a first table, of which all peers may be reached, from the tunnel's port.
    pub fn new(table: Table) -> Self {
        let [unresolved, spread, heard] = [(), (), ()].map(|()| Place::new(HostSet::new()));
        Self { table: Place::new(table), unresolved, spread, heard }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::route::Peer;

    fn table(subnet: &str) -> Table {
        Table::build(vec![Arc::new(Peer::new(
            subnet.parse().unwrap(),
            SocketAddr::from(([192, 0, 2, 1], 8285)),
        ))])
    }

    #[test]
    fn readers_free_the_table_they_left() {
        let published = Place::new(Table::build(Vec::new()));
        let mut reader = published.reader();
        assert!(reader.load().peers().is_empty());

        published.publish(table("10.5.1.0/24"));
        let first = Arc::downgrade(&published.load());
        assert!(reader.load().lookup(Ipv4Addr::new(10, 5, 1, 9)).is_some());

        published.publish(table("10.5.2.0/24"));
        assert!(first.upgrade().is_some(), "the reader has not moved on yet");
        assert!(reader.load().lookup(Ipv4Addr::new(10, 5, 1, 9)).is_none());
        assert!(reader.load().lookup(Ipv4Addr::new(10, 5, 2, 9)).is_some());
        assert!(first.upgrade().is_none(), "the old table is still held");
    }

    #[test]
    fn a_reader_never_sees_half_a_table() {
        let published = Place::new(table("10.5.0.0/24"));
        let mut reader = published.reader();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..1_000u32 {
                    published.publish(table(&format!("10.5.{}.0/24", round % 256)));
                }
            });
            for _ in 0..10_000 {
                let table = reader.load();
                let subnets = table.peers()[0].subnets;
                let peer = table.lookup(subnets.v4().unwrap().first_host()).unwrap();
                assert_eq!(peer.subnets, subnets);
            }
        });
    }
}

//! What a store shows and grants: all leases at one moment, the changes after it, and the lease of
//! this node. Pure.

use std::sync::Arc;
use std::time::Duration;

use crate::control::lease::Lease;
use crate::control::rejected::{RejectReason, Rejected};
use crate::route::Prefixes;

/// Most leases accepted from a store: one for each /24 of a /8. What lies beyond is rejected, so
/// that a flood costs bounded memory.
pub const ENTRIES_MAX: usize = 65_536;
/// Rejected entries kept of one listing; the rest is only counted as one.
pub(crate) const REJECTED_MAX: usize = 4096;

/// All leases at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The live leases, at most `ENTRIES_MAX`.
    pub leases: Vec<Arc<Lease>>,
    /// What is no lease.
    pub rejected: Vec<Rejected>,
    /// The moment, in revisions of the store; a watch continues from here.
    pub revision: i64,
    /// Which store it was, so that one that was replaced is noticed; 0 if it does not say.
    pub cluster: u64,
    /// Whether there was more than this, of which nothing is known.
    pub is_cut: bool,
    /// The entry that was written last of all.
    pub last_written: Option<LastWritten>,
}

/// The entry of a listing that was written last. While it is the last one, nobody has written since
/// the listing, and the store is the one that was listed: one that was wiped, or restored from a
/// backup, may reach the revisions of before again, but never an etcd lease's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastWritten {
    /// Its revision.
    pub revision: i64,
    /// Its key below `subnets/` and its etcd lease, 0 without; nothing of what is no lease.
    pub lease: Option<(String, i64)>,
}

/// One change.
#[derive(Debug, Clone)]
pub enum Change {
    /// The watch is established; changes up to this revision happened before.
    Live {
        /// The store's revision when it began to watch.
        revision: i64,
    },
    /// Nothing that matters changed up to this revision.
    Progress {
        /// The store's revision.
        revision: i64,
    },
    /// A lease was written.
    Put(Lease),
    /// A key was written with something that is no lease.
    Rejected(Rejected),
    /// A key is gone.
    Deleted {
        /// The key below `subnets/`.
        key: String,
        /// The store's revision of the deletion.
        revision: i64,
    },
    /// The store cannot say what changed; this is how it looks now.
    Everything(Snapshot),
}

impl Change {
    /// The store's revision that it is of.
    pub(crate) fn revision(&self) -> i64 {
        match self {
            Self::Live { revision } | Self::Progress { revision } => *revision,
            Self::Put(lease) => lease.revision,
            Self::Rejected(rejected) => rejected.revision,
            Self::Deleted { revision, .. } => *revision,
            Self::Everything(snapshot) => snapshot.revision,
        }
    }
}

/// A lease as just written by us.
#[derive(Debug, Clone)]
pub struct Granted {
    /// The entry, with the revision that the next write compares.
    pub lease: Lease,
    /// When it ends, by `clock::boot_time`, counted from before the request was sent; `None` for
    /// a reservation.
    pub expires: Option<Duration>,
}

/// A place for a new entry, as a listing showed it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vacancy {
    /// What that listing shows as written last.
    pub last_written: Option<LastWritten>,
    /// This node's entry of another key, which makes room for it.
    pub replaces: Option<Lease>,
}

impl Vacancy {
    /// The entry that `wanted` becomes in this place: new, and bound as the one that it replaces.
    pub(crate) fn entry(&self, wanted: &Lease) -> Lease {
        let lifetime = self.replaces.as_ref().map_or(wanted.lifetime, |before| before.lifetime);
        Lease { lifetime, revision: 0, ..wanted.clone() }
    }

    /// Whether the place of `wanted` is free only if nothing was written since the listing: any
    /// IPv6 subnet may stand beside any IPv4 one, so no range of keys has all those of one.
    pub(crate) fn compares_all(&self, wanted: &Lease) -> bool {
        std::iter::once(wanted).chain(&self.replaces).any(|it| it.subnets.v6().is_some())
    }
}

/// The subnets that this node holds.
#[derive(Debug, Clone)]
pub struct OwnLease {
    /// The entry as last seen in the store.
    pub lease: Lease,
    /// The end by `clock::boot_time`; `None` for a reservation.
    pub expires: Option<Duration>,
    /// The cluster's networks that they were taken from.
    pub networks: Prefixes,
}

impl Snapshot {
    /// A place for a new entry by this listing, in that of `replaces`, if there is one.
    pub fn vacancy(&self, replaces: Option<Lease>) -> Vacancy {
        Vacancy { last_written: self.last_written.clone(), replaces }
    }

    /// All subnets of `networks` whose keys are in use, beside that of `held`, in no order: of
    /// leases, and of entries with an unreadable value, over which nobody can write. A key that
    /// covers the network or lies outside of it is no node's here, and takes nothing from anybody.
    pub(crate) fn taken_beside(
        &self,
        held: Option<&Lease>,
        networks: Prefixes,
    ) -> impl Iterator<Item = Prefixes> + '_ {
        let unreadable = self.rejected.iter().filter_map(|it| Prefixes::from_key(&it.key));
        let held = held.map(|held| held.key.clone());
        let leases = self.leases.iter().filter(move |lease| held.as_ref() != Some(&lease.key));
        let all = leases.map(|lease| lease.subnets).chain(unreadable);
        all.filter_map(move |subnets| subnets.part_of(networks))
    }

    pub(crate) fn add(&mut self, entry: Result<Lease, Rejected>) {
        let (revision, lease) = match &entry {
            Ok(lease) => {
                (lease.revision, Some((lease.key.clone(), lease.lifetime.id().unwrap_or(0))))
            }
            Err(rejected) => (rejected.revision, None),
        };
        if self.last_written.as_ref().is_none_or(|last| last.revision < revision) {
            self.last_written = Some(LastWritten { revision, lease });
        }
        match entry {
            Ok(lease) if self.leases.len() < ENTRIES_MAX => self.leases.push(Arc::new(lease)),
            Ok(lease) => {
                self.is_cut = true;
                self.reject(Rejected::too_many(lease.revision));
            }
            Err(rejected) => self.reject(rejected),
        }
    }

    fn reject(&mut self, rejected: Rejected) {
        if self.rejected.len() < REJECTED_MAX {
            self.rejected.push(rejected);
        } else if Prefixes::from_key(&rejected.key).is_some() {
            // It takes a subnet, perhaps the own; other unparsable entries do not matter.
            self.is_cut = true;
        }
    }
}

impl Rejected {
    /// A lease beyond `ENTRIES_MAX`.
    pub(crate) fn too_many(revision: i64) -> Self {
        Self {
            key: "more leases".to_owned(),
            reason: RejectReason::TooMany,
            detail: format!("the store holds more than {ENTRIES_MAX} leases"),
            revision,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::lease::LeaseAttributes;
    use crate::route::Prefix;

    #[test]
    fn lease_flood_is_truncated_and_reported() {
        let mut snapshot = Snapshot::default();
        let value = LeaseAttributes::udp(Ipv4Addr::LOCALHOST).to_json().unwrap();
        for i in 0..ENTRIES_MAX as u32 + 3 {
            let subnet = Prefix::new(Ipv4Addr::from_bits(0x0A00_0000 + (i << 4)), 28).unwrap();
            snapshot.add(Lease::decode(subnet.key().as_bytes(), &value, 1));
        }
        assert_eq!(snapshot.leases.len(), ENTRIES_MAX);
        assert!(snapshot.is_cut, "a cut listing counts as all there is");
        assert_eq!(snapshot.rejected.len(), 3);
        assert!(snapshot.rejected.iter().all(|r| r.reason == RejectReason::TooMany));
        for _ in 0..2 * REJECTED_MAX {
            snapshot.add(Lease::decode(b"junk", &value, 1));
        }
        assert_eq!(snapshot.rejected.len(), REJECTED_MAX);
    }

    #[test]
    fn listing_cut_by_junk_is_incomplete() {
        let mut snapshot = Snapshot::default();
        let mut add = |key: &[u8]| {
            snapshot.add(Lease::decode(key, b"junk", 1));
            !snapshot.is_cut
        };
        for _ in 0..2 * REJECTED_MAX {
            assert!(add(b"junk"), "junk without a subnet concerns nobody");
        }
        assert!(!add(b"10.5.1.0-24"), "an entry that takes a subnet was dropped");
    }
}

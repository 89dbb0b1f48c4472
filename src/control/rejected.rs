//! Entries of a store that are not used, and why.

/// Why an entry of the store is not used. Its number is its place in [`RejectReason::NAMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RejectReason {
    /// The key is no subnet such as `10.5.34.0-24`.
    BadKey,
    /// The value is not the JSON of a lease.
    BadValue,
    /// The value is larger than any lease.
    TooLarge,
    /// The subnet lies outside the cluster's network.
    OutsideNetwork,
    /// The subnet overlaps this node's.
    OverlapsOwn,
    /// The subnet overlaps one that was leased earlier.
    OverlapsOther,
    /// No node can be reached under the public address.
    BadAddress,
    /// The public address is this node's.
    OwnAddress,
    /// The store holds more entries than weft accepts.
    TooMany,
}

impl RejectReason {
    /// Every reason with its name for metrics, in the order of the counters.
    pub const NAMES: [(Self, &'static str); 9] = [
        (Self::BadKey, "bad_key"),
        (Self::BadValue, "bad_value"),
        (Self::TooLarge, "too_large"),
        (Self::OutsideNetwork, "outside_network"),
        (Self::OverlapsOwn, "overlaps_own"),
        (Self::OverlapsOther, "overlaps_other"),
        (Self::BadAddress, "bad_address"),
        (Self::OwnAddress, "own_address"),
        (Self::TooMany, "too_many"),
    ];

    /// The name for metrics.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}

/// An entry that is no usable lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The key below `subnets/`, cut to a printable length.
    pub key: String,
    /// The class, for counters.
    pub reason: RejectReason,
    /// The explanation, for the log.
    pub detail: String,
    /// The entry's version.
    pub revision: i64,
}

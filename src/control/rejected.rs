//! Entries of a store that are not used, and why.

use crate::words::words;

words! {
    /// Why an entry of the store is not used, as metrics name it.
    #[derive(Hash)]
    RejectReason {
        /// The key is no subnet such as `10.5.34.0-24`.
        BadKey = "bad_key",
        /// The value is not the JSON of a lease.
        BadValue = "bad_value",
        /// The value is larger than any lease.
        TooLarge = "too_large",
        /// The subnet lies outside the cluster's network.
        OutsideNetwork = "outside_network",
        /// The subnet overlaps this node's.
        OverlapsOwn = "overlaps_own",
        /// The subnet overlaps one that was leased earlier.
        OverlapsOther = "overlaps_other",
        /// No node can be reached under the public address.
        BadAddress = "bad_address",
        /// The public address is this node's.
        OwnAddress = "own_address",
        /// The store holds more entries than weft accepts.
        TooMany = "too_many",
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

//! Prefixes, the immutable longest-prefix-match table, and its publication to the workers.

mod prefix;

pub use prefix::{Prefix, PrefixError};

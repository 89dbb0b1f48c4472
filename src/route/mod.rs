//! Prefixes, the immutable longest-prefix-match table, and its publication to the workers.

mod prefix;
mod publish;
mod table;

pub use prefix::{Prefix, PrefixError};
pub use publish::Published;
pub use table::{Peer, Table};

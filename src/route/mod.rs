//! Prefixes, the immutable longest-prefix-match table, and its publication to the workers.

mod prefix;
mod publish;
mod table;
mod unresolved;

pub use prefix::{Prefix, PrefixError};
pub use publish::{Published, Reader};
pub use table::{Peer, Table};
pub use unresolved::Unresolved;

//! Prefixes, the immutable longest-prefix-match table, and its publication to the workers.

mod prefix;
mod publish;
mod table;

pub use prefix::{Prefix, PrefixError};
pub use publish::{Published, Reader};
pub use table::{Peer, Table};

//! Prefixes, the immutable longest-prefix-match table, and its publication to the workers.

mod families;
mod hosts;
mod prefix;
mod prefixes;
mod publish;
mod source_ports;
mod table;

pub use crate::packet::IpAddress;
pub use families::Families;
pub use hosts::Endpoint;
pub use prefix::{Prefix, PrefixError};
pub use prefixes::Prefixes;
pub use publish::{HostSet, Place, Published, Reader};
pub use source_ports::{SOURCE_PORTS, first_source_port, is_tunnel_source};
pub use table::{Peer, Routed, Table};

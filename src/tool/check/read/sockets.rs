//! UDP sockets of this network namespace, and the processes that have them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use procfs::process::FDTarget;

use super::process::all;
use crate::tool::check::facts::UdpSocket;

pub(super) fn read() -> Option<Vec<UdpSocket>> {
    let sockets = procfs::net::udp().ok()?;
    // Only its wildcard takes IPv4 as well, and not always; a host without IPv6 has no file.
    let sockets = sockets.into_iter().chain(procfs::net::udp6().unwrap_or_default());
    let holders = holders();
    let sockets = sockets.filter_map(|entry| {
        let address = match entry.local_address.ip() {
            IpAddr::V4(address) => address,
            IpAddr::V6(address) if address.is_unspecified() => Ipv4Addr::UNSPECIFIED,
            IpAddr::V6(_) => return None,
        };
        let holders = holders.get(&entry.inode).cloned().unwrap_or_default();
        Some(UdpSocket { address, port: entry.local_address.port(), holders })
    });
    Some(sockets.collect())
}

/// The processes behind each socket by its inode, as far as this user may know.
fn holders() -> BTreeMap<u64, Vec<(u32, String)>> {
    let mut holders: BTreeMap<u64, Vec<_>> = BTreeMap::new();
    for (process, pid, name) in all() {
        for file in process.fd().into_iter().flatten().flatten() {
            if let FDTarget::Socket(inode) = file.target {
                holders.entry(inode).or_default().push((pid, name.clone()));
            }
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_own_socket_is_found() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let found = read().unwrap().into_iter().find(|found| found.port == port).unwrap();
        assert_eq!(found.address, Ipv4Addr::LOCALHOST);
        assert!(found.holders.iter().any(|(pid, _)| *pid == std::process::id()), "{found:?}");
    }
}

//! UDP sockets of this network namespace, and the processes that have them.

use procfs::process::FDTarget;
use std::collections::BTreeMap;

use super::process::all;
use crate::tool::check::facts::UdpSocket;

pub(super) fn read() -> Option<Vec<UdpSocket>> {
    let sockets = procfs::net::udp().ok()?;
    // A host without IPv6 has no file.
    let sockets = sockets.into_iter().chain(procfs::net::udp6().unwrap_or_default());
    let holders = holders();
    let sockets = sockets.map(|entry| {
        let (address, port) = (entry.local_address.ip(), entry.local_address.port());
        let holders = holders.get(&entry.inode).cloned().unwrap_or_default();
        UdpSocket { address, port, holders }
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
    use std::net::{Ipv4Addr, UdpSocket};

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

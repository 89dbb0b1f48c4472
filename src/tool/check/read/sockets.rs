//! UDP sockets of this network namespace, and the processes that have them.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;

use super::process::Named;
use crate::tool::check::facts::UdpSocket;

pub(super) fn read(processes: &[Named]) -> Option<Vec<UdpSocket>> {
    let mut sockets = parse(&fs::read_to_string("/proc/self/net/udp").ok()?);
    // Only its wildcard takes IPv4 as well, and not always; a host without IPv6 has no file.
    sockets.extend(parse(&fs::read_to_string("/proc/self/net/udp6").unwrap_or_default()));
    let holders = holders(processes);
    for socket in &mut sockets {
        socket.holders = holders.get(&socket.inode).cloned().unwrap_or_default();
    }
    Some(sockets)
}

/// `sl local_address rem_address st ...`; addresses are words of the host's byte order in hex.
fn parse(text: &str) -> Vec<UdpSocket> {
    let lines = text.lines().skip(1).filter_map(|line| {
        let mut words = line.split_whitespace();
        let (address, port) = words.nth(1)?.split_once(':')?;
        let inode = words.nth(7)?.parse().ok()?;
        let address = match address.len() {
            8 => Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.to_ne_bytes()),
            _ if address.bytes().all(|byte| byte == b'0') => Ipv4Addr::UNSPECIFIED,
            _ => return None,
        };
        let port = u16::from_str_radix(port, 16).ok()?;
        Some(UdpSocket { address, port, inode, holders: Vec::new() })
    });
    lines.collect()
}

/// The processes behind each socket, as far as this user may know.
fn holders(processes: &[Named]) -> BTreeMap<u64, Vec<Named>> {
    let mut holders: BTreeMap<u64, Vec<Named>> = BTreeMap::new();
    for (pid, name) in processes {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for file in files {
            let target = fs::read_link(file.path()).unwrap_or_default();
            let inode =
                target.to_str().and_then(|it| it.strip_prefix("socket:[")?.strip_suffix(']'));
            if let Some(inode) = inode.and_then(|it| it.parse().ok()) {
                holders.entry(inode).or_default().push((*pid, name.clone()));
            }
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_read() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n\
1: 010014AC:205D 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 77 2 0 0\n";
        if cfg!(target_endian = "little") {
            let address = Ipv4Addr::new(172, 20, 0, 1);
            let socket = UdpSocket { address, port: 8285, inode: 77, holders: Vec::new() };
            assert_eq!(parse(text), [socket]);
        }
        let zero = "0".repeat(32);
        let six = format!("x\n1: {zero}:205D {zero}:0000 07 0:0 0:0 0 0 0 78 2 0 0\n");
        let found = parse(&six);
        assert_eq!((found[0].address, found[0].inode), (Ipv4Addr::UNSPECIFIED, 78));
    }
}

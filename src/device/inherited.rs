//! Queues and sockets that an earlier weftd has opened: what is waiting in them is not lost.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};

use socket2::{SockRef, Type};

use crate::sys::steering::LANES;
use crate::sys::tun as sys;

use super::socket::TunnelSocket;
use super::tun::{Tun, TunOffload};

/// The TUN devices that have queues among `descriptors`.
pub fn tun_names(descriptors: &[OwnedFd]) -> BTreeSet<String> {
    descriptors.iter().filter_map(|some| Some(sys::identify(some.as_fd()).ok()?.0)).collect()
}

/// Opens nothing: goes on with `descriptors`, which must be queues of one device of weft's kind, of
/// one lane or [`LANES`] for each of `count` workers, and `count` sockets bound to `address`. The
/// error says what they are instead, or what the kernel refuses.
pub fn inherit(
    descriptors: Vec<OwnedFd>,
    address: SocketAddr,
    offload: TunOffload,
    [gso, gro]: [bool; 2],
    count: NonZeroU16,
) -> io::Result<(Vec<TunnelSocket>, Vec<Tun>)> {
    let all = descriptors.len();
    let (queues, others): (Vec<_>, Vec<_>) =
        descriptors.into_iter().partition(|descriptor| sys::identify(descriptor.as_fd()).is_ok());
    let is_udp = |descriptor: &OwnedFd| {
        let socket = SockRef::from(descriptor);
        socket.r#type().is_ok_and(|kind| kind == Type::DGRAM) && socket.local_addr().is_ok()
    };
    let (sockets, rest): (Vec<_>, Vec<_>) = others.into_iter().partition(is_udp);
    let workers = usize::from(count.get());
    let is_whole = [workers, workers * usize::from(LANES.get())].contains(&queues.len())
        && sockets.len() == workers
        && rest.is_empty();
    if !is_whole {
        let (queues, sockets) = (queues.len(), sockets.len());
        return Err(io::Error::other(format!(
            "{queues} TUN queues and {sockets} UDP sockets among {all} descriptors, and --workers \
             needs {count} of each, or {LANES} queues for each socket"
        )));
    }
    let sockets = TunnelSocket::inherit_group(sockets, address, gso, gro)?;
    Ok((sockets, Tun::inherit(queues, offload)?))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{Ipv4Addr, UdpSocket};

    use super::*;

    #[test]
    fn what_is_no_tunnel_is_refused() {
        let socket = || OwnedFd::from(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let file = || OwnedFd::from(File::open("/dev/null").unwrap());
        let refusal = |descriptors| {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 8285));
            let none = TunOffload { tso: false, uso: false };
            let one = NonZeroU16::MIN;
            inherit(descriptors, address, none, [false; 2], one).unwrap_err().to_string()
        };
        let text = "0 TUN queues and 1 UDP sockets among 1 descriptors, and --workers needs 1";
        assert!(refusal(vec![socket()]).starts_with(&format!("{text} of each")));
        for others in [vec![], vec![file(), file()], vec![socket(), socket()]] {
            assert!(refusal(others).contains("--workers needs 1 of each"));
        }
    }
}

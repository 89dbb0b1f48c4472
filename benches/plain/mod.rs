//! The plain overlay protocol, one datagram for one packet, written the obvious way.
//!
//! One thread, `poll` over TUN and UDP, one `read` for one `sendto`, one `recv` for one `write`,
//! no offload. This is the yardstick and the test peer; it shares no code with the library under
//! measurement and must never gain a batch.

#![allow(unsafe_code, reason = "creating a TUN device takes one ioctl, which has no safe wrapper")]

mod header;
mod options;

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, poll};

use header::decrement_ttl;
pub(crate) use options::Options;
use options::Route;

/// Larger than any IPv4 packet (RFC 791: total length is 16 bits).
const PACKET_BYTES_MAX: usize = 65_536;

/// Forwards until a descriptor fails; `send` puts one packet on the wire and decides from which
/// socket. A packet that cannot be sent is lost, as it would be on a wire.
///
/// # Errors
/// When the device or the socket cannot be made, or breaks later.
pub(crate) fn run(
    options: &Options,
    socket: &UdpSocket,
    mut send: impl FnMut(&[u8], SocketAddrV4) -> io::Result<usize>,
) -> Result<()> {
    let mut tun = open_tun(&options.tun_name)?;
    let mut buffer = vec![0_u8; PACKET_BYTES_MAX];
    loop {
        let mut ready = [PollFd::new(&tun, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("poll on the TUN device and the socket"),
        }
        // Both sources are tried in turn until neither has anything left, so that `poll` costs
        // nothing under load.
        let mut active = true;
        while active {
            active = false;
            if let Some(length) = length_or_idle(tun.read(&mut buffer), "read from the TUN device")?
            {
                active = true;
                if let Some(peer) = outgoing(&mut buffer[..length], &options.routes) {
                    lossy(send(&buffer[..length], peer), "send to the peer")?;
                }
            }
            if let Some(length) = length_or_idle(socket.recv(&mut buffer), "receive from a peer")? {
                active = true;
                if decrement_ttl(&mut buffer[..length]).is_some() {
                    lossy(tun.write(&buffer[..length]), "write to the TUN device")?;
                }
            }
        }
    }
}

/// Binds a UDP socket that never blocks.
///
/// # Errors
/// When the address is not ours or the port is taken.
pub(crate) fn bind_nonblocking(address: SocketAddrV4) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("bind UDP {address}"))?;
    socket.set_nonblocking(true).context("make the socket non-blocking")?;
    Ok(socket)
}

fn length_or_idle(outcome: io::Result<usize>, what: &'static str) -> Result<Option<usize>> {
    match outcome {
        Ok(length) => Ok(Some(length)),
        // A refused port at the peer comes back as an error of the next call on the socket.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionRefused
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error).context(what),
    }
}

/// Ends the program only for what cannot pass: a descriptor that is gone.
fn lossy(outcome: io::Result<usize>, what: &'static str) -> Result<()> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::EBADFD) => Err(error).context(what),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Where a packet from the TUN goes, its TTL decremented; `None` when it goes nowhere.
fn outgoing(packet: &mut [u8], routes: &[Route]) -> Option<SocketAddrV4> {
    let destination = decrement_ttl(packet)?;
    routes.iter().find(|route| destination & route.mask == route.network).map(|route| route.peer)
}

/// Creates the TUN device `name`: bare IPv4 packets, non-blocking, no virtio header.
fn open_tun(name: &str) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .context("open /dev/net/tun (needs root, and the tun module)")?;
    // SAFETY: `ifreq` is plain integers and bytes, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    ensure!(
        !name.is_empty() && name.len() < request.ifr_name.len(),
        "--tun {name}: an interface name has 1 to {} bytes",
        request.ifr_name.len() - 1
    );
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI).context("the TUN flags fit the field")?;
    // SAFETY: the descriptor is open, and `request` outlives the call, is writable and is the
    // structure that TUNSETIFF reads and writes (kernel drivers/net/tun.c, `__tun_chr_ioctl`).
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if outcome < 0 {
        return Err(io::Error::last_os_error())
            .with_context(|| format!("create the TUN device {name}"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::header::tests::header;
    use super::options::parse_route;
    use super::*;

    #[test]
    fn a_route_says_where_its_subnet_goes_and_nothing_else() {
        let routes = [parse_route("10.5.2.7/24=192.0.2.2:8285").unwrap()];
        let peer = outgoing(&mut header(64), &routes);
        assert_eq!(peer, Some("192.0.2.2:8285".parse().unwrap()));
        let elsewhere = [parse_route("10.5.3.0/24=192.0.2.2:8285").unwrap()];
        assert_eq!(outgoing(&mut header(64), &elsewhere), None);
        let everything = [parse_route("0.0.0.0/0=192.0.2.3:1").unwrap()];
        assert_eq!(outgoing(&mut header(64), &everything), Some("192.0.2.3:1".parse().unwrap()));
    }
}

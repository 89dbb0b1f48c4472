//! The plain overlay protocol, one datagram for one packet, written the obvious way.
//!
//! One thread, `poll` over TUN and UDP, one `read` for one `sendto`, one `recv` for one `write`,
//! no offload. This is the yardstick and the test peer; it shares no code with the library under
//! measurement and must never gain a batch.

#![allow(unsafe_code, reason = "creating a TUN device takes one ioctl, which has no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};

/// Larger than any IPv4 packet (RFC 791: total length is 16 bits).
const PACKET_BYTES_MAX: usize = 65_536;
const IPV4_HEADER_BYTES: usize = 20;

/// Destinations inside `network/prefix_len` go to `peer`.
struct Route {
    network: u32,
    mask: u32,
    peer: SocketAddrV4,
}

/// What the command line said.
pub(crate) struct Options {
    tun_name: String,
    bind: SocketAddrV4,
    routes: Vec<Route>,
    /// `--ports`, understood by the test peer only.
    pub(crate) ports: Option<usize>,
}

impl Options {
    /// Reads the process's arguments; `None` when help was asked for.
    pub(crate) fn from_args() -> Result<Option<Self>> {
        let (mut tun_name, mut bind, mut routes, mut ports) = (None, None, Vec::new(), None);
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            if flag == "--help" || flag == "-h" {
                return Ok(None);
            }
            let value = args.next().with_context(|| format!("{flag} needs a value"))?;
            match flag.as_str() {
                "--tun" => tun_name = Some(value),
                "--bind" => {
                    bind = Some(value.parse().with_context(|| {
                        format!("--bind {value}: expected ADDRESS:PORT, such as 192.0.2.1:8285")
                    })?);
                }
                "--route" => routes.push(parse_route(&value)?),
                "--ports" => {
                    ports = Some(value.parse().with_context(|| {
                        format!("--ports {value}: expected a number, 0 for a new port per packet")
                    })?);
                }
                _ => bail!("unknown flag {flag}; see --help"),
            }
        }
        Ok(Some(Self {
            tun_name: tun_name.context("--tun NAME is missing")?,
            bind: bind.context("--bind ADDRESS:PORT is missing")?,
            routes,
            ports,
        }))
    }

    /// The address and port that the proxy receives on.
    pub(crate) fn bind(&self) -> SocketAddrV4 {
        self.bind
    }
}

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

/// Takes one off the TTL, patches the header checksum (RFC 1141) and gives the destination;
/// `None` for what is no IPv4 header or would leave with TTL 0.
fn decrement_ttl(packet: &mut [u8]) -> Option<u32> {
    let header: &mut [u8; IPV4_HEADER_BYTES] = packet.first_chunk_mut()?;
    if header[0] >> 4 != 4 || header[8] <= 1 {
        return None;
    }
    header[8] -= 1;
    let checksum = u16::from_be_bytes([header[10], header[11]]);
    let (sum, carry) = checksum.overflowing_add(0x0100);
    let patched = sum.wrapping_add(u16::from(carry));
    header[10..12].copy_from_slice(&patched.to_be_bytes());
    Some(u32::from_be_bytes([header[16], header[17], header[18], header[19]]))
}

fn parse_route(text: &str) -> Result<Route> {
    let parse = || {
        let (prefix, peer) = text.split_once('=')?;
        let (address, length) = prefix.split_once('/')?;
        let address: Ipv4Addr = address.parse().ok()?;
        let length: u32 = length.parse().ok().filter(|length| *length <= 32)?;
        let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
        Some(Route { network: address.to_bits() & mask, mask, peer: peer.parse().ok()? })
    };
    parse().with_context(|| {
        format!("--route {text}: expected SUBNET=ADDRESS:PORT, such as 10.5.2.0/24=192.0.2.2:8285")
    })
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
    use super::*;

    /// 10.5.1.2 to 10.5.2.2, ICMP, TTL as given, checksum by definition (RFC 1071).
    fn header(ttl: u8) -> [u8; IPV4_HEADER_BYTES] {
        let mut header = [0; IPV4_HEADER_BYTES];
        header[..10].copy_from_slice(&[0x45, 0, 0, 20, 0x12, 0x34, 0x40, 0, ttl, 1]);
        header[12..].copy_from_slice(&[10, 5, 1, 2, 10, 5, 2, 2]);
        let checksum = !folded_sum(&header);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        header
    }

    fn folded_sum(header: &[u8]) -> u16 {
        let mut sum: u32 =
            header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        while sum >> 16 != 0 {
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        u16::try_from(sum).unwrap()
    }

    #[test]
    fn every_ttl_keeps_the_checksum_valid_or_is_refused() {
        for ttl in 0..=255 {
            let mut packet = header(ttl);
            let destination = decrement_ttl(&mut packet);
            if ttl <= 1 {
                assert_eq!((destination, packet), (None, header(ttl)), "TTL {ttl}");
            } else {
                assert_eq!(destination, Some(0x0A05_0202), "TTL {ttl}");
                assert_eq!((packet[8], folded_sum(&packet)), (ttl - 1, 0xFFFF), "TTL {ttl}");
            }
        }
    }

    #[test]
    fn what_is_no_ipv4_header_is_refused() {
        assert_eq!(decrement_ttl(&mut header(64)[..19]), None);
        let mut ipv6 = header(64);
        ipv6[0] = 0x60;
        assert_eq!(decrement_ttl(&mut ipv6), None);
    }

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

    #[test]
    fn a_malformed_route_names_itself() {
        for text in ["", "10.5.2.0/24", "10.5.2.0/33=192.0.2.2:1", "10.5.2/24=192.0.2.2:1"] {
            let error = parse_route(text).err().unwrap().to_string();
            assert!(error.contains(&format!("--route {text}:")), "{error}");
        }
    }
}

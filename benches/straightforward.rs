//! The straightforward design: what somebody would write first today, from the crates at hand.
//!
//! tun-tap makes the device, tokio-uring moves the packets, prefix-trie finds the peer; one task
//! for each direction, one operation for one packet, no offload. A plane of the benchmark and
//! nothing else: it shares the command line and the header edit with the other programs here,
//! and nothing with the library under measurement.

#[path = "plain/header.rs"]
mod header;
#[path = "plain/options.rs"]
mod options;

use std::io::{self, ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use ipnet::Ipv4Net;
use prefix_trie::PrefixMap;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use tokio_uring::fs::File;
use tokio_uring::net::UdpSocket;
use tun_tap::{Iface, Mode};

use header::decrement_ttl;
use options::{Options, Route};

const USAGE: &str = "\
usage: straightforward --tun NAME --bind ADDRESS:PORT [--route SUBNET=ADDRESS:PORT]...
Creates the TUN device NAME and forwards between it and UDP, one operation of an io_uring per
packet.
";

/// Larger than any IPv4 packet (RFC 791: total length is 16 bits).
const PACKET_BYTES_MAX: usize = 65_536;

type Routes = PrefixMap<Ipv4Net, SocketAddr>;

fn main() -> Result<()> {
    let Some(options) = Options::from_args()? else {
        return Ok(io::stdout().write_all(USAGE.as_bytes())?);
    };
    ensure!(options.ports.is_none(), "--ports belongs to plain-peer; see --help");
    tokio_uring::start(forward(options))
}

async fn forward(options: Options) -> Result<()> {
    let device = Iface::without_packet_info(&options.tun_name, Mode::Tun)
        .with_context(|| format!("create the TUN device {}", options.tun_name))?;
    let socket = UdpSocket::bind(options.bind.into())
        .await
        .with_context(|| format!("bind UDP {}", options.bind))?;
    let socket = Rc::new(socket);
    let routes = options.routes.iter().map(route).collect();
    let (outgoing, incoming) = (file_of(&device)?, file_of(&device)?);
    let out = tokio_uring::spawn(tun_to_udp(outgoing, Rc::clone(&socket), routes));
    udp_to_tun(socket, incoming).await?;
    out.await.context("the task from the TUN device to UDP")?
}

fn route(route: &Route) -> (Ipv4Net, SocketAddr) {
    let length_bits = u8::try_from(route.mask.count_ones()).expect("a mask has 32 bits");
    let network = Ipv4Net::new(Ipv4Addr::from_bits(route.network), length_bits);
    (network.expect("at most 32 bits"), route.peer.into())
}

/// The device as a file that tokio-uring takes. tun-tap gives its descriptor as a number only,
/// which a process may duplicate from itself without unsafe code (pidfd_getfd(2)).
fn file_of(device: &Iface) -> Result<File> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).context("pidfd_open on this process")?;
    let descriptor = pidfd_getfd(own, device.as_raw_fd(), PidfdGetfdFlags::empty())
        .context("pidfd_getfd on the TUN device's descriptor")?;
    Ok(File::from_std(descriptor.into()))
}

async fn tun_to_udp(device: File, socket: Rc<UdpSocket>, routes: Routes) -> Result<()> {
    let mut packet = Vec::with_capacity(PACKET_BYTES_MAX);
    loop {
        let outcome;
        packet.clear();
        // A character device has no position; the argument means nothing to it.
        (outcome, packet) = device.read_at(packet, 0).await;
        outcome.context("read from the TUN device")?;
        if let Some(peer) = outgoing(&mut packet, &routes) {
            let outcome;
            (outcome, packet) = socket.send_to(packet, peer).await;
            lossy(outcome, "send to the peer")?;
        }
    }
}

async fn udp_to_tun(socket: Rc<UdpSocket>, device: File) -> Result<()> {
    let mut packet = Vec::with_capacity(PACKET_BYTES_MAX);
    loop {
        let outcome;
        packet.clear();
        (outcome, packet) = socket.recv_from(packet).await;
        match outcome {
            Ok(_) => {}
            // A refused port at the peer comes back as an error of the next call on the socket.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error).context("receive from a peer"),
        }
        if decrement_ttl(&mut packet).is_some() {
            let outcome;
            (outcome, packet) = device.write_at(packet, 0).submit().await;
            lossy(outcome, "write to the TUN device")?;
        }
    }
}

/// Where a packet from the TUN goes, its TTL decremented; `None` when it goes nowhere.
fn outgoing(packet: &mut [u8], routes: &Routes) -> Option<SocketAddr> {
    let destination = Ipv4Addr::from_bits(decrement_ttl(packet)?);
    routes.get_lpm(&Ipv4Net::from(destination)).map(|(_, peer)| *peer)
}

/// Ends the program only for what cannot pass: a descriptor that is gone.
fn lossy(outcome: io::Result<usize>, what: &'static str) -> Result<()> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::EBADFD) => Err(error).context(what),
        Ok(_) | Err(_) => Ok(()),
    }
}

//! IPv4 packets made byte by byte, right or wrong, and a listener on all devices of a namespace.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use socket2::{Domain, Protocol, Socket, Type};
use weft::packet::checksum;

use super::lab::Namespace;

const HEADER_BYTES: usize = 20;

/// An IPv4 header with this protocol and payload, checksums of the header right.
pub(crate) fn ipv4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, rest: &[u8]) -> Vec<u8> {
    let total = u16::try_from(HEADER_BYTES + rest.len()).expect("a packet has at most 65535 bytes");
    let mut packet = vec![0x45, 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0x12, 0x34, 0, 0, 64, protocol, 0, 0]);
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(rest);
    seal(&mut packet);
    packet
}

/// A UDP datagram in IPv4; no UDP checksum, which IPv4 allows.
pub(crate) fn udp(
    (source, source_port): (Ipv4Addr, u16),
    (destination, destination_port): (Ipv4Addr, u16),
    payload: &[u8],
) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).expect("a payload fits a datagram");
    let mut datagram = Vec::new();
    for field in [source_port, destination_port, length, 0] {
        datagram.extend(field.to_be_bytes());
    }
    datagram.extend(payload);
    ipv4(source, destination, 17, &datagram)
}

/// Computes the header checksum again (RFC 791) after an edit.
pub(crate) fn seal(packet: &mut [u8]) {
    let header_bytes = usize::from(packet[0] & 15) * 4;
    packet[10..12].fill(0);
    let words = packet[..header_bytes].chunks(2);
    let mut sum: u32 = words.map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let checksum = !u16::try_from(sum).expect("the sum was folded to 16 bits");
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// What `source` would answer to this echo request, had it this number and length.
pub(crate) fn echo_reply(
    request: &[u8],
    source: Ipv4Addr,
    sequence: u16,
    total_bytes: usize,
) -> Vec<u8> {
    let asker = Ipv4Addr::from_bits(u32::from_be_bytes([12, 13, 14, 15].map(|at| request[at])));
    let mut message = request[HEADER_BYTES..].to_vec();
    message.resize(total_bytes - HEADER_BYTES, 0);
    message[..4].fill(0);
    message[6..8].copy_from_slice(&sequence.to_be_bytes());
    let sum = checksum::finish(checksum::sum(&message));
    message[2..4].copy_from_slice(&sum);
    ipv4(source, asker, 1, &message)
}

/// Keeps the echo requests of this length from one address to the other.
pub(crate) fn echo_requests(
    namespace: &Namespace,
    from: Ipv4Addr,
    to: Ipv4Addr,
    total_bytes: usize,
) -> Sniffer {
    Sniffer::start(namespace, move |packet| {
        packet.len() == total_bytes
            && packet[9] == 1
            && packet[12..20] == [from.octets(), to.octets()].concat()
            && packet[HEADER_BYTES] == 8
    })
}

/// A socket that sends any packet as it is.
pub(crate) fn raw_socket(namespace: &Namespace) -> Socket {
    let protocol = Some(Protocol::from(libc::IPPROTO_RAW));
    let socket = namespace.enter(|| Socket::new(Domain::IPV4, Type::RAW, protocol));
    socket.expect("tests are root")
}

/// Sends a packet by such a socket, as far as routes lead.
pub(crate) fn send_raw(socket: &Socket, packet: &[u8]) {
    let to = Ipv4Addr::from_bits(u32::from_be_bytes([16, 17, 18, 19].map(|at| packet[at])));
    socket.send_to(packet, &SocketAddrV4::new(to, 0).into()).expect("a raw socket sends anything");
}

/// Everything that crosses any device of a namespace, either way, from the network layer on.
#[derive(Debug)]
pub(crate) struct Sniffer {
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sniffer {
    /// Listens from now on, keeping what `wanted` accepts.
    pub(crate) fn start(
        namespace: &Namespace,
        wanted: impl Fn(&[u8]) -> bool + Send + 'static,
    ) -> Self {
        /// ETH_P_ALL in network order, which is what socket(2) takes.
        const EVERY_PROTOCOL: i32 = 0x0003_u16.to_be() as i32;
        let protocol = Some(Protocol::from(EVERY_PROTOCOL));
        let socket = namespace.enter(|| Socket::new(Domain::PACKET, Type::DGRAM, protocol));
        let mut socket = socket.expect("root may listen to all packets");
        set_socket_recv_buffer_size_force(&socket, 64 << 20).expect("we are root");
        socket.set_read_timeout(Some(Duration::from_millis(20))).expect("not zero");
        let (seen, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (kept, ending): (Arc<Mutex<Vec<_>>>, _) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 70_000];
            loop {
                match socket.read(&mut buffer) {
                    Ok(length) if wanted(&buffer[..length]) => {
                        let packet = buffer[..length].to_vec();
                        kept.lock().unwrap_or_else(PoisonError::into_inner).push(packet);
                    }
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        // Only an empty queue ends: what was there before the stop is read.
                        if ending.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                    Err(error) => panic!("listening to all packets: {error}"),
                }
            }
        });
        Self { seen, stop, thread: Some(thread) }
    }

    /// How many packets were kept so far.
    pub(crate) fn count(&self) -> usize {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Stops and gives what was kept.
    pub(crate) fn finish(mut self) -> Vec<Vec<u8>> {
        self.join();
        std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the listener does not panic");
        }
    }
}

impl Drop for Sniffer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Whether `needle` occurs in `haystack`.
pub(crate) fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

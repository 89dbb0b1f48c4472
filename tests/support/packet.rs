//! IPv4 packets made byte by byte, right or wrong, and a listener on all devices of a namespace.

use std::io::{ErrorKind, Read};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use socket2::{Domain, Protocol, Socket, Type};

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

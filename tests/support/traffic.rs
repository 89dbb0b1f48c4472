//! Traffic between namespaces whose arrival is checked byte by byte: a socket belongs for ever to
//! the namespace in which it was made, so only its making happens inside.

use std::hash::Hasher;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;

use super::lab::Namespace;
use super::pace::Stopwatch;

/// A transfer that makes no progress for this long is stuck.
pub(crate) const STALL: Duration = Duration::from_secs(10);

const CHUNK_BYTES: usize = 256 * 1024;

/// Room for a second of the fastest UDP traffic of these tests.
const RECEIVE_BUFFER_BYTES: usize = 16 << 20;

/// A UDP socket of `namespace` with a large receive buffer, on a port of the kernel's choice.
pub(crate) fn udp_socket(namespace: &Namespace, address: Ipv4Addr) -> UdpSocket {
    udp_socket_at(namespace, address, 0)
}

/// As [`udp_socket`], on this port.
pub(crate) fn udp_socket_at(namespace: &Namespace, address: Ipv4Addr, port: u16) -> UdpSocket {
    let socket = namespace.enter(|| UdpSocket::bind((address, port)));
    let socket = socket.unwrap_or_else(|error| panic!("bind {address}:{port}: {error}"));
    set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES).expect("we are root");
    socket.set_read_timeout(Some(Duration::from_millis(20))).expect("a time-out is not zero");
    socket
}

/// The local port of a bound socket.
pub(crate) fn port(socket: &UdpSocket) -> u16 {
    socket.local_addr().expect("a bound socket has an address").port()
}

/// Payload of `length` bytes that differs from packet to packet: position and `serial` in it.
pub(crate) fn payload(serial: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(serial);
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
    for (slot, byte) in bytes.iter_mut().zip(serial.to_be_bytes()) {
        *slot = byte;
    }
    bytes
}

/// Moves `bytes` from one namespace to an address of another over TCP, in both directions at
/// once when `both_ways`, and compares what arrived with what was sent.
///
/// # Panics
/// When a byte differs, or nothing moves for [`STALL`].
#[track_caller]
pub(crate) fn tcp_transfer(
    client: &Namespace,
    server: &Namespace,
    address: impl Into<IpAddr>,
    bytes: u64,
    both_ways: bool,
) -> Duration {
    let address = address.into();
    let listener = server.enter(|| TcpListener::bind((address, 0))).expect("the server listens");
    let target = listener.local_addr().expect("a listener has an address");
    let started = Instant::now();
    let stream = client.enter(|| TcpStream::connect_timeout(&target, STALL));
    let there = stream.unwrap_or_else(|error| panic!("TCP connect to {target}: {error}"));
    let (back, _) = listener.accept().expect("the connection that was made can be accepted");
    for stream in [&there, &back] {
        stream.set_read_timeout(Some(STALL)).expect("a time-out is not zero");
        stream.set_write_timeout(Some(STALL)).expect("a time-out is not zero");
    }
    thread::scope(|scope| {
        let sent = scope.spawn(|| send_stream(&there, 1, bytes));
        let received = scope.spawn(|| receive_stream(&back));
        let other = both_ways.then(|| {
            (scope.spawn(|| send_stream(&back, 2, bytes)), scope.spawn(|| receive_stream(&there)))
        });
        let join = "no transfer thread panics";
        assert_eq!(received.join().expect(join), sent.join().expect(join), "TCP data was damaged");
        if let Some((sent, received)) = other {
            let (sent, received) = (sent.join().expect(join), received.join().expect(join));
            assert_eq!(received, sent, "TCP data was damaged on the way back");
        }
    });
    started.elapsed()
}

/// Sends pseudo-random bytes; gives their number and hash.
fn send_stream(mut stream: &TcpStream, seed: u64, bytes: u64) -> (u64, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut hash = StreamHash::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let length = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        random.fill(&mut chunk[..length]);
        hash.add(&chunk[..length]);
        let mut rest = &chunk[..length];
        while !rest.is_empty() {
            let sent = patient(|| stream.write(rest));
            rest = &rest[sent.expect("the TCP transfer is stuck or was reset")..];
        }
        left -= length as u64;
    }
    stream.shutdown(Shutdown::Write).expect("an open stream can be shut down");
    hash.finish()
}

fn receive_stream(mut stream: &TcpStream) -> (u64, u64) {
    let mut hash = StreamHash::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match patient(|| stream.read(&mut chunk)).expect("the TCP transfer is stuck or was reset") {
            0 => return hash.finish(),
            length => hash.add(&chunk[..length]),
        }
    }
}

/// The same hash of the same bytes however they are cut: SipHash consumes a stream of bytes.
struct StreamHash {
    hasher: std::hash::DefaultHasher,
    bytes: u64,
    partial: Vec<u8>,
}

impl Default for StreamHash {
    fn default() -> Self {
        Self { hasher: std::hash::DefaultHasher::new(), bytes: 0, partial: Vec::new() }
    }
}

impl StreamHash {
    const BLOCK_BYTES: usize = 4096;

    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.partial.extend_from_slice(bytes);
        let whole = self.partial.len() / Self::BLOCK_BYTES * Self::BLOCK_BYTES;
        for block in self.partial[..whole].chunks_exact(Self::BLOCK_BYTES) {
            self.hasher.write(block);
        }
        self.partial.drain(..whole);
    }

    fn finish(mut self) -> (u64, u64) {
        self.hasher.write(&self.partial);
        (self.bytes, self.hasher.finish())
    }
}

/// Answers every datagram with itself until `stop`.
pub(crate) fn echo(socket: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..length], from).ok();
        }
    }
}

/// Sends datagrams of each size to an echo at the other side and compares what comes back; each
/// size is tried up to three times, as UDP may lose.
///
/// # Panics
/// When a size never comes back, or comes back changed.
#[track_caller]
pub(crate) fn udp_sizes(
    client: &Namespace,
    server: &Namespace,
    address: Ipv4Addr,
    sizes: impl IntoIterator<Item = usize>,
) {
    let (near, far) = (udp_socket(client, Ipv4Addr::UNSPECIFIED), udp_socket(server, address));
    near.set_read_timeout(Some(Duration::from_secs(1))).expect("a time-out is not zero");
    let target = SocketAddr::new(IpAddr::V4(address), port(&far));
    let stop = AtomicBool::new(false);
    let mut broken = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| echo(&far, &stop));
        // A failure inside must end the echo, or nobody ever hears of it.
        let _stop = StopOnDrop(&stop);
        for size in sizes {
            let sent = payload(size as u64, size);
            if !(0..3).any(|_| echoed(&near, target, &sent)) {
                broken.push(size);
            }
        }
    });
    assert!(broken.is_empty(), "UDP payloads of these sizes never come back: {broken:?}");
}

/// Calls again what a signal interrupted. A socket with a time-out is not called again by itself,
/// and in a program that starts children any thread may be interrupted when one ends.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Calls again what moved nothing within the socket's time-out, until [`STALL`] is over by a
/// [`Stopwatch`]: after an outage, TCP waits for as long again before it tries the next time.
fn patient(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let watch = Stopwatch::start();
    loop {
        match uninterrupted(&mut call) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && !watch.is_over(STALL) => {}
            result => return result,
        }
    }
}

/// Ends a thread of the scope, also after a panic.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn echoed(socket: &UdpSocket, target: SocketAddr, sent: &[u8]) -> bool {
    let mut buffer = vec![0; 65_536];
    socket.send_to(sent, target).unwrap_or_else(|error| panic!("send {}: {error}", sent.len()));
    loop {
        match uninterrupted(|| socket.recv(&mut buffer)) {
            Ok(length) if &buffer[..length] == sent => return true,
            // A late answer to another size.
            Ok(length) if length != sent.len() => {}
            Ok(_) => panic!("a UDP payload of {} bytes came back changed", sent.len()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => panic!("receive {} bytes: {error}", sent.len()),
        }
    }
}

/// Numbered datagrams at a constant rate, and who received them.
#[derive(Debug, Default)]
pub(crate) struct Numbered {
    /// Datagrams sent so far.
    pub(crate) sent: AtomicU64,
    /// Of those, how many the pod's own kernel refused.
    pub(crate) refused: AtomicU64,
    /// Different numbers received.
    pub(crate) received: AtomicU64,
    /// Arrivals that came after a higher number of the same burst.
    pub(crate) reordered: AtomicU64,
    /// Nanoseconds since the start of the longest pause between two arrivals.
    pub(crate) longest_gap_ns: AtomicU64,
    /// How many may be on their way, if there is a limit: then a machine too slow for the rate
    /// loses none in buffers that nobody reads in time.
    pub(crate) in_flight_max: Option<u64>,
    /// Ends the sender.
    pub(crate) stop: AtomicBool,
    /// Ends the receiver.
    pub(crate) drained: AtomicBool,
}

impl Numbered {
    const PAYLOAD_BYTES: usize = 64;

    /// Sends `rate` datagrams a second, evenly, until [`Self::stop`].
    pub(crate) fn send(&self, socket: &UdpSocket, target: SocketAddr, rate: u64) {
        let started = Instant::now();
        let mut packet = [0; Self::PAYLOAD_BYTES];
        let mut number = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            let elapsed_ns = u64::try_from(started.elapsed().as_nanos()).expect("a short test");
            let due = elapsed_ns * rate / 1_000_000_000;
            let received = self.received.load(Ordering::Relaxed);
            let due = self.in_flight_max.map_or(due, |most| due.min(received + most)).max(number);
            // A sender that slept too long catches up in small steps, not in one burst.
            for _ in 0..(due - number).min(32) {
                packet[..8].copy_from_slice(&number.to_be_bytes());
                // An ICMP error of before comes back as an error of the next call.
                if socket.send_to(&packet, target).is_err()
                    && socket.send_to(&packet, target).is_err()
                {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                number += 1;
                self.sent.store(number, Ordering::Relaxed);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Receives until [`Self::drained`].
    pub(crate) fn receive(&self, socket: &UdpSocket) {
        let mut buffer = [0; 2048];
        let (mut next, mut last) = (0_u64, None::<Instant>);
        while !self.drained.load(Ordering::Relaxed) {
            let Ok(length) = socket.recv(&mut buffer) else { continue };
            let Some(number) = buffer[..length].first_chunk().map(|n| u64::from_be_bytes(*n))
            else {
                continue;
            };
            // Of one burst: see [`Bursts`].
            if number < next && number >> Bursts::SHIFT == (next - 1) >> Bursts::SHIFT {
                self.reordered.fetch_add(1, Ordering::Relaxed);
            }
            next = next.max(number + 1);
            self.received.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                let gap = u64::try_from((now - last).as_nanos()).expect("a short test");
                self.longest_gap_ns.fetch_max(gap, Ordering::Relaxed);
            }
        }
    }

    /// Datagrams sent but not received.
    pub(crate) fn missing(&self) -> u64 {
        // A datagram may arrive before its sender has counted it.
        let received = self.received.load(Ordering::Relaxed);
        self.sent.load(Ordering::Relaxed).saturating_sub(received)
    }
}

/// Numbers for datagrams that are sent as fast as the sender gets a processor. Where it had to wait
/// for one, a new burst begins, by the high bits: what follows a pause may take another way.
#[derive(Debug, Default)]
pub(crate) struct Bursts {
    number: u64,
    sent: Option<Instant>,
}

impl Bursts {
    const SHIFT: u32 = 48;
    /// Well below the pauses that the dataplane goes by.
    const PAUSE: Duration = Duration::from_millis(20);

    pub(crate) fn next(&mut self) -> u64 {
        let now = Instant::now();
        let paused = self.sent.replace(now).is_some_and(|sent| now - sent > Self::PAUSE);
        self.number = if paused {
            ((self.number >> Self::SHIFT) + 1) << Self::SHIFT
        } else {
            self.number + 1
        };
        self.number
    }
}

/// A counter of `/proc/net/netstat` or `/proc/net/snmp` in a namespace, such as
/// `TcpExt TCPOFOQueue`.
pub(crate) fn kernel_counter(namespace: &Namespace, group: &str, name: &str) -> u64 {
    let text = namespace.enter(|| {
        let read = |file| std::fs::read_to_string(file).expect("procfs is mounted");
        read("/proc/thread-self/net/netstat") + &read("/proc/thread-self/net/snmp")
    });
    let prefix = format!("{group}: ");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(&prefix));
    let names = lines.next().unwrap_or_else(|| panic!("the kernel has no group {group}"));
    let values = lines.next().expect("names are followed by values");
    let mut pairs = names.split(' ').zip(values.split(' '));
    let value = pairs.find_map(|(found, value)| (found == name).then_some(value));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no counter {name}"))
}

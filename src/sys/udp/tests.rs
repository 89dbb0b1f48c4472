//! The wrappers over the kernel's loopback: GSO and GRO batches, control messages, buffers.

use std::iter::once;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::*;

const SLOT_BYTES: usize = 64 << 10;
const LAYOUT: Slots = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };

/// The loopback's address in each family.
const BOTH: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];

fn loopback() -> (UdpSocket, SocketAddr) {
    loopback_at(BOTH[0])
}

fn loopback_at(address: &str) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// What came into the first slots, waiting for at least one datagram.
fn receive(
    batch: &mut ReceiveBatch,
    socket: &UdpSocket,
    arena: &mut [u8],
    slots: usize,
) -> Vec<Received> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match batch.receive(socket.as_fd(), arena, LAYOUT, 0..slots) {
            Ok(count) => return (0..count).map(|index| batch.received(index)).collect(),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                assert!(Instant::now() < deadline, "nothing came");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Sends `bytes` from `source`, cut into datagrams of `segment_bytes`.
fn send(source: &UdpSocket, to: SocketAddr, segment_bytes: Option<u16>, bytes: &[u8]) {
    let mut batch = SendBatch::new(1, 2);
    // Two spans: a datagram may be gathered from anywhere.
    let middle = bytes.len() / 2;
    let spans = [Span::new(0, middle), Span::new(middle, bytes.len() - middle)];
    let message = Datagrams { destination: to, segment_bytes, spans };
    assert_eq!(batch.send(source.as_fd(), bytes, once(message)).unwrap(), 1);
}

fn noise(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 % 251) as u8).collect()
}

/// Errors of earlier datagrams come back to a socket that is connected or asked for them
/// (IP_RECVERR); `__udp4_lib_err`, net/ipv4/udp.c, gives them to no other. The tunnel's is neither,
/// so there is no error queue to drain, and a peer without a listener costs nobody a send.
#[test]
fn an_unconnected_socket_gets_no_earlier_error() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let (tunnel, _) = loopback();
    let (connected, _) = loopback();
    let (gone, nobody) = loopback();
    drop(gone);
    connected.connect(nobody).unwrap();
    connected.send(b"x").unwrap();
    for _ in 0..3 {
        send(&tunnel, nobody, None, b"xy");
    }
    let told = |socket: &UdpSocket| {
        let mut source = [PollFd::new(socket, PollFlags::empty())];
        poll(&mut source, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 })).unwrap();
        source[0].revents().contains(PollFlags::ERR)
    };
    assert!(told(&connected), "loopback sends no port unreachable: this test shows nothing");
    assert!(!told(&tunnel), "an error waits on the tunnel's socket, and its queue is not drained");
    assert!(tunnel.take_error().unwrap().is_none());
}

#[test]
fn a_gso_batch_leaves_as_its_datagrams() {
    BOTH.into_iter().for_each(a_gso_batch_leaves_as_its_datagrams_at);
}

fn a_gso_batch_leaves_as_its_datagrams_at(address: &str) {
    let (sender, sender_address) = loopback_at(address);
    let (receiver, to) = loopback_at(address);
    let bytes = noise(1000);
    send(&sender, to, Some(300), &bytes);
    let mut batch = ReceiveBatch::new(8);
    let mut arena = vec![0; 8 * SLOT_BYTES];
    let received = receive(&mut batch, &receiver, &mut arena, 8);
    let sizes: Vec<_> = received.iter().map(|received| received.bytes).collect();
    assert_eq!(sizes, [300, 300, 300, 100]);
    for (index, received) in received.iter().enumerate() {
        assert_eq!(received.source, sender_address);
        assert_eq!(received.segment_bytes, None);
        let slot = &arena[index * SLOT_BYTES..][..received.bytes];
        assert_eq!(slot, &bytes[index * 300..][..received.bytes]);
    }
}

#[test]
fn a_gro_batch_arrives_with_its_segment_size() {
    BOTH.into_iter().for_each(a_gro_batch_arrives_with_its_segment_size_at);
}

fn a_gro_batch_arrives_with_its_segment_size_at(address: &str) {
    let (sender, sender_address) = loopback_at(address);
    let (receiver, to) = loopback_at(address);
    set_gro(receiver.as_fd(), true).unwrap();
    for (segment_bytes, total) in [(300u16, 1000), (1400, 14_000), (1, 64), (1472, 65_507 - 35)] {
        let bytes = noise(total);
        send(&sender, to, Some(segment_bytes), &bytes);
        let mut batch = ReceiveBatch::new(2);
        let mut arena = vec![0; 2 * SLOT_BYTES];
        let received = receive(&mut batch, &receiver, &mut arena, 2);
        assert_eq!(received.len(), 1, "{segment_bytes}");
        assert_eq!(received[0].segment_bytes, Some(segment_bytes));
        assert_eq!(received[0].source, sender_address);
        assert_eq!(arena[..received[0].bytes], bytes, "{segment_bytes}");
    }
    send(&sender, to, None, &noise(100));
    let mut arena = vec![0; SLOT_BYTES];
    let received = receive(&mut ReceiveBatch::new(1), &receiver, &mut arena, 1);
    assert_eq!((received[0].bytes, received[0].segment_bytes), (100, None));
}

#[test]
fn the_largest_and_the_smallest_datagram_arrive_uncut() {
    let (sender, _) = loopback();
    let (receiver, to) = loopback();
    let mut batch = ReceiveBatch::new(1);
    let mut arena = vec![0; SLOT_BYTES];
    for bytes in [65_507, 0, 1] {
        let datagram = noise(bytes);
        send(&sender, to, None, &datagram);
        let received = receive(&mut batch, &receiver, &mut arena, 1);
        assert_eq!(received[0].bytes, bytes);
        assert_eq!(arena[..bytes], datagram);
    }
    let too_long = noise(65_508);
    let spans = [Span::new(0, too_long.len())];
    let message = Datagrams { destination: to, segment_bytes: None, spans };
    let sent = SendBatch::new(1, 1).send(sender.as_fd(), &too_long, once(message));
    let error = sent.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
}

#[test]
fn datagrams_dropped_for_lack_of_buffer_are_reported() {
    let (sender, _) = loopback();
    let (receiver, to) = loopback();
    enable_overflow_count(receiver.as_fd()).unwrap();
    set_int(receiver.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 1).unwrap();
    for _ in 0..50 {
        send(&sender, to, None, &noise(1000));
    }
    let mut batch = ReceiveBatch::new(64);
    let mut arena = vec![0; 64 * SLOT_BYTES];
    let held = receive(&mut batch, &receiver, &mut arena, 64).len();
    assert!(held < 50);
    send(&sender, to, None, &noise(1000));
    let received = receive(&mut batch, &receiver, &mut arena, 64);
    assert_eq!(received[0].overflows, Some(50 - held as u32));
}

/// All three control messages at once fit: the kernel cuts off what doesn't, in this order.
#[test]
fn the_type_of_service_comes_behind_the_others() {
    let options = [(libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)];
    for (address, option) in BOTH.into_iter().zip(options) {
        the_type_of_service_comes_behind_the_others_at(address, option);
    }
}

fn the_type_of_service_comes_behind_the_others_at(address: &str, (level, name): (c_int, c_int)) {
    let (sender, _) = loopback_at(address);
    let (receiver, to) = loopback_at(address);
    enable_type_of_service(receiver.as_fd(), to).unwrap();
    enable_overflow_count(receiver.as_fd()).unwrap();
    set_gro(receiver.as_fd(), true).unwrap();
    let mut batch = ReceiveBatch::new(64);
    let mut arena = vec![0; 64 * SLOT_BYTES];
    for type_of_service in [0u8, 1, 2, 3, 0xb8, 0xfe] {
        set_int(sender.as_fd(), level, name, type_of_service.into()).unwrap();
        send(&sender, to, None, &noise(100));
        send(&sender, to, Some(300), &noise(1000));
        for received in [0, 1].map(|_| receive(&mut batch, &receiver, &mut arena, 1)[0]) {
            assert_eq!(received.type_of_service, type_of_service);
            assert_eq!(received.segment_bytes.is_some(), received.bytes == 1000);
        }
    }
    set_int(receiver.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 1).unwrap();
    (0..50).for_each(|_| send(&sender, to, Some(300), &noise(1000)));
    receive(&mut batch, &receiver, &mut arena, 64);
    send(&sender, to, Some(300), &noise(1000));
    let received = receive(&mut batch, &receiver, &mut arena, 1)[0];
    assert!(received.overflows.is_some());
    assert_eq!((received.segment_bytes, received.type_of_service), (Some(300), 0xfe));
    let said = &batch.header(0).msg_hdr;
    assert_eq!((said.msg_controllen, said.msg_flags & libc::MSG_CTRUNC), (CONTROL_BYTES, 0));
}

#[test]
fn a_batch_goes_on_after_a_failure() {
    let (sender, _) = loopback();
    let (receiver, to) = loopback();
    let arena = noise(66_000);
    let mut batch = SendBatch::new(3, 3);
    let mut send_from = |first| {
        let left = [10, 66_000, 20].into_iter().skip(first).map(|bytes| Datagrams {
            destination: to,
            segment_bytes: None,
            spans: [Span::new(0, bytes)],
        });
        batch.send(sender.as_fd(), &arena, left)
    };
    assert_eq!(send_from(0).unwrap(), 1);
    assert!(send_from(1).is_err());
    assert_eq!(send_from(2).unwrap(), 1);
    let mut slots = vec![0; 4 * SLOT_BYTES];
    let received = receive(&mut ReceiveBatch::new(4), &receiver, &mut slots, 4);
    assert_eq!(received.iter().map(|r| r.bytes).collect::<Vec<_>>(), [10, 20]);
}

fn walked(bytes: &[u8]) -> Vec<(c_int, c_int, Vec<u8>)> {
    let mut seen = Vec::new();
    for_each_control(bytes, |level, kind, data| seen.push((level, kind, data.to_vec())));
    seen
}

fn control(length: usize, level: c_int, kind: c_int, data: &[u8]) -> Vec<u8> {
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(level.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(size_of::<usize>()), 0);
    bytes
}

#[test]
fn control_messages_are_walked_within_their_bounds() {
    let header_bytes = size_of::<libc::cmsghdr>();
    let first = control(header_bytes + 4, 17, 104, &[1, 2, 3, 4]);
    let second = control(header_bytes + 4, 1, 40, &[5, 6, 7, 8]);
    let both = [first.clone(), second].concat();
    let expected = [(17, 104, vec![1, 2, 3, 4]), (1, 40, vec![5, 6, 7, 8])];
    assert_eq!(walked(&both), expected);
    assert_eq!(walked(&[]), []);
    assert_eq!(walked(&first[..header_bytes + 4]), expected[..1], "the last needs no padding");
    for cut in 0..header_bytes + 4 {
        assert_eq!(walked(&first[..cut]), [], "cut to {cut} bytes");
    }
    for length in [0, 1, header_bytes - 1, first.len() + 1, usize::MAX, usize::MAX - 7] {
        assert_eq!(walked(&control(length, 17, 104, &[0; 4])), [], "a length of {length}");
        let behind_a_good_one = [first.clone(), control(length, 17, 104, &[0; 4])].concat();
        assert_eq!(walked(&behind_a_good_one), expected[..1], "a length of {length}");
    }
    assert_eq!(walked(&control(header_bytes, 9, 9, &[])), [(9, 9, vec![])], "no data at all");
}

proptest::proptest! {
    #[test]
    fn control_messages_of_any_bytes_end_the_walk(
        bytes in proptest::collection::vec(0u8..40, 0..200),
    ) {
        let seen: usize = walked(&bytes).iter().map(|(_, _, data)| data.len()).sum();
        proptest::prop_assert!(seen <= bytes.len());
    }
}

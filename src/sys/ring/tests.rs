//! Rings of every size over stand-ins for the TUN device: a pair of datagram sockets, which also
//! keep packets apart, and a kernel whose answers to io_uring_enter are the test's to choose.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use super::*;
use crate::sys::Range;
use crate::sys::udp::SendBatch;

const OPERATIONS: usize = 256;
const SLOT_BYTES: usize = READ_BYTES_MAX;
const LAYOUT: Slots = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };

/// What a worker has, and the other ends of it.
struct Files {
    tun: UnixDatagram,
    device: UnixDatagram,
    socket: UdpSocket,
    address: SocketAddrV4,
    stop: OwnedFd,
}

impl Files {
    fn new() -> Self {
        let (tun, device) = UnixDatagram::pair().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(address) = socket.local_addr().unwrap() else {
            unreachable!()
        };
        // SAFETY: a new descriptor that nobody else has; the assertion below tells if it is none.
        let stop = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) };
        assert!(stop.as_raw_fd() >= 0);
        for file in [tun.as_fd(), device.as_fd(), socket.as_fd()] {
            rustix::io::ioctl_fionbio(file, true).unwrap();
        }
        Self { tun, device, socket, address, stop }
    }

    fn ring(&self, entries: u32) -> Result<Ring, RingError> {
        let (tun, socket, stop) = (self.tun.as_fd(), self.socket.as_fd(), self.stop.as_fd());
        Ring::open(entries, OPERATIONS, tun, socket, stop)
    }

    fn give_stop(&self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
    }

    /// Everything that has come to the far end of the device.
    fn written(&self) -> Vec<Vec<u8>> {
        let mut buffer = vec![0; 1 << 16];
        let next = || self.device.recv(&mut buffer).ok().map(|bytes| buffer[..bytes].to_vec());
        std::iter::from_fn(next).collect()
    }
}

/// The first bytes of what each answered operation of a gathering brought.
fn gather(ring: &mut Ring, reads: usize, receives: usize) -> io::Result<[Vec<Vec<u8>>; 2]> {
    let mut arenas = [vec![0; SLOT_BYTES * reads.max(1)], vec![0; SLOT_BYTES * receives.max(1)]];
    let [tun, socket] = &mut arenas;
    let mut batch = ReceiveBatch::new(receives);
    ring.gather(
        &mut Lent { arena: tun, layout: LAYOUT, count: reads },
        &mut Lent { arena: socket, layout: LAYOUT, count: receives },
        &mut batch,
    )?;
    let brought = |arena: &[u8], first: usize, count: usize| {
        let slots = (0..count).filter_map(|slot| Some((slot, ring.answer(first + slot).ok()?)));
        slots.map(|(slot, bytes)| arena[slot * SLOT_BYTES..][..bytes].to_vec()).collect()
    };
    for slot in 0..receives {
        if let Ok(bytes) = ring.answer(reads + slot) {
            assert_eq!(batch.received(slot).bytes, bytes);
        }
    }
    Ok([brought(&arenas[0], 0, reads), brought(&arenas[1], reads, receives)])
}

fn numbered(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| vec![number as u8; 1 + number % 7]).collect()
}

/// One message for each of `packets`, which lie in the arena one behind the other.
fn sends(packets: &[Vec<u8>], to: SocketAddrV4) -> (SendBatch, Vec<u8>) {
    let mut batch = SendBatch::new(packets.len(), packets.len());
    let mut offset = 0;
    for packet in packets {
        batch.push(to, None, std::iter::once(Range { offset, bytes: packet.len() }));
        offset += packet.len();
    }
    (batch, packets.concat())
}

fn writes(packets: &[Vec<u8>]) -> (WriteBatch, Vec<u8>) {
    let mut batch = WriteBatch::new(packets.len(), packets.len());
    let mut offset = 0;
    for packet in packets {
        let range = Range { offset, bytes: packet.len() };
        batch.push(b"0123456789", std::iter::once(range), false);
        offset += packet.len();
    }
    (batch, packets.concat())
}

/// Far more operations than submissions and than completions that the small ones hold.
#[test]
fn a_tiny_ring_does_all_that_a_large_one_does_in_the_same_order() {
    for entries in [1, 2, 4, 128] {
        let files = Files::new();
        let mut ring = files.ring(entries).unwrap();
        // The kernel queues few datagrams between a pair: net.unix.max_dgram_qlen is 10 or more.
        let (packets, datagrams) = (numbered(10), numbered(100));
        packets.iter().for_each(|packet| {
            files.device.send(packet).unwrap();
        });
        let (mut batch, arena) = sends(&datagrams, files.address);
        assert_eq!(batch.send(files.socket.as_fd(), &arena, 0).unwrap(), 100, "{entries} entries");
        let got = gather(&mut ring, 128, 128).unwrap();
        assert_eq!(got, [packets.clone(), datagrams], "{entries} entries");
        let rest = gather(&mut ring, 128, 128).unwrap();
        assert!(rest.iter().all(Vec::is_empty), "{entries} entries: {rest:?}");
        let (mut batch, arena) = writes(&packets);
        assert_eq!(ring.write(&mut batch, &arena, 0).unwrap(), 10);
        assert!((0..10).all(|index| batch.result(index).is_ok()));
        let expected: Vec<_> =
            packets.iter().map(|packet| [b"0123456789", &packet[..]].concat()).collect();
        assert_eq!(files.written(), expected, "{entries} entries");
    }
}

#[test]
fn the_packet_that_the_first_read_brings_is_handed_on_once() {
    let files = Files::new();
    files.device.send(b"first").unwrap();
    let mut ring = files.ring(4).unwrap();
    files.device.send(b"second").unwrap();
    let [none, _] = gather(&mut ring, 0, 1).unwrap();
    assert!(none.is_empty());
    let [got, _] = gather(&mut ring, 3, 0).unwrap();
    assert_eq!(got, [b"first".to_vec(), b"second".to_vec()]);
}

/// A device takes no packet longer than its buffer, as it takes no super-packet of a kind that it
/// does not know.
#[test]
fn nothing_behind_a_refused_barrier_is_written() {
    let too_long = vec![0; 1 << 16];
    for entries in [1, 2, 4, 128] {
        let files = Files::new();
        rustix::net::sockopt::set_socket_send_buffer_size(&files.tun, 1).unwrap();
        let mut ring = files.ring(entries).unwrap();
        let packets = [b"a".to_vec(), b"b".to_vec(), too_long.clone(), b"d".to_vec()];
        let mut batch = WriteBatch::new(packets.len(), packets.len());
        let mut offset = 0;
        for (packet, is_barrier) in packets.iter().zip([false, true, true, false]) {
            let range = Range { offset, bytes: packet.len() };
            batch.push(b"0123456789", std::iter::once(range), is_barrier);
            offset += packet.len();
        }
        let arena = packets.concat();
        let mut first = 0;
        while first < 3 {
            first += ring.write(&mut batch, &arena, first).unwrap();
        }
        assert_eq!(first, 3, "{entries} entries: the barrier was passed");
        let refused = batch.result(2).unwrap_err().raw_os_error();
        assert_eq!(refused, Some(libc::EMSGSIZE), "{entries} entries");
        assert_eq!(files.written(), [b"0123456789a".to_vec(), b"0123456789b".to_vec()]);
        assert_eq!(ring.write(&mut batch, &arena, first).unwrap(), 1);
        assert_eq!(files.written(), [b"0123456789d".to_vec()]);
    }
}

#[test]
fn a_full_send_buffer_is_waited_for_beside_datagrams_and_not_for_ever() {
    let files = Files::new();
    let mut ring = files.ring(2).unwrap();
    let limit = Some(Duration::from_millis(1));
    ring.wait(&[Source::Socket, Source::Stop], limit).unwrap();
    assert!(!ring.take_ready(Source::Socket), "nothing came");
    ring.wait(&[Source::Room, Source::Socket, Source::Stop], None).unwrap();
    assert!(ring.take_ready(Source::Room), "an empty buffer has room");
}

#[test]
fn a_sleeper_is_woken_by_each_source_whatever_the_size_of_the_ring() {
    for entries in [1, 2, 128] {
        let files = Files::new();
        let mut ring = files.ring(entries).unwrap();
        let all = [Source::Tun, Source::Socket, Source::Stop];
        for _ in 0..20 {
            files.device.send(b"x").unwrap();
            // A wake-up may be for what the last gathering took; another is still to come.
            while !ring.take_ready(Source::Tun) {
                ring.wait(&all, None).unwrap();
                ring.take_ready(Source::Socket);
            }
            // Its poll ends by itself while the removal of the others makes room in the queue.
            files.socket.send_to(b"x", files.address).unwrap();
            ring.disarm(Source::Tun).unwrap();
            ring.disarm(Source::Socket).unwrap();
            let [packets, datagrams] = gather(&mut ring, 2, 2).unwrap();
            assert_eq!((packets.len(), datagrams.len()), (1, 1), "{entries} entries");
        }
        files.give_stop();
        ring.wait(&all, None).unwrap();
        assert!(ring.take_ready(Source::Stop), "{entries} entries");
    }
}

/// Three polls end at once in a ring with room for two completions, between those of a batch.
#[test]
fn completions_that_overflow_the_ring_are_not_lost() {
    let files = Files::new();
    let mut ring = files.ring(1).unwrap();
    assert_eq!(ring.ring.params().cq_entries(), 2);
    let all = [Source::Tun, Source::Socket, Source::Stop];
    for _ in 0..50 {
        all.into_iter().for_each(|source| ring.arm(source).unwrap());
        ring.enter(0, None).unwrap();
        files.device.send(b"x").unwrap();
        files.socket.send_to(b"x", files.address).unwrap();
        files.give_stop();
        ring.wait(&all, None).unwrap();
        let [packets, datagrams] = gather(&mut ring, 4, 4).unwrap();
        assert_eq!((packets.len(), datagrams.len()), (1, 1));
        let deadline = Instant::now() + REMOVAL_LIMIT;
        while ring.polls != [Poll::Off; SOURCES] && Instant::now() < deadline {
            ring.enter(1, Some(REMOVAL_LIMIT)).unwrap();
        }
        assert!(all.into_iter().all(|source| ring.take_ready(source)), "a wake-up was lost");
        rustix::io::read(&files.stop, &mut [0; 8]).unwrap();
    }
}

#[test]
fn a_stop_wakes_a_sleeper_and_a_signal_does_not() {
    extern "C" fn ignore(_: libc::c_int) {}
    let handler = ignore as extern "C" fn(libc::c_int);
    // SAFETY: the handler touches nothing, and nobody else in this program uses the signal.
    unsafe { libc::signal(libc::SIGUSR2, handler as usize) };
    let files = Arc::new(Files::new());
    let (tell, told) = mpsc::channel();
    let theirs = Arc::clone(&files);
    let sleeper = thread::spawn(move || {
        let mut ring = theirs.ring(2).unwrap();
        // SAFETY: asks for this thread's id only.
        tell.send(unsafe { libc::syscall(libc::SYS_gettid) }).unwrap();
        ring.wait(&[Source::Tun, Source::Socket, Source::Stop], None).unwrap();
        (ring.take_ready(Source::Tun), ring.take_ready(Source::Stop))
    });
    let thread_id = told.recv().unwrap();
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(1));
        // SAFETY: the thread is not joined yet, so its id is its own, and the handler is there.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread_id, libc::SIGUSR2) };
    }
    assert!(!sleeper.is_finished(), "a signal is no packet");
    let started = Instant::now();
    files.give_stop();
    assert_eq!(sleeper.join().unwrap(), (false, true));
    assert!(started.elapsed() < Duration::from_millis(100), "{:?}", started.elapsed());
}

/// A filter that hands each io_uring_enter of the calling thread to whoever has the descriptor.
fn intercept_enter() -> OwnedFd {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let is = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(load, 0, 0, 0),
        step(is, 0, 1, libc::SYS_io_uring_enter as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter is copied during the call from an array that outlives it, and its length
    // is the array's; the descriptor is new and nobody else's.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let flag = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let listener = libc::syscall(libc::SYS_seccomp, mode, flag, &raw const program);
        assert!(listener >= 0, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(listener as i32)
    }
}

/// Answers each intercepted call by `script`, which gets its number: an errno, or 0 to let it
/// pass. Ends with the thread that is watched.
fn answer_enters(listener: &OwnedFd, script: impl Fn(usize) -> i32, calls: &AtomicUsize) {
    // _IOWR('!', 0, struct seccomp_notif) and _IOWR('!', 1, struct seccomp_notif_resp).
    const RECEIVE: libc::c_ulong = 0xc050_2100;
    const SEND: libc::c_ulong = 0xc018_2101;
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure that outlives the call.
        unsafe { libc::poll(&raw mut poll, 1, -1) };
        if poll.revents & libc::POLLIN == 0 {
            return;
        }
        // SAFETY: plain old data for which all zeroes is a valid value, as the call demands.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills a structure of the size that its request names.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) } < 0 {
            continue;
        }
        let errno = script(calls.fetch_add(1, Ordering::Relaxed));
        let flags = if errno == 0 { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 } else { 0 };
        let mut answer = libc::seccomp_notif_resp { id: call.id, val: 0, error: -errno, flags };
        // SAFETY: the kernel reads a structure of the size that its request names.
        unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut answer) };
    }
}

/// Runs `work` while `script` decides about its enters; gives what it returned and their number.
fn scripted<T: Send>(
    script: impl Fn(usize) -> i32 + Send,
    work: impl FnOnce() -> T + Send,
) -> (T, usize) {
    let calls = AtomicUsize::new(0);
    let (tell, told) = mpsc::channel();
    let result = thread::scope(|scope| {
        let worker = scope.spawn(move || {
            tell.send(intercept_enter()).unwrap();
            work()
        });
        let listener = told.recv().unwrap();
        scope.spawn(|| {
            let listener = listener;
            answer_enters(&listener, script, &calls);
        });
        worker.join().unwrap()
    });
    (result, calls.into_inner())
}

#[test]
fn a_kernel_that_can_not_take_a_batch_yet_is_asked_again() {
    for errno in [libc::EAGAIN, libc::EBUSY, libc::ENOMEM, libc::EINTR] {
        let files = Files::new();
        // Every call but each fifth, also those of the start.
        let script = move |call: usize| if call % 5 == 4 { 0 } else { errno };
        let (got, calls) = scripted(script, || {
            let mut ring = files.ring(2).unwrap();
            let (mut batch, arena) = writes(&numbered(9));
            assert_eq!(ring.write(&mut batch, &arena, 0).unwrap(), 9);
            files.device.send(b"x").unwrap();
            gather(&mut ring, 1, 16).unwrap()
        });
        assert_eq!(got, [vec![b"x".to_vec()], Vec::new()], "errno {errno}");
        assert_eq!(files.written().len(), 9, "errno {errno}");
        assert!(calls > 20, "errno {errno}: nothing was refused");
    }
}

#[test]
fn a_ring_that_may_not_be_entered_is_an_error_and_submits_nothing_later() {
    for errno in [libc::EPERM, libc::EBUSY, libc::ENOSYS] {
        let files = Files::new();
        let refused = AtomicUsize::new(usize::MAX);
        // After the start, for as long as the test says.
        let script = |call: usize| if call >= refused.load(Ordering::Relaxed) { errno } else { 0 };
        let started = Instant::now();
        let ((), _) = scripted(script, || {
            let mut ring = files.ring(4).unwrap();
            files.device.send(b"x").unwrap();
            ring.wait(&[Source::Tun, Source::Stop], None).unwrap();
            refused.store(0, Ordering::Relaxed);
            let (mut batch, arena) = writes(&numbered(3));
            let error = ring.write(&mut batch, &arena, 0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
            drop((batch, arena));
            // The kernel would take them now, and read memory that was given back.
            refused.store(usize::MAX, Ordering::Relaxed);
            let broken = |result: io::Result<()>| {
                assert_eq!(result.unwrap_err().raw_os_error(), Some(errno));
            };
            broken(ring.wait(&[Source::Tun, Source::Socket], None));
            broken(gather(&mut ring, 1, 1).map(drop));
            let (mut batch, arena) = writes(&numbered(1));
            broken(ring.write(&mut batch, &arena, 0).map(drop));
            drop(ring);
        });
        assert!(started.elapsed() < Duration::from_secs(1), "errno {errno}: it hung");
        let late = files.written();
        assert!(late.is_empty(), "errno {errno}: a write was submitted after its memory was freed");
    }
}

#[test]
fn a_ring_that_may_not_be_entered_at_first_is_no_ring() {
    let files = Files::new();
    let (opened, _) = scripted(|_| libc::EPERM, || files.ring(4).map(drop));
    let error = opened.unwrap_err();
    assert!(matches!(error, RingError::Enter(_)), "{error:?}");
}

#[test]
fn a_device_that_can_only_be_read_by_waiting_is_refused() {
    // A file of procfs, which never learned to be read without waiting.
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let files = Files::new();
    let (socket, stop) = (files.socket.as_fd(), files.stop.as_fd());
    let error = Ring::open(4, OPERATIONS, file.as_fd(), socket, stop).map(drop).unwrap_err();
    let RingError::TunRead(errno) = error else { panic!("{error:?}") };
    assert_eq!(errno.raw_os_error(), Some(libc::EOPNOTSUPP));
}

#[test]
fn an_operation_that_the_kernel_lacks_is_named() {
    assert_eq!(missing_operation(|_| true), None);
    assert_eq!(missing_operation(|_| false), Some("READ"));
    let lacks = [
        (opcode::Writev::CODE, "WRITEV"),
        (opcode::RecvMsg::CODE, "RECVMSG"),
        (opcode::PollAdd::CODE, "POLL_ADD"),
        (opcode::PollRemove::CODE, "POLL_REMOVE"),
    ];
    for (lacking, name) in lacks {
        assert_eq!(missing_operation(|code| code != lacking), Some(name));
    }
}

#[test]
fn a_dropped_ring_gives_its_files_back_at_once() {
    let Files { tun, device, socket, stop, .. } = Files::new();
    let mut ring = Ring::open(4, OPERATIONS, tun.as_fd(), socket.as_fd(), stop.as_fd()).unwrap();
    for source in [Source::Tun, Source::Socket, Source::Stop] {
        ring.arm(source).unwrap();
    }
    ring.enter(0, None).unwrap();
    let started = Instant::now();
    drop(ring);
    drop(tun);
    while device.send(b"x").map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
    {
        assert!(started.elapsed() < Duration::from_millis(100), "somebody still holds the file");
    }
}

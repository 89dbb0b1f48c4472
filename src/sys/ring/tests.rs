//! Rings of every size over stand-ins for the TUN device: a pair of datagram sockets, which also
//! keep packets apart, and a kernel whose answers to io_uring_enter are the test's to choose.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::packet::Span;

const OPERATIONS: usize = 256;
const SLOT_BYTES: usize = READ_BYTES_MAX;
const LAYOUT: Slots = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };

/// What a worker has, and the other ends of it.
struct Files {
    tun: UnixDatagram,
    device: UnixDatagram,
    socket: UdpSocket,
    address: SocketAddrV4,
}

impl Files {
    fn new() -> Self {
        let (tun, device) = UnixDatagram::pair().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(address) = socket.local_addr().unwrap() else {
            unreachable!()
        };
        for file in [tun.as_fd(), device.as_fd(), socket.as_fd()] {
            rustix::io::ioctl_fionbio(file, true).unwrap();
        }
        Self { tun, device, socket, address }
    }

    fn ring(&self, entries: u32) -> Result<Ring, RingError> {
        Ring::open(entries, OPERATIONS, &[self.tun.as_fd(), self.socket.as_fd()])
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
        0,
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

/// Where packets lie that follow each other in an arena.
fn spans(packets: &[Vec<u8>]) -> Vec<[Span; 1]> {
    let mut offset = 0;
    let mut next = |packet: &Vec<u8>| {
        let span = Span::new(offset, packet.len());
        offset += packet.len();
        [span]
    };
    packets.iter().map(&mut next).collect()
}

/// Writes `packets`, of which those of a number in `barriers` are barriers, from `first` on.
fn write(
    ring: &mut Ring,
    batch: &mut WriteBatch,
    packets: &[Vec<u8>],
    barriers: &[usize],
    first: usize,
) -> io::Result<usize> {
    let spans = spans(packets);
    let writes = spans.iter().enumerate().skip(first).map(|(number, spans)| Write {
        header: b"0123456789",
        spans,
        is_barrier: barriers.contains(&number),
    });
    ring.write(batch, &packets.concat(), writes)
}

/// Far more operations than submissions and than completions that the small ones hold.
#[test]
fn a_tiny_ring_equals_a_large_one() {
    for entries in [1, 2, 4, 128] {
        let files = Files::new();
        let mut ring = files.ring(entries).unwrap();
        // The kernel queues few datagrams between a pair: net.unix.max_dgram_qlen is 10 or more.
        let (packets, datagrams) = (numbered(10), numbered(100));
        packets.iter().for_each(|packet| {
            files.device.send(packet).unwrap();
        });
        for datagram in &datagrams {
            files.socket.send_to(datagram, files.address).unwrap();
        }
        let got = gather(&mut ring, 128, 128).unwrap();
        assert_eq!(got, [packets.clone(), datagrams], "{entries} entries");
        let rest = gather(&mut ring, 128, 128).unwrap();
        assert!(rest.iter().all(Vec::is_empty), "{entries} entries: {rest:?}");
        let mut batch = WriteBatch::new(10, 10);
        assert_eq!(write(&mut ring, &mut batch, &packets, &[], 0).unwrap(), 10);
        assert!((0..10).all(|index| batch.result(index).is_ok()));
        let expected: Vec<_> =
            packets.iter().map(|packet| [b"0123456789", &packet[..]].concat()).collect();
        assert_eq!(files.written(), expected, "{entries} entries");
    }
}

#[test]
fn the_probed_packet_is_handed_on_once() {
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
        let (mut first, mut refused) = (0, None);
        while first < 3 {
            let tried = write(&mut ring, &mut batch, &packets, &[1, 2], first).unwrap();
            refused = batch.result(tried - 1).err().and_then(|error| error.raw_os_error());
            first += tried;
        }
        assert_eq!(first, 3, "{entries} entries: the barrier was passed");
        assert_eq!(refused, Some(libc::EMSGSIZE), "{entries} entries");
        assert_eq!(files.written(), [b"0123456789a".to_vec(), b"0123456789b".to_vec()]);
        assert_eq!(write(&mut ring, &mut batch, &packets, &[1, 2], first).unwrap(), 1);
        assert_eq!(files.written(), [b"0123456789d".to_vec()]);
    }
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
fn a_busy_kernel_is_asked_again() {
    for errno in [libc::EAGAIN, libc::EBUSY, libc::ENOMEM, libc::EINTR] {
        let files = Files::new();
        // Every call but each fifth, also those of the start.
        let script = move |call: usize| if call % 5 == 4 { 0 } else { errno };
        let (got, calls) = scripted(script, || {
            let mut ring = files.ring(2).unwrap();
            let mut batch = WriteBatch::new(9, 9);
            assert_eq!(write(&mut ring, &mut batch, &numbered(9), &[], 0).unwrap(), 9);
            files.device.send(b"x").unwrap();
            gather(&mut ring, 1, 16).unwrap()
        });
        assert_eq!(got, [vec![b"x".to_vec()], Vec::new()], "errno {errno}");
        assert_eq!(files.written().len(), 9, "errno {errno}");
        assert!(calls > 20, "errno {errno}: nothing was refused");
    }
}

#[test]
fn a_broken_ring_submits_nothing_later() {
    for errno in [libc::EPERM, libc::EBUSY, libc::ENOSYS] {
        let files = Files::new();
        let refused = AtomicUsize::new(usize::MAX);
        // After the start, for as long as the test says.
        let script = |call: usize| if call >= refused.load(Ordering::Relaxed) { errno } else { 0 };
        let ((), calls) = scripted(script, || {
            let mut ring = files.ring(4).unwrap();
            refused.store(0, Ordering::Relaxed);
            let mut batch = WriteBatch::new(3, 3);
            let error = write(&mut ring, &mut batch, &numbered(3), &[], 0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
            let failed = batch.result(2).unwrap_err();
            assert_eq!(failed.raw_os_error(), Some(libc::EIO), "a write that was never made");
            drop(batch);
            // The kernel would take them now, and read memory that was given back.
            refused.store(usize::MAX, Ordering::Relaxed);
            let broken = |result: io::Result<()>| {
                assert_eq!(result.unwrap_err().raw_os_error(), Some(errno));
            };
            broken(gather(&mut ring, 1, 1).map(drop));
            let mut batch = WriteBatch::new(1, 1);
            broken(write(&mut ring, &mut batch, &numbered(1), &[], 0).map(drop));
            drop(ring);
        });
        // The refusals in a row that break it, and the calls of the start.
        assert!(calls <= REFUSALS_MAX + 100, "errno {errno}: it asked {calls} times");
        let late = files.written();
        assert!(late.is_empty(), "errno {errno}: a write was submitted after its memory was freed");
    }
}

#[test]
fn a_ring_that_cannot_be_entered_is_refused() {
    let files = Files::new();
    let (opened, _) = scripted(|_| libc::EPERM, || files.ring(4).map(drop));
    let error = opened.unwrap_err();
    assert!(matches!(error, RingError::Enter(_)), "{error:?}");
}

#[test]
fn a_device_without_nonblocking_reads_is_refused() {
    // A file of procfs, which never learned to be read without waiting.
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let files = Files::new();
    let opened = Ring::open(4, OPERATIONS, &[file.as_fd(), files.socket.as_fd()]);
    let error = opened.map(drop).unwrap_err();
    let RingError::TunRead(errno) = error else { panic!("{error:?}") };
    assert_eq!(errno.raw_os_error(), Some(libc::EOPNOTSUPP));
}

#[test]
fn a_dropped_ring_releases_its_files() {
    let Files { tun, device, socket, .. } = Files::new();
    let ring = Ring::open(4, OPERATIONS, &[tun.as_fd(), socket.as_fd()]).unwrap();
    let started = Instant::now();
    drop(ring);
    drop(tun);
    while device.send(b"x").map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
    {
        assert!(started.elapsed() < Duration::from_millis(100), "somebody still holds the file");
    }
}

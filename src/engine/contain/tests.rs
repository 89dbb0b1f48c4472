//! Panics on purpose, in each direction and engine, and in the middle of a system call's batch.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::device::{Tun, TunnelSocket};
use crate::engine::ingress::IngressHalf;
use crate::engine::io::{Reads, Receives, Share};
use crate::engine::mmsg::Mmsg;
use crate::engine::{Engine, RING_ENTRIES, Worker, WorkerConfig, WorkerEnd};
use crate::forward::Local;
use crate::forward::tests::{FAR, POD, TRIPPING, local, udp};
use crate::offload::VNET_HEADER_BYTES;
use crate::route::{Peer, Published, Table};
use crate::stats::WorkerStats;
use crate::sys::tun_io::{Write, WriteBatch};

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
const ENGINES: [Option<Engine>; 2] = [Some(Engine::Mmsg), None];

/// A worker's devices, their other ends held by the test.
pub(in crate::engine) struct Scene {
    /// Where the worker's TUN queue leads.
    host: UnixDatagram,
    pub(in crate::engine) peer: UdpSocket,
    pub(in crate::engine) tunnel: SocketAddr,
    pub(in crate::engine) stats: Arc<WorkerStats>,
}

impl Scene {
    pub(in crate::engine) fn new(engine: Option<Engine>) -> (Self, WorkerConfig) {
        let (host, queue) = UnixDatagram::pair().unwrap();
        queue.set_nonblocking(true).unwrap();
        host.set_read_timeout(Some(PATIENCE)).unwrap();
        let peer = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let socket = TunnelSocket::bind(any, false, false).unwrap();
        let tunnel = socket2::SockRef::from(&socket).local_addr().unwrap();
        let tunnel = tunnel.as_socket().unwrap();
        let address = peer.local_addr().unwrap();
        let subnet = "10.5.2.0/24".parse().unwrap();
        let peers = vec![Arc::new(Peer::new(subnet, address))];
        let stats = Arc::new(WorkerStats::default());
        let config = WorkerConfig {
            index: 0,
            processor: None,
            tun: Tun::stub(queue.into()),
            bulk: Vec::new(),
            socket: Arc::new(socket),
            local: Local { underlay: tunnel, ..local() },
            mtu_bytes: Arc::new(1472.into()),
            whole_bytes: Arc::new(1472.into()),
            routes: Published::new(Table::build(peers)),
            stats: Arc::clone(&stats),
            team: Arc::new([Arc::clone(&stats)]),
            icmp_limit: Arc::default(),
            engine,
            comes_first: false,
            cipher: None,
            ring_entries: RING_ENTRIES,
        };
        (Self { host, peer, tunnel, stats }, config)
    }

    pub(in crate::engine) fn give_host(&self, payload: &[u8]) {
        let packet = udp(POD, FAR, payload);
        self.host.send(&[&[0; VNET_HEADER_BYTES], packet.as_slice()].concat()).unwrap();
    }

    pub(in crate::engine) fn give_peer(&self, payload: &[u8]) {
        self.peer.send_to(&udp(FAR, POD, payload), self.tunnel).unwrap();
    }

    /// The payload of the next packet that leaves the worker.
    fn at_peer(&self) -> Vec<u8> {
        let mut buffer = [0; 2048];
        let bytes = self.peer.recv(&mut buffer).expect("a packet leaves the worker");
        buffer[28..bytes].to_vec()
    }

    pub(in crate::engine) fn at_host(&self) -> Vec<u8> {
        let mut buffer = [0; 2048];
        let bytes = self.host.recv(&mut buffer).expect("a packet leaves the worker");
        buffer[VNET_HEADER_BYTES + 28..bytes].to_vec()
    }
}

/// Packets that wait for a worker; a Unix socket holds ten (net.unix.max_dgram_qlen).
const WAITING: u64 = 9;

/// Of the packets that wait for a worker the fifth panics; then one more comes.
fn survives(
    engine: Option<Engine>,
    give: fn(&Scene, &[u8]),
    take: fn(&Scene) -> Vec<u8>,
    of: fn(&WorkerStats) -> &DirectionStats,
) {
    let (scene, config) = Scene::new(engine);
    for mark in 0..WAITING {
        give(&scene, if mark == 4 { TRIPPING } else { b"fine" });
    }
    let (tell, ended) = mpsc::channel();
    let worker = Worker::spawn(config, move |end| tell.send(end).unwrap_or_default()).unwrap();
    let stats = of(&scene.stats);
    let deadline = Instant::now() + PATIENCE;
    while stats.packets_received.get() < WAITING || stats.unaccounted() > 0 {
        assert!(Instant::now() < deadline, "{stats:?}");
        std::thread::yield_now();
    }
    give(&scene, b"after");
    let mut passed = 0;
    loop {
        match take(&scene).as_slice() {
            b"fine" => passed += 1,
            b"after" => break,
            other => panic!("{other:?} got through"),
        }
    }
    assert!((4..WAITING).contains(&passed), "{passed} of the others passed");
    drop(worker);
    let end = ended.recv().unwrap();
    assert!(matches!(end, WorkerEnd::Stopped), "{end:?}");
    assert_eq!(stats.drops(DropReason::InternalError), WAITING - passed);
    assert_eq!(stats.drops_total(), WAITING - passed);
    assert_eq!(
        (stats.packets_received.get(), stats.packets_forwarded.get()),
        (WAITING + 1, passed + 1)
    );
}

#[test]
fn a_panic_on_egress_costs_its_batch_only() {
    for engine in ENGINES {
        survives(engine, Scene::give_host, Scene::at_peer, |stats| &stats.egress);
    }
}

#[test]
fn a_panic_on_ingress_costs_its_batch_only() {
    for engine in ENGINES {
        survives(engine, Scene::give_peer, Scene::at_host, |stats| &stats.ingress);
    }
}

/// An engine whose writes panic, before or after the kernel was asked to use the arena.
struct Panicking {
    idle: bool,
}

impl Io for Panicking {
    fn read(
        &mut self,
        _: usize,
        _: Share,
        _: &mut Reads,
        _: &mut Receives,
        _: bool,
    ) -> Result<usize, WorkerEnd> {
        Ok(0)
    }

    fn write<'a>(
        &mut self,
        _: &mut WriteBatch,
        _: &'a [u8],
        _: impl Iterator<Item = Write<'a>>,
    ) -> usize {
        panic!("in the middle of a write");
    }

    fn is_idle(&self) -> bool {
        self.idle
    }
}

/// One turn over two packets with `io`: whether it unwound, and what the log said.
fn turn_with(io: &mut impl Io, scene: &Scene, config: &WorkerConfig) -> (bool, String) {
    let text = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&text);
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || Shared(Arc::clone(&writer)))
        .finish();
    hook_panics();
    let mut half = IngressHalf::new(config);
    (0..2).for_each(|_| scene.give_peer(&[7; 200]));
    let deadline = Instant::now() + PATIENCE;
    while half.receives.filled.len() < 2 {
        assert!(Instant::now() < deadline, "the datagrams do not arrive");
        half.receives.clear();
        let mut reads = Reads::new(0);
        let mut engine = Mmsg::new(config);
        engine.read(0, Share::NOTHING, &mut reads, &mut half.receives, true).unwrap();
    }
    let table = config.routes.table.load();
    let (local, stats) = (&config.local, &scene.stats.ingress);
    let icmp_limit = &config.icmp_limit;
    let context = Context { local, table: &table, stats, icmp_limit, now_ns: 1 };
    half.begin_turn();
    // While there is one subscriber only, tracing lets the thread that first reaches a call decide
    // whether anybody wants it, and threads of other tests have none.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    let unwound = tracing::subscriber::with_default(subscriber, || {
        catch_unwind(AssertUnwindSafe(|| turn(&mut half, io, &context).is_ok())).is_err()
    });
    let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
    (unwound, text)
}

struct Shared(Arc<Mutex<Vec<u8>>>);

impl io::Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_panic_while_writing_is_counted_and_shown() {
    let (scene, config) = Scene::new(ENGINES[0]);
    let (unwound, text) = turn_with(&mut Panicking { idle: true }, &scene, &config);
    assert!(!unwound, "{text}");
    assert_eq!(scene.stats.ingress.drops(DropReason::InternalError), 2);
    assert_eq!(scene.stats.ingress.packets_received.get(), 2);
    for part in ["contain/tests.rs", " 2 packets", "internal-error"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    // 20 bytes of IPv4, of which the time to live was edited, 8 of UDP, and payload.
    assert!(text.contains(" 64 ") && text.contains(" 228 bytes: 450000e4"), "{text}");
    let (unwound, _) = turn_with(&mut Mmsg::new(&config), &scene, &config);
    assert!(!unwound && scene.stats.ingress.packets_forwarded.get() == 2);
}

#[test]
fn a_panic_with_operations_in_flight_is_final() {
    let (scene, config) = Scene::new(ENGINES[0]);
    let (unwound, text) = turn_with(&mut Panicking { idle: false }, &scene, &config);
    assert!(unwound && text.contains("contain/tests.rs"), "{text}");
    assert_eq!(scene.stats.ingress.unaccounted(), 0);
}

#[test]
fn panics_are_shown_at_once_and_then_each_minute_with_their_number() {
    let mut progress = Progress::default();
    assert_eq!(progress.admit(5, false), Some(0));
    for later_ns in 0..100 {
        assert_eq!(progress.admit(6 + later_ns, false), None);
    }
    assert_eq!(progress.admit(5 + REPEAT_NS, false), Some(100));
    assert_eq!(progress.admit(6 + REPEAT_NS, false), None);
    assert_eq!(progress.admit(7 + REPEAT_NS, true), Some(1), "a worker ends without a word");
}

//! Measures the paths to peers in use, and hears whether they answer: sends the echoes that `paths`
//! and `reach` ask for, through the tunnel like any packet, and receives the answers on a raw
//! socket. Decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::backend::status::{Reachability, Taken, send_if_new};
use crate::device::only_echo_replies;
use crate::packet::echo::{read_reply, write_request};
use crate::route::{Peer, Prefix, Published, Table};
use crate::stats::{LongSends, WorkerStats};

use super::paths::{Paths, Probe};
use super::reach::{self, Reach, Sample};
use super::team::Seat;

/// How often the workers' marks are looked at while some peer is in use, and while none is: a
/// look costs little, but an idle host is not to be woken often. With a second, a path that was
/// narrow before its first use is found in less than two.
const LOOK: Duration = Duration::from_millis(200);
const LOOK_IDLE: Duration = Duration::from_secs(1);

/// Between two rounds at least, should something be due all the time.
const ROUND_MIN: Duration = Duration::from_millis(10);

/// Room for the answers to several searches at once.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Answers received in one go, far more than were asked for: a flood of unsolicited ones must not
/// block the control plane.
const ANSWERS_MAX: usize = 1024;

/// Length of an echo that asks whether a peer is there: as a usual ping.
const ECHO_BYTES: usize = 84;

/// Any packet fits.
const PACKET_BYTES_MAX: usize = 64 << 10;

/// Peers whose paths can't be measured, so that datagrams to them must be allowed to be fragmented;
/// `None` if nobody's can.
pub(super) type Unmeasured = Option<BTreeSet<SocketAddrV4>>;

/// The measuring of one daemon's paths.
pub(super) struct Prober {
    paths: Paths,
    reach: Reach,
    next_look: Instant,
    reachability: watch::Sender<Arc<Reachability>>,
    /// `None` without the right to open it; then nothing is measured.
    answers: Option<UdpSocket>,
    own: Ipv4Addr,
    token: u64,
    buffer: Box<[u8]>,
    /// The subnets behind narrow paths and what each path carries.
    limits: BTreeMap<Prefix, u16>,
    unmeasured: watch::Sender<Unmeasured>,
    /// Whom the kernel's programs send long packets.
    kernel_sends: Arc<LongSends>,
    /// What these programs took; none where there are none.
    taken: Arc<Taken>,
}

impl Prober {
    /// For the host with the TUN address `own`, which must be configured.
    pub(super) fn open(own: Ipv4Addr, ceiling_bytes: u16) -> Self {
        let answers = open(own).inspect_err(|error| {
            warn!(
                "path-MTU probing is off: no raw ICMP socket ({error}); routers may fragment long \
                 datagrams, which is slower; grant CAP_NET_RAW"
            );
        });
        let unmeasured = answers.is_ok().then(BTreeSet::new);
        Self {
            paths: Paths::new(ceiling_bytes, fastrand::u64(..)),
            reach: Reach::default(),
            next_look: Instant::now(),
            reachability: watch::Sender::default(),
            unmeasured: watch::Sender::new(unmeasured),
            kernel_sends: Arc::default(),
            taken: Arc::new(Taken::new(None)),
            answers: answers.ok(),
            own,
            token: fastrand::u64(..),
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
            limits: BTreeMap::new(),
        }
    }

    /// The subnets behind narrow paths, and the longest packet that each carries.
    pub(super) fn limits(&self) -> &BTreeMap<Prefix, u16> {
        &self.limits
    }

    /// The peers whose paths can't be measured, and each change of them.
    pub(super) fn unmeasured(&self) -> watch::Receiver<Unmeasured> {
        self.unmeasured.subscribe()
    }

    /// Which peers can be heard, and how wide their paths are.
    pub(super) fn reachability(&self) -> watch::Receiver<Arc<Reachability>> {
        self.reachability.subscribe()
    }

    /// What the kernel's programs take counts for the peers as well.
    pub(super) fn count_with(&mut self, taken: Arc<Taken>) {
        self.taken = taken;
    }

    /// Where to mark whom the kernel's programs send long packets.
    pub(super) fn kernel_sends(&self) -> Arc<LongSends> {
        Arc::clone(&self.kernel_sends)
    }

    /// The longest packet that the interface allows has changed.
    pub(super) fn set_ceiling(&mut self, ceiling_bytes: u16) {
        self.paths.set_ceiling(ceiling_bytes, Instant::now());
    }

    /// Measures until [`Self::limits`] has changed. Cancel-safe: waiting is all that it does in
    /// between.
    pub(super) async fn changed(&mut self, seats: &[Seat], routes: &Published) {
        loop {
            // With Don't Fragment, a narrow path that can't be measured would go unnoticed.
            let always_fragmenting = self.answers.is_none() || self.paths.mute().next().is_some();
            for seat in seats {
                seat.socket.set_always_fragmenting(always_fragmenting);
            }
            self.round(seats, routes);
            if self.answers.is_some() {
                let unknown = self.paths.unknown(Instant::now()).collect();
                send_if_new(&self.unmeasured, Some(unknown));
            }
            let limits = self.limits_of_subnets(&routes.load());
            if limits != self.limits {
                self.limits = limits;
                return;
            }
            self.pause().await;
        }
    }

    /// Until there may be something to do.
    async fn pause(&self) {
        let now = Instant::now();
        let pause = match self.paths.next_due() {
            Some(due) => due.duration_since(now).clamp(ROUND_MIN, LOOK),
            None => LOOK_IDLE,
        };
        // Other answers wait in the socket: none is urgent before something is due.
        let Some(answers) = self.answers.as_ref().filter(|_| self.reach.is_waiting(now)) else {
            return sleep(pause).await;
        };
        timeout(pause, answers.readable()).await.ok();
    }

    /// Receives answers, then sends the echoes that are due: in this order, so that an answer that
    /// came before a late look is not taken for lost.
    fn round(&mut self, seats: &[Seat], routes: &Published) {
        let now = Instant::now();
        self.receive_answers(now);
        let table = routes.load();
        if now >= self.next_look {
            self.next_look = now + reach::LOOK;
            self.look(seats, &table, now);
        }
        if self.answers.is_none() {
            return;
        }
        self.note_use(seats, &table, now);
        for Probe { endpoint, target, bytes } in self.paths.tick(now) {
            self.ask(seats, endpoint, target, bytes.into());
        }
    }

    /// Asks a TUN address for an echo. One that the kernel refuses to send counts as lost, like one
    /// that a router drops.
    fn ask(&mut self, seats: &[Seat], endpoint: SocketAddrV4, target: Ipv4Addr, bytes: usize) {
        let packet = &mut self.buffer[..bytes];
        write_request(packet, self.own, target, self.token);
        seats[0].socket.send_whole(packet, endpoint).ok();
    }

    /// Looks at what was counted of each peer, and asks those who ought to have been heard.
    fn look(&mut self, seats: &[Seat], table: &Table, now: Instant) {
        let mut samples = BTreeMap::new();
        for peer in table.peers() {
            let by_kernel = self.taken.of_peer(peer.subnet, peer.address);
            let sample = samples.entry(peer.address).or_insert_with(|| {
                let workers = seats.iter().map(|seat| &*seat.stats);
                let by_workers = WorkerStats::traffic(workers, *peer.address.ip());
                let (sent, received) = (by_workers.packets_sent, by_workers.packets_received);
                Sample { targets: Vec::new(), sent, received }
            });
            sample.targets.push(peer.subnet.network());
            sample.sent += by_kernel.packets_sent;
            sample.received += by_kernel.packets_received;
        }
        // Whoever never had a packet is nobody's business yet.
        samples.retain(|_, sample| sample.sent > 0 || sample.received > 0);
        let due = self.reach.look(samples, now);
        if self.answers.is_some() {
            for (endpoint, target) in due {
                self.ask(seats, endpoint, target, ECHO_BYTES);
            }
        }
        let contacts = self.reach.contacts(now);
        let path_mtus = self.limits.clone();
        send_if_new(&self.reachability, Arc::new(Reachability { contacts, path_mtus }));
    }

    /// A peer may have several leases, all at the end of one path.
    fn limits_of_subnets(&self, table: &Table) -> BTreeMap<Prefix, u16> {
        let by_peer: BTreeMap<_, _> = self.paths.limits().collect();
        if by_peer.is_empty() {
            return BTreeMap::new();
        }
        let limit = |peer: &Arc<Peer>| Some((peer.subnet, *by_peer.get(&peer.address)?));
        table.peers().iter().filter_map(limit).collect()
    }

    fn receive_answers(&mut self, now: Instant) {
        let Some(answers) = &self.answers else { return };
        for _ in 0..ANSWERS_MAX {
            let Ok(received) = answers.try_recv(&mut self.buffer) else { return };
            let packet = &self.buffer[..received];
            if let Some((target, bytes)) = read_reply(packet, self.token) {
                self.paths.answered(target, bytes, now);
                self.reach.answered(target, now);
            }
        }
    }

    fn note_use(&mut self, seats: &[Seat], table: &Table, now: Instant) {
        let mut used: Vec<_> = seats.iter().flat_map(|seat| seat.stats.long_sends.take()).collect();
        used.extend(self.kernel_sends.take());
        used.sort_unstable();
        used.dedup();
        let target = |peer: &Peer| peer.subnet.network();
        if !used.is_empty() {
            // From anywhere, so that of too many all get their turns.
            let (before, from) = table.peers().split_at(fastrand::usize(..=table.peers().len()));
            for peer in from.iter().chain(before) {
                if used.binary_search(&peer.address).is_ok() {
                    self.paths.used(peer.address, target(peer), now);
                }
            }
        }
        self.paths.retain(|endpoint, address| {
            table
                .lookup(address)
                .is_some_and(|peer| peer.address == endpoint && target(peer) == address)
        });
    }
}

/// A raw socket under tokio's only type for datagrams: for both the kernel's calls are the same.
fn open(own: Ipv4Addr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    only_echo_replies(socket.as_fd())?;
    socket.set_nonblocking(true)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
    socket.bind(&SocketAddr::from((own, 0)).into())?;
    UdpSocket::from_std(OwnedFd::from(socket).into())
}

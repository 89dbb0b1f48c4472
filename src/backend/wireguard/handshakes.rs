//! The thread that sees to the handshakes of a WireGuard device in this process: what workers tell,
//! and what is due by the clock.

use std::io;
use std::iter::once;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};
use tracing::{error, info};

use crate::device::{Datagrams, SendBatch, TunnelSocket};
use crate::engine::{
    Event, EventQueue, Events, Priority, asleep_ns, events, keep_for_worker, monotonic_ns,
};
use crate::failure::lock;
use crate::packet::Span;
use crate::route::{Peer, Place, Published, Table};
use crate::wireguard::difference::{FoundPeer, PeerEdit};
use crate::wireguard::interface::{Counts, Send};
use crate::wireguard::keys::{PrivateKey, PublicKey};
use crate::wireguard::{Interface, Now, Randomness, Sessions};

/// Between two looks at what is due: a packet that finds its session too old waits so long at most.
const TICK: Duration = Duration::from_millis(250);

/// Once there was no time for all handshakes, proofs are asked for so long, as the kernel does.
const BUSY_NS: u64 = 1_000_000_000;

/// How long the thread does nothing after a panic, so that one that recurs does not fill the log.
const PAUSE_AFTER_PANIC: Duration = Duration::from_secs(5);

/// What the control plane and the thread have in common, and what workers go by.
pub(super) struct Shared {
    interface: Mutex<Interface>,
    /// The sessions in force.
    pub(super) sessions: Place<Sessions>,
    /// Which peer a packet goes to.
    pub(super) routes: Published,
    is_ending: AtomicBool,
}

impl Shared {
    /// That of a host with this key, without peers.
    pub(super) fn new(key: PrivateKey) -> Self {
        let interface = Mutex::new(Interface::new(key, &mut Kernel));
        let (sessions, routes) = (Place::new(Sessions::default()), Table::provisional());
        let routes = Published::new(routes);
        Self { interface, sessions, routes, is_ending: AtomicBool::new(false) }
    }

    /// Makes changes to peers. The first ones hear from this host at once: they may go on with what
    /// a weftd before this one has agreed on with them.
    pub(super) fn edit(&self, edits: &[PeerEdit]) {
        let mut interface = lock(&self.interface);
        let is_new = interface.is_new();
        edits.iter().for_each(|edit| interface.edit(edit));
        if is_new {
            interface.greet(now());
        }
        self.publish(&mut interface);
    }

    /// Its public key, and its peers as they are.
    pub(super) fn found(&self) -> (PublicKey, Vec<FoundPeer>) {
        let interface = lock(&self.interface);
        (interface.public_key(), interface.found())
    }

    /// What became of handshakes so far.
    pub(super) fn counts(&self) -> Counts {
        lock(&self.interface).counts()
    }

    /// What has changed, sessions first: a peer that has no place in them gets no packets.
    fn publish(&self, interface: &mut Interface) {
        if let Some(sessions) = interface.take_changed() {
            self.sessions.publish(sessions);
        }
        if interface.take_rerouted() {
            let peers = interface.routes();
            let peers = peers.map(|(subnets, at)| Arc::new(Peer::new(subnets, at))).collect();
            self.routes.table.publish(Table::build_after(&self.routes.table.load(), peers));
        }
    }
}

/// The thread. Dropping it ends it.
pub(super) struct Handshakes {
    shared: Arc<Shared>,
    events: Events,
    thread: Option<JoinHandle<()>>,
}

impl Handshakes {
    /// Starts it; it sends by `socket`, and is told of events where the other result leads.
    pub(super) fn spawn(
        shared: Arc<Shared>,
        socket: Arc<TunnelSocket>,
    ) -> io::Result<(Self, Events)> {
        let (events, queue) = events();
        // Peers come later; until then nobody is one.
        shared.publish(&mut lock(&shared.interface));
        let mut work = Work {
            shared: Arc::clone(&shared),
            socket,
            queue,
            busy_until_ns: 0,
            tick_at_ns: 0,
            asleep_ns: asleep_ns(),
        };
        let thread =
            std::thread::Builder::new().name("handshakes".to_owned()).spawn(move || {
                // Its messages come from anybody.
                if let Err(error) = keep_for_worker(Priority::Ordinary) {
                    tracing::warn!(
                        "the thread of handshakes keeps rights that it needs not: {error}"
                    );
                }
                let mut is_over = false;
                while !is_over {
                    let turn = catch_unwind(AssertUnwindSafe(|| work.turn()));
                    is_over = turn.unwrap_or_else(|_panic| {
                        error!(
                            "Internal error in weftd, please report it: the thread of WireGuard's \
                         handshakes panicked, and goes on"
                        );
                        std::thread::sleep(PAUSE_AFTER_PANIC);
                        false
                    });
                }
            })?;
        let own = events.clone();
        Ok((Self { shared, events: own, thread: Some(thread) }, events))
    }

    /// Has it look at once what is due.
    pub(super) fn call(&self) {
        self.events.call();
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
        self.call();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        self.shared.is_ending.store(false, Ordering::Relaxed);
    }
}

/// Of events in one turn, behind which an answer waits: each takes 0.2 ms at most.
const EVENTS_PER_TURN: usize = 16;

/// How often a message is offered to a socket that has no room, and how long it has between two
/// tries to send what it holds: 4 MB go in 8 ms at 4 Gb/s.
const SEND_TRIES: usize = 10;
const SEND_PAUSE: Duration = Duration::from_millis(1);

/// A shorter sleep is the time between two readings of clocks.
const ASLEEP_MIN_NS: u64 = 1_000_000_000;

/// What the thread has.
struct Work {
    shared: Arc<Shared>,
    socket: Arc<TunnelSocket>,
    queue: EventQueue,
    busy_until_ns: u64,
    tick_at_ns: u64,
    asleep_ns: u64,
}

impl Work {
    /// Waits for an event, and does what follows from it and what is due; whether it is over.
    fn turn(&mut self) -> bool {
        let Ok(mut event) = self.queue.next(TICK) else { return true };
        let (now, mut out) = (now(), Vec::new());
        let mut interface = lock(&self.shared.interface);
        // Peers have given up the sessions meanwhile, and the clock has not counted their age.
        let asleep_ns = asleep_ns();
        if asleep_ns > self.asleep_ns + ASLEEP_MIN_NS {
            info!("this host was asleep: WireGuard agrees on new keys with all peers");
            interface.forget_sessions();
        }
        self.asleep_ns = asleep_ns;
        if self.queue.is_busy() {
            self.busy_until_ns = now.ns + BUSY_NS;
        }
        let is_busy = now.ns < self.busy_until_ns;
        // What else has come by now: publishing costs as much for many as for one.
        for left in (0..EVENTS_PER_TURN).rev() {
            let Some(taken) = event.take() else { break };
            if matches!(taken, Event::Due) {
                self.tick_at_ns = 0;
            }
            take(&mut interface, taken, is_busy, now, &mut out);
            if left > 0 {
                event = self.queue.next(Duration::ZERO).unwrap_or_default();
            }
        }
        if now.ns >= self.tick_at_ns {
            self.tick_at_ns = now.ns + TICK.as_nanos() as u64;
            interface.tick(now, &mut Kernel, &mut out);
        }
        // First: the peer's answer may come before the send is over.
        self.shared.publish(&mut interface);
        drop(interface);
        self.send(&out);
        self.shared.is_ending.load(Ordering::Relaxed)
    }

    fn send(&self, out: &[Send]) {
        let mut batch = SendBatch::new(1, 1);
        for Send { to, bytes } in out {
            let spans = [Span::new(0, bytes.len())];
            let message = || Datagrams { destination: *to, segment_bytes: None, spans };
            // The socket is a worker's, too, and may be full of bulk. What is lost all the same is
            // sent again by who waits for an answer, seconds later.
            for _ in 0..SEND_TRIES {
                let sent = batch.send(self.socket.as_fd(), bytes, once(message()));
                if !sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                    break;
                }
                std::thread::sleep(SEND_PAUSE);
            }
        }
    }
}

fn take(interface: &mut Interface, event: Event, is_busy: bool, now: Now, out: &mut Vec<Send>) {
    match event {
        Event::Message { bytes, length, source } => {
            let message = bytes.get(..length).unwrap_or_default();
            interface.receive(message, source, is_busy, now, &mut Kernel, out);
        }
        Event::Waiting { peer, packet } => interface.keep(peer, packet, now, &mut Kernel, out),
        Event::Moved { peer, source } => interface.moved(peer, source),
        Event::Due => {}
    }
}

fn now() -> Now {
    // A clock before 1970 is no reason to stop: peers refuse old times by themselves.
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now { ns: monotonic_ns(), unix_ns: unix.as_nanos() as u64 }
}

/// The kernel's random numbers.
struct Kernel;

impl Randomness for Kernel {
    fn fill(&mut self, bytes: &mut [u8]) {
        // Of 256 bytes or less, which these are, it gives all once it has any (getrandom(2)).
        let given = getrandom(&mut *bytes, GetRandomFlags::empty());
        assert!(given.is_ok(), "the kernel gives no random numbers: {given:?}");
    }
}

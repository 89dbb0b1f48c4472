//! What each way of waiting for the TUN device costs: the reader in latency, the sender in
//! nanoseconds per packet, and the reader's core.

use std::collections::VecDeque;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::thread::{NanosleepRelativeResult, nanosleep};

use super::lab::{BEYOND, Lab, SMALL_BYTES, now, pin_other, pin_worker, readv, thread_time};
use super::raw::{Armed, Operation, Ring, SLOT_BYTES, Setup, VNET_BYTES};

const TUN: usize = 0;
/// Where a small packet's user data begins in a read: behind the offload, IP and UDP headers.
const DATA_AT: usize = VNET_BYTES + 28;
const BUFFERS: usize = 64;
/// How long a nap is, and what min_wait is given.
const NAP_US: u32 = 50;
/// Longest sleep, so that the end of a run is noticed.
const LIMIT: Duration = Duration::from_millis(20);

/// What the reader does when the device is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// Reads again, with readv.
    Spin,
    /// Reads again, by batches of a ring.
    SpinRing,
    /// The same with a multishot poll armed, which nobody waits for.
    SpinRingArmed,
    Poll,
    Epoll,
    RingPoll,
    RingPollMultishot,
    RingRead,
    RingReadMultishot,
    /// Sleeps a fixed time, looks, and polls if there is still nothing.
    NapPoll,
    /// The same, with a wait of the ring for nothing but its limit in place of nanosleep.
    NapRingPoll,
    MinWaitPoll,
    MinWaitReadMultishot,
}

/// Rounds of all ways in turn; the table has the medians over them.
const ROUNDS: usize = 9;

const ALL: [(Waiting, &str); 13] = [
    (Waiting::Spin, "awake, readv in a loop, nothing armed"),
    (Waiting::SpinRing, "awake, ring batches in a loop, nothing armed"),
    (Waiting::SpinRingArmed, "awake, ring batches in a loop, multishot poll armed"),
    (Waiting::Poll, "poll(2)"),
    (Waiting::Epoll, "epoll"),
    (Waiting::RingPoll, "ring, POLL_ADD"),
    (Waiting::RingPollMultishot, "ring, POLL_ADD multishot"),
    (Waiting::RingRead, "ring, READ armed"),
    (Waiting::RingReadMultishot, "ring, READ_MULTISHOT armed"),
    (Waiting::NapPoll, "nanosleep 50 us, then poll(2)"),
    (Waiting::NapRingPoll, "ring, wait 50 us for nothing, then POLL_ADD"),
    (Waiting::MinWaitPoll, "ring, POLL_ADD, min_wait 50 us for 32"),
    (Waiting::MinWaitReadMultishot, "ring, READ_MULTISHOT, min_wait 50 us for 32"),
];

/// How the sender sends.
#[derive(Debug, Clone, Copy)]
enum Traffic {
    /// One packet every 100 us.
    Paced,
    /// 32 packets at once every 300 us.
    Bursts,
    /// As many as it can.
    Flood,
}

impl Traffic {
    /// Packets at once, time between, and how many in all.
    fn plan(self) -> (usize, u64, usize) {
        match self {
            Self::Paced => (1, 100_000, 800),
            Self::Bursts => (32, 300_000, 200 * 32),
            Self::Flood => (1, 0, 50_000),
        }
    }
}

/// What one run of one way under one traffic gave, in the order of [`COLUMNS`].
type Outcome = [f64; 9];

const COLUMNS: &str = "send mean ns | send p50 | send p99 | latency p50 ns | latency p99 | \
     delivered % | waits per packet | reader's core % | packets/s, thousands";

pub(crate) fn all(lab: &Lab) -> Result<()> {
    for (traffic, title) in [
        (Traffic::Paced, "one packet every 100 us"),
        (Traffic::Bursts, "32 packets at once every 300 us"),
        (Traffic::Flood, "as many packets as the sender can send"),
    ] {
        println!("\nWaking, {title}\n");
        println!("| reader waits in | {COLUMNS} |");
        println!("|---|{}", "---|".repeat(size_of::<Outcome>() / size_of::<f64>()));
        let mut outcomes = vec![Vec::new(); ALL.len()];
        for _ in 0..ROUNDS {
            for ((waiting, _), outcomes) in ALL.iter().zip(&mut outcomes) {
                outcomes.push(run(lab, *waiting, traffic)?);
            }
        }
        for ((_, name), outcomes) in ALL.iter().zip(&outcomes) {
            print!("| {name} |");
            for column in 0..size_of::<Outcome>() / size_of::<f64>() {
                let mut values: Vec<_> = outcomes.iter().map(|outcome| outcome[column]).collect();
                values.sort_by(f64::total_cmp);
                let middle = values[ROUNDS / 2];
                let decimals = if middle < 3.0 { 3 } else { 0 };
                print!(" {middle:.decimals$} |");
            }
            println!();
        }
    }
    Ok(())
}

fn is_multishot_read(waiting: Waiting) -> bool {
    matches!(waiting, Waiting::RingReadMultishot | Waiting::MinWaitReadMultishot)
}

fn run(lab: &Lab, waiting: Waiting, traffic: Traffic) -> Result<Outcome> {
    // Armed reads are refused on a non-blocking file.
    lab.set_waiting(waiting == Waiting::RingRead || is_multishot_read(waiting))?;
    let stop = AtomicBool::new(false);
    let ready = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            pin_worker()?;
            rustix::thread::set_current_timer_slack(NonZero::new(1))?;
            let mut reader = Reader::open(lab, waiting)?;
            ready.store(true, Ordering::Release);
            let (wall, cpu) = (now(), thread_time());
            while !stop.load(Ordering::Relaxed) {
                reader.turn(lab);
            }
            let busy = (thread_time() - cpu) as f64 / (now() - wall) as f64;
            anyhow::Ok((reader.latencies, reader.waits, busy))
        });
        let sender = scope.spawn(|| {
            pin_other()?;
            while !ready.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let sent = send(traffic);
            stop.store(true, Ordering::Relaxed);
            sent
        });
        let sent = sender.join().expect("the sender does not panic");
        let read = reader.join().expect("the reader does not panic");
        anyhow::Ok((sent?, read?))
    });
    let ((mut sends, mean, seconds), (mut latencies, waits, busy)) = outcome?;
    let packets = sends.len() as f64;
    sends.sort_unstable();
    latencies.sort_unstable();
    let at = |list: &[u64], share: f64| {
        list.get((list.len() as f64 * share) as usize).map_or(0.0, |&value| value as f64)
    };
    Ok([
        mean,
        at(&sends, 0.5),
        at(&sends, 0.99),
        at(&latencies, 0.5),
        at(&latencies, 0.99),
        latencies.len() as f64 / packets * 100.0,
        waits as f64 / packets,
        busy * 100.0,
        packets / seconds / 1000.0,
    ])
}

/// Sends, and returns what every send took, what one took on average, and the seconds of all.
fn send(traffic: Traffic) -> Result<(Vec<u64>, f64, f64)> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(BEYOND)?;
    let (at_once, gap, packets) = traffic.plan();
    let mut sends = Vec::with_capacity(packets);
    let mut bytes = [0; SMALL_BYTES];
    // The reader has gone to sleep by then.
    std::thread::sleep(Duration::from_millis(2));
    let (start, mut next) = (now(), now());
    while sends.len() < packets {
        while now() < next {
            std::hint::spin_loop();
        }
        next = now() + gap;
        for _ in 0..at_once {
            let before = now();
            bytes[..8].copy_from_slice(&before.to_le_bytes());
            // A full queue drops, which is no error.
            socket.send(&bytes)?;
            sends.push(now() - before);
        }
    }
    let mean = sends.iter().sum::<u64>() as f64 / sends.len() as f64;
    Ok((sends, mean, (now() - start) as f64 / 1e9))
}

struct Reader {
    waiting: Waiting,
    ring: Option<Ring>,
    epoll: Option<rustix::fd::OwnedFd>,
    packet: Vec<u8>,
    /// Slots that hold a packet: of the armed read, or of a multishot.
    came: VecDeque<(usize, usize)>,
    armed: bool,
    latencies: Vec<u64>,
    waits: u64,
}

impl Reader {
    fn open(lab: &Lab, waiting: Waiting) -> Result<Self> {
        let with_ring =
            !matches!(waiting, Waiting::Spin | Waiting::Poll | Waiting::Epoll | Waiting::NapPoll);
        let mut reader = Self {
            waiting,
            ring: None,
            epoll: None,
            packet: vec![0; SLOT_BYTES],
            came: VecDeque::with_capacity(BUFFERS),
            armed: false,
            latencies: Vec::with_capacity(1 << 20),
            waits: 0,
        };
        if with_ring {
            let mut ring = Ring::open(Setup::BEST, &lab.files(), BUFFERS)?;
            if is_multishot_read(waiting) {
                ring.provide(BUFFERS)?;
            }
            reader.ring = Some(ring);
        }
        if waiting == Waiting::Epoll {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(&set, &lab.tun, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            reader.epoll = Some(set);
        }
        Ok(reader)
    }

    /// Reads until the device is empty, then waits.
    fn turn(&mut self, lab: &Lab) {
        if is_multishot_read(self.waiting) {
            self.by_multishot();
        } else if self.waiting == Waiting::RingRead {
            self.by_armed_read();
        } else {
            self.drain(lab);
            self.wait(lab);
        }
    }

    fn drain(&mut self, lab: &Lab) -> usize {
        let before = self.latencies.len();
        match &mut self.ring {
            None => {
                let mut header = [0; VNET_BYTES];
                while readv(&lab.tun, &mut header, &mut self.packet).is_ok() {
                    note(&mut self.latencies, &self.packet[DATA_AT - VNET_BYTES..]);
                }
            }
            Some(ring) => drain_ring(ring, &mut self.latencies, 0, &mut self.armed),
        }
        self.latencies.len() - before
    }

    fn wait(&mut self, lab: &Lab) {
        match self.waiting {
            Waiting::Spin | Waiting::SpinRing => return,
            Waiting::SpinRingArmed => return self.arm(Armed::PollMultishot),
            Waiting::Poll => poll_once(lab),
            Waiting::Epoll => {
                let mut events = [const { std::mem::MaybeUninit::uninit() }; 4];
                let limit = limit();
                let set = self.epoll.as_ref().expect("it was made for this");
                epoll::wait(set, &mut events, Some(&limit)).ok();
            }
            Waiting::NapPoll => {
                nap();
                if self.drain(lab) == 0 {
                    poll_once(lab);
                }
            }
            Waiting::NapRingPoll => {
                let ring = self.ring.as_mut().expect("it was made for this");
                ring.wait(1, 0, Duration::from_micros(u64::from(NAP_US))).ok();
                if self.drain(lab) == 0 {
                    self.arm(Armed::Poll);
                    self.sleep(1, 0);
                }
            }
            Waiting::RingPoll => {
                self.arm(Armed::Poll);
                self.sleep(1, 0);
            }
            Waiting::RingPollMultishot => {
                self.arm(Armed::PollMultishot);
                self.sleep(1, 0);
            }
            Waiting::MinWaitPoll => {
                self.arm(Armed::Poll);
                self.sleep(32, NAP_US);
            }
            Waiting::RingRead | Waiting::RingReadMultishot | Waiting::MinWaitReadMultishot => {}
        }
        self.waits += 1;
    }

    fn arm(&mut self, armed: Armed) {
        let ring = self.ring.as_mut().expect("it was made for this");
        if !self.armed {
            ring.arm(armed, TUN);
            self.armed = true;
        }
    }

    /// Waits in the ring; polls that fired are taken.
    fn sleep(&mut self, want: u32, min_wait_us: u32) {
        let ring = self.ring.as_mut().expect("it was made for this");
        ring.wait(want, min_wait_us, LIMIT).ok();
        ring.take(|done| self.armed &= !done.ended);
    }

    fn by_multishot(&mut self) {
        self.arm(Armed::ReadMultishot);
        let ring = self.ring.as_mut().expect("it was made for this");
        if self.waiting == Waiting::MinWaitReadMultishot {
            ring.wait(32, NAP_US, LIMIT).ok();
        } else {
            ring.wait(1, 0, LIMIT).ok();
        }
        self.waits += 1;
        ring.take(|done| {
            self.armed &= !done.ended;
            self.came.extend(done.slot.map(|slot| (slot, done.result as usize)));
        });
        for &(slot, bytes) in &self.came {
            note(&mut self.latencies, &ring.slot(slot)[DATA_AT..bytes]);
        }
        ring.give_back(self.came.drain(..).map(|(slot, _)| slot));
    }

    /// A read stays armed in slot 0; what else is there is read by a batch.
    fn by_armed_read(&mut self) {
        self.arm(Armed::Read);
        let ring = self.ring.as_mut().expect("it was made for this");
        ring.wait(1, 0, LIMIT).ok();
        self.waits += 1;
        let mut bytes = None;
        ring.take(|done| bytes = Some(done.result as usize));
        if let Some(bytes) = bytes {
            self.armed = false;
            note(&mut self.latencies, &ring.slot(0)[DATA_AT..bytes]);
            drain_ring(ring, &mut self.latencies, 1, &mut false);
        }
    }
}

/// Reads by batches, first a small one, until the device is empty.
fn drain_ring(ring: &mut Ring, latencies: &mut Vec<u64>, first: usize, armed: &mut bool) {
    let mut batch = 4;
    loop {
        for slot in first..first + batch {
            ring.queue(Operation::Read, TUN, slot, SLOT_BYTES);
        }
        ring.enter(batch as u32).expect("the ring can be entered");
        let (mut came, mut waiting) = ([(0, 0); BUFFERS], batch);
        let mut count = 0;
        while waiting > 0 {
            ring.take(|done| match done.slot {
                None => *armed &= !done.ended,
                Some(slot) => {
                    waiting -= 1;
                    if let Ok(bytes) = usize::try_from(done.result) {
                        came[count] = (slot, bytes);
                        count += 1;
                    }
                }
            });
            if waiting > 0 {
                // An answer of a poll was counted in place of a read's.
                ring.enter(1).expect("the ring can be entered");
            }
        }
        for &(slot, bytes) in &came[..count] {
            note(latencies, &ring.slot(slot)[DATA_AT..bytes]);
        }
        if count < batch {
            return;
        }
        batch = 32;
    }
}

fn note(latencies: &mut Vec<u64>, data: &[u8]) {
    if let Some(sent) = data.first_chunk() {
        latencies.push(now().saturating_sub(u64::from_le_bytes(*sent)));
    }
}

fn limit() -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: LIMIT.subsec_nanos().into() }
}

fn poll_once(lab: &Lab) {
    let tun = lab.tun.as_fd();
    poll(&mut [PollFd::new(&tun, PollFlags::IN)], Some(&limit())).ok();
}

fn nap() {
    let time = Timespec { tv_sec: 0, tv_nsec: i64::from(NAP_US) * 1000 };
    let NanosleepRelativeResult::Ok = nanosleep(&time) else { return };
}

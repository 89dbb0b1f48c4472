//! A worker's life: gather, move both ways, wait. The same for every engine.
//!
//! One thread serves both directions, so a busy one can't starve the other: each turn moves at
//! most one batch each way, bounded by bytes and by packets.

use std::array::from_fn;
use std::io;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::{nanosleep, sched_yield};
use rustix::time::{ClockId, clock_gettime};

use crate::forward::{Context, Local};

use super::contain;
use super::egress::EgressHalf;
use super::idle::{Idle, NAP_NS, Next};
use super::ingress::IngressHalf;
use super::io::{Io, LANES_MAX, Reads, Ready, Receives, Share};
use super::lanes::Lanes;
use super::priority::Budget;
use super::wake::Stop;
use super::worker::{WorkerConfig, WorkerEnd};

/// How often what was refused is tried again, GSO and datagrams without fragmentation: the
/// kernel forgets a learned path MTU after the same time (net.ipv4.route.mtu_expires).
const REFUSED_RETRY_NS: u64 = 600 * 1_000_000_000;

/// Longest sleep of a worker that nothing wakes: so often, others see that it is there. A turn
/// without work costs microseconds.
pub(super) const SLEEP_MAX_SECONDS: u64 = 5;

/// How often a worker looks for its first table, which comes a few milliseconds after its start.
const FIRST_TABLE_PERIOD: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Runs a worker over `io`, whose reads fill the first `read_bytes` of their arena, until it is
/// stopped or loses its device.
pub(super) fn run(
    mut io: impl Io,
    read_bytes: usize,
    config: &WorkerConfig,
    mut budget: Option<Budget>,
    stop: &Stop,
) -> WorkerEnd {
    let mut routes = config.routes.table.reader();
    let mut egress = EgressHalf::new(config, read_bytes);
    let mut ingress = IngressHalf::new(config);
    let (mut idle, mut lanes) = (Idle::default(), Lanes::new(config.bulk.len()));
    let (stats, icmp_limit) = (&config.stats, &config.icmp_limit);
    // What the device and the socket of an earlier weftd hold is not dropped for lack of a route.
    while routes.load().is_provisional && !stop.requested() {
        poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&FIRST_TABLE_PERIOD)).ok();
        stats.last_turn_ns.set(monotonic_ns());
    }
    let mut ready = Ready::BOTH;
    let mut retry_at_ns = 0;
    let end = loop {
        let now_ns = monotonic_ns();
        stats.last_turn_ns.set(now_ns);
        if let Some(known) = budget.as_mut().filter(|budget| budget.is_look_due(now_ns))
            && !known.look(now_ns, clock_ns(ClockId::ThreadCPUTime))
        {
            budget = None;
        }
        if now_ns >= retry_at_ns {
            retry_at_ns = now_ns + REFUSED_RETRY_NS;
            egress.retry_refused();
        }
        egress.clear();
        ingress.receives.clear();
        let gathered = if stop.requested() {
            Err(WorkerEnd::Stopped)
        } else {
            ready.tun &= !egress.is_waiting();
            gather(&mut io, &mut lanes, ready, &mut egress.reads, &mut ingress.receives)
        };
        egress.begin_turn();
        ingress.begin_turn();
        let (table, local) = (routes.load(), &local(config));
        let context = |stats| Context { local, table, stats, icmp_limit, now_ns };
        let sent = contain::turn(&mut egress, &mut io, &context(&stats.egress));
        let written = contain::turn(&mut ingress, &mut io, &context(&stats.ingress));
        if let Err(end) = gathered.and(sent).and(written) {
            break end;
        }
        let next = idle.after_turn(egress.reads.moved.and(ingress.receives.moved));
        let room = egress.waits_until_ns.map(|at_ns| Room {
            limit_ns: at_ns.saturating_sub(now_ns),
            is_source: egress.waits_for_source,
        });
        ready = match wait(next, config, stop, room, &mut idle) {
            Ok(ready) => ready,
            Err(error) => break WorkerEnd::WaitFailed(error),
        };
    };
    if egress.is_waiting() {
        // Every packet has an outcome: what waits goes now or is dropped.
        egress.waits_until_ns = Some(0);
        let (table, local, stats) = (routes.load(), &local(config), &stats.egress);
        let context = Context { local, table, stats, icmp_limit, now_ns: monotonic_ns() };
        let _ended_already = contain::turn(&mut egress, &mut io, &context);
    }
    end
}

/// Reads a batch from each source that may have something. Both batches come without anything from
/// this turn.
fn gather(
    io: &mut impl Io,
    lanes: &mut Lanes,
    ready: Ready,
    reads: &mut Reads,
    receives: &mut Receives,
) -> Result<(), WorkerEnd> {
    if !ready.tun {
        return io.read(0, Share::NOTHING, reads, receives, ready.socket).map(drop);
    }
    lanes.begin(ready.bulk);
    let mut prompt = Prompt { left: Share::WHOLE, is_receiving: ready.socket, has_more: true };
    prompt.read(io, reads, receives, lanes.are_due())?;
    lanes.behind_prompt(prompt.has_more);
    let first = reads.packets.len();
    for index in 0..LANES_MAX - 1 {
        let Some(share) = lanes.share(index) else { continue };
        let load = io.read(index + 1, share, reads, receives, false)?;
        lanes.took(index, load, !reads.moved.drained);
    }
    let bulk = reads.packets.len() - first;
    // What was sent before the packets from the bulk lanes is there by now, and goes before them.
    let outcome = match bulk {
        0 => Ok(()),
        _ => {
            // As much as at first: a sender's burst may be in both lanes.
            prompt.left = Share::WHOLE;
            prompt.read(io, reads, receives, true)
        }
    };
    reads.packets[first..].rotate_left(bulk);
    reads.moved.drained = !lanes.have_more(prompt.has_more);
    outcome
}

/// What a turn reads from the prompt lane.
struct Prompt {
    left: Share,
    /// Whether the socket is still to be read, too.
    is_receiving: bool,
    /// Whether it may hold more than was read.
    has_more: bool,
}

impl Prompt {
    /// Once, or until it is drained or its share is used up.
    fn read(
        &mut self,
        io: &mut impl Io,
        reads: &mut Reads,
        receives: &mut Receives,
        until_drained: bool,
    ) -> Result<(), WorkerEnd> {
        while self.left.packets > 0 && self.left.load > 0 {
            let before = reads.seen();
            let is_receiving = std::mem::take(&mut self.is_receiving);
            let load = io.read(0, self.left, reads, receives, is_receiving)?;
            self.left.packets = self.left.packets.saturating_sub(reads.seen() - before);
            self.left.load = self.left.load.saturating_sub(load);
            self.has_more = !reads.moved.drained;
            if !self.has_more || !until_drained {
                break;
            }
        }
        Ok(())
    }
}

/// This host, with what fits now.
fn local(config: &WorkerConfig) -> Local {
    let [mtu_bytes, whole_bytes] =
        [&config.mtu_bytes, &config.whole_bytes].map(|bytes| bytes.load(Ordering::Relaxed));
    Local { mtu_bytes, whole_bytes, ..config.local }
}

/// The room that is waited for, how long at most, and in the send buffer of which socket.
#[derive(Debug, Clone, Copy)]
struct Room {
    limit_ns: u64,
    is_source: bool,
}

/// Waits as `next` says; returns which sources may have something then.
fn wait(
    next: Next,
    config: &WorkerConfig,
    stop: &Stop,
    room: Option<Room>,
    idle: &mut Idle,
) -> io::Result<Ready> {
    match next {
        Next::Turn => {}
        Next::Yield => {
            let before_ns = monotonic_ns();
            sched_yield();
            idle.yielded(monotonic_ns() - before_ns);
        }
        Next::Nap => {
            config.stats.naps.add(1);
            // A signal that ends it early costs a smaller batch.
            let _woken_early = nanosleep(&Timespec { tv_sec: 0, tv_nsec: NAP_NS });
        }
        Next::Sleep => {
            config.stats.sleeps.add(1);
            return sleep(config, stop, room);
        }
    }
    Ok(Ready::BOTH)
}

/// Sleeps until a datagram can be received, the worker is to stop, or the TUN device has a packet,
/// [`SLEEP_MAX_SECONDS`] at most.
/// With a limit, room in the send buffer is waited for instead of packets, no longer than that:
/// what the device would bring could not be sent.
///
/// poll, not epoll: an epoll set stays on the wait queues of what it watches, and then the kernel
/// calls it for every packet queued and every packet sent, under a lock, while nobody sleeps. So
/// does a poll of an io_uring until it is removed.
fn sleep(config: &WorkerConfig, stop: &Stop, room: Option<Room>) -> io::Result<Ready> {
    let readable = PollFlags::IN;
    let tun = room.map_or(readable, |_| PollFlags::empty());
    let longest = Timespec { tv_sec: SLEEP_MAX_SECONDS as i64, tv_nsec: 0 };
    let limit = room.map(|room| Timespec { tv_sec: 0, tv_nsec: room.limit_ns as i64 });
    let sender = config.socket.sender(room.is_some_and(|room| room.is_source));
    let lanes = 1 + config.bulk.len();
    let mut sources: [_; 3 + LANES_MAX] = from_fn(|index| match index {
        0 => PollFd::new(stop, readable),
        1 => PollFd::new(&config.socket, readable),
        index if index == 2 + lanes => PollFd::new(&sender, PollFlags::OUT),
        lane => PollFd::new(config.lane(lane - 2), tun),
    });
    let sources = &mut sources[..2 + lanes + usize::from(room.is_some())];
    match poll(sources, Some(&limit.unwrap_or(longest))) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    // An error or a hang-up is for the read to find out about.
    let woke = |source: &PollFd<'_>| !source.revents().is_empty();
    let bulk = &sources[3..2 + lanes];
    let bulk = bulk.iter().rev().fold(0, |bits, lane| bits << 1 | u32::from(woke(lane)));
    let is_socket = woke(&sources[1]) || sources.get(2 + lanes).is_some_and(woke);
    Ok(Ready { tun: bulk != 0 || woke(&sources[2]), bulk, socket: is_socket })
}

/// The clock that workers go by.
pub fn monotonic_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// How long this host has slept since it was booted.
pub fn asleep_ns() -> u64 {
    clock_ns(ClockId::Boottime).saturating_sub(clock_ns(ClockId::Monotonic))
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::engine::contain::tests::Scene;
    use crate::engine::{Engine, Worker};
    use crate::offload::VNET_HEADER_BYTES;
    use crate::route::{Published, Table};
    use crate::sys::tun_io::{Write, WriteBatch};

    /// Lanes whose packets are numbers. Each of `later` comes into a lane after so many reads.
    #[derive(Default)]
    struct Queues {
        lanes: [VecDeque<usize>; LANES_MAX],
        later: VecDeque<(usize, usize, usize)>,
        reads: usize,
    }

    impl Io for Queues {
        fn read(
            &mut self,
            lane: usize,
            share: Share,
            reads: &mut Reads,
            _: &mut Receives,
            _: bool,
        ) -> Result<usize, WorkerEnd> {
            self.reads += 1;
            while self.later.front().is_some_and(|(reads, ..)| *reads <= self.reads) {
                let (_, lane, number) = self.later.pop_front().unwrap();
                self.lanes[lane].push_back(number);
            }
            let (mut packets, mut load) = (0, 0);
            while packets < share.packets && load < share.load {
                let Some(number) = self.lanes[lane].pop_front() else { break };
                load += reads.push(number, VNET_HEADER_BYTES + 100);
                packets += 1;
            }
            reads.moved.drained = packets < share.packets && load < share.load;
            Ok(load)
        }

        fn write<'a>(
            &mut self,
            _: &mut WriteBatch,
            _: &'a [u8],
            writes: impl Iterator<Item = Write<'a>>,
        ) -> usize {
            writes.count()
        }

        fn is_idle(&self) -> bool {
            true
        }
    }

    /// The order in which turns take packets, until there are none.
    fn order(mut queues: Queues) -> Vec<u32> {
        let (mut reads, mut receives) = (Reads::new(1000), Receives::new());
        let (mut lanes, mut order) = (Lanes::new(LANES_MAX - 1), Vec::new());
        let ready = Ready { socket: false, ..Ready::BOTH };
        while !queues.later.is_empty() || queues.lanes.iter().any(|lane| !lane.is_empty()) {
            reads.clear();
            gather(&mut queues, &mut lanes, ready, &mut reads, &mut receives).unwrap();
            order.extend(reads.packets.iter().map(|read| read.packet.offset));
        }
        order
    }

    /// A worker that others kept from the processor: the prompt lane has what a sender sent first,
    /// several batches of it, and a bulk lane what followed.
    #[test]
    fn what_went_into_the_prompt_lane_first_leaves_first() {
        let mut queues = Queues::default();
        queues.lanes[0].extend(0..200);
        queues.lanes[2].extend(200..300);
        assert!(order(queues).is_sorted(), "the packets of a flow change places");
    }

    /// A sender that is given a bulk lane while the lanes are read.
    #[test]
    fn what_comes_between_two_reads_keeps_its_order() {
        for at in 1..6 {
            let mut queues = Queues::default();
            queues.lanes[0].extend(0..10);
            queues.later.extend([(at, 0, 10), (at, 2, 11)]);
            assert!(order(queues).is_sorted(), "at read {at} the packets change places");
        }
    }

    #[test]
    fn a_burst_behind_a_busy_prompt_lane_keeps_its_order() {
        for at in 2..4 {
            let mut queues = Queues::default();
            queues.lanes[0].extend(0..60);
            queues.later.extend((60..70).map(|number| (at, 0, number)));
            queues.later.push_back((at, 2, 70));
            assert!(order(queues).is_sorted(), "at read {at} the packets change places");
        }
    }

    #[test]
    fn a_worker_without_a_table_leaves_packets_where_they_are() {
        let (scene, mut config) = Scene::new(Some(Engine::Mmsg));
        config.routes = Published::new(Table::provisional());
        let (routes, stats) = (config.routes.clone(), Arc::clone(&config.stats));
        scene.give_host(b"no packet");
        let worker = Worker::spawn(config, |_end| ()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let received = || stats.egress.packets_received.get();
        assert_eq!(received(), 0, "dropped before any lease is known");
        routes.table.publish(Table::build(Vec::new()));
        while received() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(worker);
    }

    #[test]
    fn a_sleeper_is_woken_by_each_source() {
        let (scene, config) = Scene::new(Some(Engine::Mmsg));
        let stop = Stop::new().unwrap();
        scene.give_host(b"x");
        let tun = Ready { tun: true, bulk: 0, socket: false };
        assert_eq!(sleep(&config, &stop, None).unwrap(), tun);
        scene.give_peer(b"x");
        // Loopback delivers within the call that sends.
        assert_eq!(sleep(&config, &stop, None).unwrap(), Ready::BOTH);
        let room =
            sleep(&config, &stop, Some(Room { limit_ns: 999_999_999, is_source: false })).unwrap();
        assert!(!room.tun, "what the device has could not be sent");
        let (_scene, config) = Scene::new(Some(Engine::Mmsg));
        stop.request();
        assert_eq!(
            sleep(&config, &stop, None).unwrap(),
            Ready { tun: false, bulk: 0, socket: false }
        );
    }
}

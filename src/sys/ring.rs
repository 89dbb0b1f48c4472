//! One io_uring (io_uring(7)) between a TUN queue, the tunnel socket and a stop signal.
//!
//! Batches of operations are lent the caller's memory only for the call: it returns when the
//! kernel has answered every one of them. All are non-blocking, so the kernel answers while it
//! takes them; what is left armed between calls are polls, which refer to no memory.

mod set_up;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};

use self::set_up::{missing_operation, set_up};

use super::tun_io::WriteBatch;
use super::udp::ReceiveBatch;
use super::{Answer, Slots};

/// The files of a ring, as its table of registered files holds them.
const TUN: Fixed = Fixed(0);
const SOCKET: Fixed = Fixed(1);
const STOP: Fixed = Fixed(2);

/// User data of what is no operation of a batch; those count from 0.
const POLLS: u64 = 1 << 32;
const REMOVALS: u64 = POLLS + SOURCES as u64;

/// What can be polled: each [`Source`].
const SOURCES: usize = 4;

/// Submissions in a row that the kernel may refuse for now before the ring counts as broken.
const REFUSALS_MAX: usize = 1000;

/// How long the first read of the TUN device may take; it is answered at once or not at all.
const PROBE_LIMIT: Duration = Duration::from_millis(20);

/// How long the removal of polls may take; the kernel needs microseconds.
const REMOVAL_LIMIT: Duration = Duration::from_millis(100);

/// The longest read of a TUN device: a packet, rounded up, with its offload header.
const READ_BYTES_MAX: usize = (64 << 10) + 10;

/// io_uring can't be used.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel refuses to make a ring.
    #[error("io_uring_setup failed")]
    Setup(#[source] io::Error),
    /// The ring can't be given files or asked for its operations.
    #[error("io_uring_register failed")]
    Register(#[source] io::Error),
    /// The ring can't be entered.
    #[error("io_uring_enter failed")]
    Enter(#[source] io::Error),
    /// The ring lacks an operation.
    #[error("this kernel's io_uring has no {0}")]
    Operation(&'static str),
    /// The ring can't wait with a limit (kernel 5.11).
    #[error("this kernel's io_uring can't wait with a time limit")]
    NoTimeLimit,
    /// A read of the TUN device that must not wait did something else (kernels before 6.4).
    #[error("this kernel's io_uring can't read a TUN device without waiting")]
    TunRead(#[source] io::Error),
    /// A read of the TUN device that must not wait was not answered.
    #[error("this kernel's io_uring does not answer reads of a TUN device")]
    TunSilent,
}

/// Slots of an arena that a batch fills.
pub struct Lent<'a> {
    /// The arena.
    pub arena: &'a mut [u8],
    /// How the slots lie in it.
    pub layout: Slots,
    /// How many of the first slots to fill.
    pub count: usize,
}

/// What can be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The TUN device has a packet.
    Tun = 0,
    /// The socket has a datagram.
    Socket = 1,
    /// The stop signal was given.
    Stop = 2,
    /// The socket's send buffer has room.
    Room = 3,
}

/// Whether a poll is armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Poll {
    Off,
    Armed,
    /// Its removal is on the way; its own completion tells that it is off. But what a poll has just
    /// noticed can't be removed (EALREADY), and if a read was faster, the kernel leaves it armed.
    Removing,
}

/// A ring, to be used by the thread that made it only.
pub struct Ring {
    ring: IoUring,
    polls: [Poll; SOURCES],
    ready: [bool; SOURCES],
    /// Operations of the running batch that wait for their answer, submitted or not.
    unanswered: usize,
    /// Operations of the running batch, from its last enter on. Nothing is queued behind them.
    queued: usize,
    /// What the kernel said of each operation of the last batch.
    answers: Vec<Answer>,
    /// The packet that the first read brought, until it is asked for.
    first_packet: Option<Box<[u8]>>,
    /// Once set, nothing is submitted any more.
    broken: Option<i32>,
}

impl Ring {
    /// Makes a ring of `entries` submissions (a power of two) for batches of at most
    /// `operations`, and reads `tun` once as the worker will do it.
    pub fn open(
        entries: u32,
        operations: usize,
        tun: BorrowedFd<'_>,
        socket: BorrowedFd<'_>,
        stop: BorrowedFd<'_>,
    ) -> Result<Self, RingError> {
        let ring = set_up(entries).map_err(RingError::Setup)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(RingError::NoTimeLimit);
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(RingError::Register)?;
        if let Some(missing) = missing_operation(|code| probe.is_supported(code)) {
            return Err(RingError::Operation(missing));
        }
        let files = [tun.as_raw_fd(), socket.as_raw_fd(), stop.as_raw_fd()];
        ring.submitter().register_files(&files).map_err(RingError::Register)?;
        let mut ring = Self {
            ring,
            polls: [Poll::Off; SOURCES],
            ready: [false; SOURCES],
            unanswered: 0,
            queued: 0,
            answers: vec![UNANSWERED; operations],
            first_packet: None,
            broken: None,
        };
        ring.read_first()?;
        Ok(ring)
    }

    /// Reads packets of the TUN device, each with its offload header in front, into the slots of
    /// `tun`, and receives into those of `receives`, without waiting. [`Self::answer`] tells of
    /// the reads first, then of the receives.
    pub fn gather(
        &mut self,
        tun: &mut Lent<'_>,
        receives: &mut Lent<'_>,
        batch: &mut ReceiveBatch,
    ) -> io::Result<()> {
        assert!(tun.layout.hold(tun.arena, tun.count), "slots lie apart in the arena");
        self.begin(tun.count + receives.count)?;
        batch.show(receives.arena, receives.layout, 0..receives.count);
        let held = if tun.count > 0 { self.first_packet.take() } else { None };
        if let Some(packet) = &held {
            tun.arena[..packet.len()].copy_from_slice(packet);
            self.answers[0] = Answer(packet.len() as i32);
        }
        let start = tun.arena.as_mut_ptr();
        for index in usize::from(held.is_some())..tun.count {
            // SAFETY: the slot lies within the arena, as asserted.
            let slot = unsafe { start.add(index * tun.layout.stride) };
            let read = opcode::Read::new(TUN, slot, tun.layout.slot_bytes as u32);
            let read = read.rw_flags(libc::RWF_NOWAIT).build();
            // SAFETY: the slot is borrowed mutably until `finish` has returned.
            unsafe { self.push(read.user_data(index as u64)) }?;
        }
        for slot in 0..receives.count {
            let header = &raw mut batch.header(slot).msg_hdr;
            let receive = opcode::RecvMsg::new(SOCKET, header).flags(libc::MSG_DONTWAIT as u32);
            let index = (tun.count + slot) as u64;
            // SAFETY: `show` has pointed the header at vectors of `batch` and a slot of the arena,
            // all borrowed mutably until `finish` has returned.
            unsafe { self.push(receive.build().user_data(index)) }?;
        }
        self.finish()?;
        for slot in 0..receives.count {
            if let Ok(bytes) = self.answer(tun.count + slot) {
                batch.header(slot).msg_len = bytes as u32;
            }
        }
        Ok(())
    }

    /// What operation `index` of the last [`Self::gather`] brought, in bytes.
    pub fn answer(&self, index: usize) -> io::Result<usize> {
        self.answers[index].result()
    }

    /// Whether every operation of a batch has its answer; not after a panic in the middle of one.
    pub fn is_idle(&self) -> bool {
        self.unanswered == 0
    }

    /// Writes `batch` from `first` on to the TUN device, in order; returns how many were tried, at
    /// least one. A refused barrier is the last of them. [`WriteBatch::result`] tells of each.
    pub fn write(
        &mut self,
        batch: &mut WriteBatch,
        arena: &[u8],
        first: usize,
    ) -> io::Result<usize> {
        if !self.ring.submission().is_empty() {
            self.enter(0, None)?;
        }
        batch.show(arena);
        // From the first barrier on each write is linked to the next one: if one fails, the kernel
        // cancels those behind it. A link costs 60 to 170 ns. A chain ends where a submission ends.
        let barrier = batch.first_barrier(first).map(|index| index - first);
        let count = match barrier {
            Some(_) => (batch.len() - first).min(self.ring.params().sq_entries() as usize),
            None => batch.len() - first,
        };
        self.begin(count)?;
        let iovecs = batch.iovecs.as_ptr();
        for index in 0..count {
            let (first_part, parts_count) = batch.parts(first + index);
            // SAFETY: `parts` lie within the iovecs that `show` has made.
            let parts = unsafe { iovecs.add(first_part) };
            let write = opcode::Writev::new(TUN, parts, parts_count as u32);
            let write = write.rw_flags(libc::RWF_NOWAIT).build().user_data(index as u64);
            let is_linked = barrier.is_some_and(|barrier| index >= barrier) && index + 1 < count;
            let write = if is_linked { write.flags(squeue::Flags::IO_LINK) } else { write };
            // SAFETY: the iovecs point at headers of `batch` and parts of `arena`, all borrowed
            // until `finish` has returned, and writev only reads.
            unsafe { self.push(write) }?;
        }
        self.finish()?;
        let answers = &self.answers[..count];
        batch.results[first..first + count].copy_from_slice(answers);
        // Up to and including the first of the chain that failed.
        let tried = barrier.map_or(count, |barrier| {
            let went = answers.iter().skip(barrier).take_while(|answer| answer.0 >= 0).count();
            (barrier + went + 1).min(count)
        });
        Ok(tried)
    }

    /// Sleeps until one of `sources` is ready, or for `limit`; [`Self::take_ready`] tells which.
    pub fn wait(&mut self, sources: &[Source], limit: Option<Duration>) -> io::Result<()> {
        self.settle()?;
        for &source in sources {
            self.arm(source)?;
        }
        let deadline = limit.map(|limit| Instant::now() + limit);
        while !sources.iter().any(|&source| self.ready[source as usize]) {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            self.enter(1, left)?;
        }
        Ok(())
    }

    /// Whether `source` was found ready since this was asked last.
    pub fn take_ready(&mut self, source: Source) -> bool {
        std::mem::take(&mut self.ready[source as usize])
    }

    /// Takes back what waits for `source`, with the next batch. While a poll is armed, the kernel
    /// runs it for every packet.
    pub fn disarm(&mut self, source: Source) -> io::Result<()> {
        if self.polls[source as usize] == Poll::Armed {
            // Before the removal is queued: making room for it may bring the poll's own end.
            self.polls[source as usize] = Poll::Removing;
            let removal = opcode::PollRemove::new(POLLS + source as u64).build();
            // SAFETY: a removal refers to no memory.
            unsafe { self.submit_entry(removal.user_data(REMOVALS + source as u64)) }?;
        }
        Ok(())
    }

    fn arm(&mut self, source: Source) -> io::Result<()> {
        let (file, events) = match source {
            Source::Tun => (TUN, libc::POLLIN),
            Source::Socket => (SOCKET, libc::POLLIN),
            Source::Stop => (STOP, libc::POLLIN),
            Source::Room => (SOCKET, libc::POLLOUT),
        };
        if self.polls[source as usize] == Poll::Off {
            let poll = opcode::PollAdd::new(file, events as u32).build();
            // SAFETY: a poll refers to no memory.
            unsafe { self.submit_entry(poll.user_data(POLLS + source as u64)) }?;
            self.polls[source as usize] = Poll::Armed;
        }
        Ok(())
    }

    /// Waits until no removal is on the way.
    fn settle(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + REMOVAL_LIMIT;
        while self.polls.contains(&Poll::Removing) {
            if Instant::now() > deadline {
                return Err(self.breaks(libc::ETIME));
            }
            self.enter(1, Some(REMOVAL_LIMIT))?;
        }
        Ok(())
    }

    /// Ends all polls.
    fn disarm_all(&mut self) -> io::Result<()> {
        while self.polls != [Poll::Off; SOURCES] {
            for source in [Source::Tun, Source::Socket, Source::Stop, Source::Room] {
                self.disarm(source)?;
            }
            self.settle()?;
        }
        Ok(())
    }

    /// Reads the device once, with a limit, and keeps what came.
    fn read_first(&mut self) -> Result<(), RingError> {
        let mut packet = vec![0; READ_BYTES_MAX].into_boxed_slice();
        self.begin(1).map_err(RingError::Enter)?;
        let read = opcode::Read::new(TUN, packet.as_mut_ptr(), packet.len() as u32);
        let read = read.rw_flags(libc::RWF_NOWAIT).build().user_data(0);
        // SAFETY: the buffer is ours until the answer has come; without one it is never freed.
        unsafe { self.push(read) }.map_err(RingError::Enter)?;
        let deadline = Instant::now() + PROBE_LIMIT;
        while self.unanswered > 0 && Instant::now() < deadline {
            self.enter(1, Some(PROBE_LIMIT)).map_err(RingError::Enter)?;
        }
        if self.unanswered > 0 {
            std::mem::forget(packet);
            self.unanswered = 0;
            self.broken = Some(libc::EIO);
            return Err(RingError::TunSilent);
        }
        match self.answers[0].result() {
            Ok(bytes) => {
                self.first_packet = Some(packet[..bytes].into());
                Ok(())
            }
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(()),
            Err(error) => Err(RingError::TunRead(error)),
        }
    }

    /// Makes ready for a batch of `operations`.
    fn begin(&mut self, operations: usize) -> io::Result<()> {
        assert!(operations <= self.answers.len(), "a batch is as large as the ring was made for");
        self.answers[..operations].fill(UNANSWERED);
        match self.broken {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    /// Adds an operation to the batch.
    ///
    /// # Safety
    /// What `entry` points to must stay valid, and unaliased if it is written to, until
    /// [`Self::finish`] has returned. An error means that the ring is broken: then nothing that
    /// was pushed is in the kernel's hands.
    unsafe fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.submit_entry(entry) }?;
        self.unanswered += 1;
        self.queued += 1;
        Ok(())
    }

    /// Queues an entry, after submitting those before it if the queue is full.
    ///
    /// # Safety
    /// As for [`Self::push`].
    unsafe fn submit_entry(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: as the caller promises.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enter(0, None)?;
        }
        Ok(())
    }

    /// Submits the batch and waits for all its answers.
    fn finish(&mut self) -> io::Result<()> {
        while self.unanswered > 0 {
            self.enter(self.unanswered.min(self.ring.params().cq_entries() as usize), None)?;
        }
        Ok(())
    }

    /// Submits what is queued, waits for `want` completions if nothing is refused, takes them.
    fn enter(&mut self, want: usize, limit: Option<Duration>) -> io::Result<()> {
        for _ in 0..REFUSALS_MAX {
            // What is still queued was lent for a call that has returned.
            if let Some(errno) = self.broken {
                return Err(io::Error::from_raw_os_error(errno));
            }
            let entered = match limit {
                None => self.ring.submitter().submit_and_wait(want),
                Some(limit) => {
                    let limit = Timespec::from(limit);
                    let arguments = SubmitArgs::new().timespec(&limit);
                    self.ring.submitter().submit_with_args(want, &arguments)
                }
            };
            self.take_completions();
            self.queued = self.queued.min(self.ring.submission().len());
            let Err(error) = entered else { return Ok(()) };
            match error.raw_os_error().unwrap_or(libc::EIO) {
                // A limit that has passed, or a signal: the caller looks at what came.
                libc::ETIME | libc::EINTR => return Ok(()),
                // The completions had to be taken first, or memory is short for the moment.
                libc::EBUSY | libc::EAGAIN | libc::ENOMEM => {}
                errno => return Err(self.breaks(errno)),
            }
        }
        Err(self.breaks(libc::EBUSY))
    }

    /// Gives the ring up. What it was lent must not be in the kernel's hands any more; if it were,
    /// going on would let the kernel write into memory that others use by then.
    fn breaks(&mut self, errno: i32) -> io::Error {
        if self.unanswered > self.queued {
            std::process::abort();
        }
        self.unanswered = 0;
        self.broken = Some(errno);
        io::Error::from_raw_os_error(errno)
    }

    fn take_completions(&mut self) {
        for completion in self.ring.completion() {
            let (data, result) = (completion.user_data(), completion.result());
            if data < POLLS {
                self.answers[data as usize] = Answer(result);
                self.unanswered -= 1;
            } else if data < REMOVALS {
                let source = (data - POLLS) as usize;
                self.polls[source] = Poll::Off;
                // An error, other than that it was removed, is for the read to find out about.
                self.ready[source] |= result != -libc::ECANCELED;
            } else if result == -libc::EALREADY {
                let poll = &mut self.polls[(data - REMOVALS) as usize];
                if *poll == Poll::Removing {
                    *poll = Poll::Armed;
                }
            }
        }
    }
}

impl Drop for Ring {
    /// Ends the polls and gives the files back, so that closing the TUN queue removes the device
    /// now: the kernel takes a dropped ring apart some time later.
    fn drop(&mut self) {
        // A batch that a panic cut short may be queued, over memory that is gone.
        if self.broken.is_none() && self.unanswered == 0 {
            // A ring that breaks now is taken apart later, no more.
            self.disarm_all().ok();
        }
        self.ring.submitter().unregister_files().ok();
    }
}

/// What stands for an answer until the kernel gives it.
const UNANSWERED: Answer = Answer(-libc::EIO);

#[cfg(test)]
mod tests;

//! One io_uring (io_uring(7)) between a TUN queue and the tunnel socket.
//!
//! Batches of operations are lent the caller's memory only for the call: it returns when the
//! kernel has answered every one of them. All are non-blocking, so the kernel answers while it
//! takes them, and nothing is armed between calls. A ring takes the operations of a worker and no
//! others: filters of system calls don't see what a ring is asked for.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::tun_io::{Write, WriteBatch};
use super::udp::ReceiveBatch;
use super::{Answer, Slots, UNANSWERED};

/// The files of a ring, as its table of registered files holds them.
const TUN: Fixed = Fixed(0);
const SOCKET: Fixed = Fixed(1);

/// `IORING_UNREGISTER_FILES` of linux/io_uring.h: what a ring that ends is still told.
const UNREGISTER_FILES: u8 = 3;

/// Submissions in a row that the kernel may refuse for now before the ring counts as broken.
const REFUSALS_MAX: usize = 1000;

/// How long the first read of the TUN device may take; it is answered at once or not at all.
const PROBE_LIMIT: Duration = Duration::from_millis(20);

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

/// A ring, to be used by the thread that made it only.
pub struct Ring {
    ring: IoUring,
    /// Operations of the running batch that wait for their answer, submitted or not.
    unanswered: usize,
    /// What the kernel said of each operation of the last batch.
    answers: Vec<Answer>,
    /// The packet that the first read brought, until it is asked for.
    first_packet: Option<Box<[u8]>>,
    /// Once set, nothing is submitted any more.
    broken: Option<i32>,
}

/// Whether a small ring can be made, given back at once.
pub fn probe() -> Result<(), RingError> {
    set_up(2).map(drop)
}

impl Ring {
    /// Makes a ring of `entries` submissions (a power of two) for batches of at most
    /// `operations`, and reads the TUN device once as the worker will do it. `files` are a queue of
    /// the device, the socket, and further queues.
    pub fn open(
        entries: u32,
        operations: usize,
        files: &[BorrowedFd<'_>],
    ) -> Result<Self, RingError> {
        let ring = set_up(entries)?;
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&files).map_err(RingError::Register)?;
        enable(&ring).map_err(RingError::Register)?;
        let mut ring = Self {
            ring,
            unanswered: 0,
            answers: vec![UNANSWERED; operations],
            first_packet: None,
            broken: None,
        };
        ring.read_first()?;
        Ok(ring)
    }

    /// Reads packets of queue `lane` of the TUN device, 0 or the number of a further one, each with
    /// its offload header in front, into the slots of `tun`, and receives into those of `receives`,
    /// without waiting. [`Self::answer`] tells of the reads first, then of the receives.
    pub fn gather(
        &mut self,
        lane: usize,
        tun: &mut Lent<'_>,
        receives: &mut Lent<'_>,
        batch: &mut ReceiveBatch,
    ) -> io::Result<()> {
        assert!(tun.layout.hold(tun.arena, tun.count), "slots lie apart in the arena");
        self.begin(tun.count + receives.count)?;
        batch.fill(receives.arena, receives.layout, 0..receives.count);
        let held = if lane == 0 && tun.count > 0 { self.first_packet.take() } else { None };
        let file = if lane == 0 { TUN } else { Fixed(SOCKET.0 + lane as u32) };
        if let Some(packet) = &held {
            tun.arena[..packet.len()].copy_from_slice(packet);
            self.answers[0] = Answer(packet.len() as i32);
        }
        let start = tun.arena.as_mut_ptr();
        for index in usize::from(held.is_some())..tun.count {
            // SAFETY: the slot lies within the arena, as asserted.
            let slot = unsafe { start.add(index * tun.layout.stride) };
            let read = opcode::Read::new(file, slot, tun.layout.slot_bytes as u32);
            let read = read.rw_flags(libc::RWF_NOWAIT).build();
            // SAFETY: the slot is borrowed mutably until `finish` has returned.
            unsafe { self.push(read.user_data(index as u64)) }?;
        }
        for slot in 0..receives.count {
            let header = &raw mut batch.header(slot).msg_hdr;
            let receive = opcode::RecvMsg::new(SOCKET, header).flags(libc::MSG_DONTWAIT as u32);
            let index = (tun.count + slot) as u64;
            // SAFETY: `fill` has pointed the header at vectors of `batch` and a slot of the arena,
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

    /// Writes packets that lie in `arena` to the TUN device, in order; returns how many were tried,
    /// at least one. A refused barrier is the last of them. [`WriteBatch::result`] tells of each.
    pub fn write<'a>(
        &mut self,
        batch: &mut WriteBatch,
        arena: &'a [u8],
        writes: impl Iterator<Item = Write<'a>>,
    ) -> io::Result<usize> {
        batch.fill(arena, writes);
        // From the first barrier on each write is linked to the next one: if one fails, the kernel
        // cancels those behind it. A link costs 60 to 170 ns. A chain ends where a submission ends.
        let barrier = batch.barriers.iter().position(|&is_barrier| is_barrier);
        let mut count = batch.parts.len();
        if barrier.is_some() {
            count = count.min(self.ring.params().sq_entries() as usize);
        }
        self.begin(count)?;
        let mut iovecs = batch.iovecs.as_ptr();
        for (index, &parts) in batch.parts[..count].iter().enumerate() {
            let write = opcode::Writev::new(TUN, iovecs, parts as u32);
            // SAFETY: `fill` has made as many iovecs as it says that the writes have.
            iovecs = unsafe { iovecs.add(parts) };
            let write = write.rw_flags(libc::RWF_NOWAIT).build().user_data(index as u64);
            let is_linked = barrier.is_some_and(|barrier| index >= barrier) && index + 1 < count;
            let write = if is_linked { write.flags(squeue::Flags::IO_LINK) } else { write };
            // SAFETY: the iovecs point at headers and parts of `arena`, borrowed beyond this call,
            // which ends with `finish`, and writev only reads.
            unsafe { self.push(write) }?;
        }
        self.finish()?;
        let answers = &self.answers[..count];
        batch.answers[..count].copy_from_slice(answers);
        // Up to and including the first of the chain that failed.
        let tried = barrier.map_or(count, |barrier| {
            let went = answers.iter().skip(barrier).take_while(|answer| answer.0 >= 0).count();
            (barrier + went + 1).min(count)
        });
        Ok(tried)
    }

    /// Reads the device once, with a limit, and keeps what came.
    fn read_first(&mut self) -> Result<(), RingError> {
        let mut packet = vec![0; READ_BYTES_MAX].into_boxed_slice();
        self.begin(1).map_err(RingError::Enter)?;
        let read = opcode::Read::new(TUN, packet.as_mut_ptr(), packet.len() as u32);
        let read = read.rw_flags(libc::RWF_NOWAIT).build().user_data(0);
        // SAFETY: the buffer is ours until the answer has come; without one it is never freed.
        unsafe { self.push(read) }.map_err(RingError::Enter)?;
        // The limit begins when the kernel has the operation: a busy machine may take longer to
        // hand it over.
        let mut submitted: Option<Instant> = None;
        while self.unanswered > 0 && submitted.is_none_or(|at| at.elapsed() < PROBE_LIMIT) {
            self.enter(1, Some(PROBE_LIMIT)).map_err(RingError::Enter)?;
            if self.ring.submission().is_empty() {
                submitted.get_or_insert_with(Instant::now);
            }
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
        self.broken.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Adds an operation to the batch, after submitting those before it if the queue is full.
    ///
    /// # Safety
    /// What `entry` points to must stay valid, and unaliased if it is written to, until
    /// [`Self::finish`] has returned. An error means that the ring is broken: then nothing that
    /// was pushed is in the kernel's hands.
    unsafe fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: as the caller promises.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enter(0, None)?;
        }
        self.unanswered += 1;
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
        // Nothing is queued but operations of the batch.
        if self.unanswered > self.ring.submission().len() {
            std::process::abort();
        }
        self.unanswered = 0;
        self.broken = Some(errno);
        io::Error::from_raw_os_error(errno)
    }

    fn take_completions(&mut self) {
        for completion in self.ring.completion() {
            self.answers[completion.user_data() as usize] = Answer(completion.result());
            self.unanswered -= 1;
        }
    }
}

impl Drop for Ring {
    /// Gives the files back, so that closing the TUN queue removes the device now: the kernel takes
    /// a dropped ring apart some time later.
    fn drop(&mut self) {
        self.ring.submitter().unregister_files().ok();
    }
}

/// The deepest ring that the kernel has: answers held back until we ask (6.1), no second index
/// array (6.6), else without one or the other, else plain. Not yet [`enable`]d.
fn set_up(entries: u32) -> Result<IoUring, RingError> {
    let build = |deferred: bool, plain_queue: bool| {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_r_disabled();
        if deferred {
            builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
        }
        if plain_queue {
            builder.setup_no_sqarray();
        }
        builder.build(entries)
    };
    let mut ring = build(true, true);
    for deferred in [true, false] {
        if ring.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
            ring = build(deferred, false);
        }
    }
    let ring = ring.map_err(RingError::Setup)?;
    if ring.params().is_feature_ext_arg() { Ok(ring) } else { Err(RingError::NoTimeLimit) }
}

/// Limits `ring` to reads, receives and writes of its registered files, and has it begin (kernel
/// 5.10).
fn enable(ring: &IoUring) -> io::Result<()> {
    let mut allowed = [
        Restriction::register_op(UNREGISTER_FILES),
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::RecvMsg::CODE),
        Restriction::sqe_op(opcode::Writev::CODE),
        Restriction::sqe_flags_allowed(squeue::Flags::IO_LINK.bits()),
        Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
    ];
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests;

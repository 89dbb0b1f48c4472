//! A ring with every choice that is under test, over memory that is never freed. The only unsafe
//! code of the program; no measuring and no policy here.
//!
//! Whatever the kernel is lent (slots of the arena, message headers, the buffer ring) is leaked,
//! so an operation that is still armed when a ring is dropped refers to memory that nobody else
//! gets. A slot can be looked at only while no operation has it.
#![allow(
    unsafe_code,
    reason = "io_uring takes pointers; each block says whose memory it is and for how long"
)]

use std::alloc::{Layout, alloc_zeroed};
use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use io_uring::types::{BufRingEntry, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

/// Room for an offload header or the header of a multishot receive, and the longest packet.
pub(crate) const SLOT_BYTES: usize = 66 << 10;
/// Bytes of the offload header in front of a packet.
pub(crate) const VNET_BYTES: usize = 10;

const PAGE_BYTES: usize = 4096;
const CONTROL_BYTES: usize = 64;
const BUFFER_GROUP: u16 = 7;
const UDP_SEGMENT: i32 = 103;
const REGISTER_RING_FDS: u32 = 20;
const UNREGISTER_RING_FDS: u32 = 21;
const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 1 << 3;
const ENTER_REGISTERED_RING: u32 = 1 << 4;

/// User data of operations that have no slot, and of multishots, whose slots come with the answer.
const NO_SLOT: u64 = 1 << 32;
const MULTISHOT: u64 = 1 << 33;

/// Takes the process into a network namespace of its own, which ends with it.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: unshare with this flag changes no memory and no descriptor of the process.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How a ring is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    /// SINGLE_ISSUER and DEFER_TASKRUN.
    pub deferred: bool,
    /// The ring's descriptor is registered.
    pub registered_ring: bool,
    /// Files are registered.
    pub registered_files: bool,
    /// The slots are registered as fixed buffers.
    pub fixed_buffers: bool,
}

impl Setup {
    /// Everything that saves time per operation, buffers aside.
    pub(crate) const BEST: Self = Self {
        deferred: true,
        registered_ring: true,
        registered_files: true,
        fixed_buffers: false,
    };
}

/// An operation on a file and a slot, answered at once.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    Nop,
    Read,
    ReadFixed,
    Write,
    Writev,
    WriteFixed,
    Receive,
    /// A receive that the next operation waits for; if it is refused, so is that, at once.
    ReceiveLinked,
    Send,
}

/// What stays armed until something comes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Armed {
    Poll,
    PollMultishot,
    /// A read into slot 0.
    Read,
    ReadMultishot,
    ReceiveMultishot,
}

/// One answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    /// Bytes, or a negated errno.
    pub result: i32,
    /// The slot that holds them.
    pub slot: Option<usize>,
    /// An armed operation that is armed no more.
    pub ended: bool,
}

/// What an operation refers to besides its slot.
struct Message {
    header: libc::msghdr,
    iovecs: [libc::iovec; 2],
    name: libc::sockaddr_in,
    control: Control,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_BYTES]);

/// A ring, its slots and its files.
pub(crate) struct Ring {
    ring: IoUring,
    setup: Setup,
    /// What io_uring_enter is called with.
    enter_fd: RawFd,
    files: Vec<RawFd>,
    arena: *mut u8,
    slots: usize,
    messages: *mut Message,
    /// Whether an operation or the buffer ring has the slot.
    lent: Vec<bool>,
    buffers: Option<*mut BufRingEntry>,
    tail: u16,
    queued: u32,
}

fn leak<T>(count: usize) -> *mut T {
    let layout = Layout::array::<T>(count).and_then(|layout| layout.align_to(PAGE_BYTES));
    let layout = layout.expect("a few MiB");
    // SAFETY: no layout here is of size zero.
    let start = unsafe { alloc_zeroed(layout) };
    assert!(!start.is_null(), "no memory");
    start.cast()
}

impl Ring {
    /// A ring with `slots` slots over `files`, which must stay open as long as it is used.
    pub(crate) fn open(setup: Setup, files: &[RawFd], slots: usize) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(1024).setup_submit_all();
        if setup.deferred {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        let ring = builder.build(256)?;
        let arena: *mut u8 = leak(slots * SLOT_BYTES);
        for at in (0..slots * SLOT_BYTES).step_by(PAGE_BYTES) {
            // SAFETY: within the arena, which nobody else knows yet.
            unsafe { arena.add(at).write_volatile(1) };
        }
        let mut opened = Self {
            enter_fd: ring.as_raw_fd(),
            ring,
            setup,
            files: files.to_vec(),
            arena,
            slots,
            messages: leak(slots),
            lent: vec![false; slots],
            buffers: None,
            tail: 0,
            queued: 0,
        };
        if setup.registered_files {
            opened.ring.submitter().register_files(files)?;
        }
        if setup.registered_ring {
            opened.register_ring()?;
        }
        if setup.fixed_buffers {
            let fixed: Vec<_> = (0..slots).map(|slot| opened.iovec(slot, SLOT_BYTES)).collect();
            // SAFETY: the arena is never freed.
            unsafe { opened.ring.submitter().register_buffers(&fixed) }?;
        }
        Ok(opened)
    }

    fn register_ring(&mut self) -> io::Result<()> {
        // struct io_uring_rsrc_update: offset (all ones: any), reserved, the descriptor.
        let mut update = [u64::from(u32::MAX), self.enter_fd as u64];
        update_ring_fds(self.enter_fd, REGISTER_RING_FDS, &mut update)?;
        self.enter_fd = update[0] as u32 as RawFd;
        Ok(())
    }

    /// Hands the first `count` slots, a power of two, to the kernel for multishot operations.
    pub(crate) fn provide(&mut self, count: usize) -> io::Result<()> {
        let entries: *mut BufRingEntry = leak(count);
        // SAFETY: the buffer ring has `count` entries and is never freed.
        unsafe {
            self.ring.submitter().register_buf_ring_with_flags(
                entries as u64,
                count as u16,
                BUFFER_GROUP,
                0,
            )
        }?;
        self.buffers = Some(entries);
        self.slots = count;
        self.give_back(0..count);
        Ok(())
    }

    /// Gives slots to the buffer ring.
    pub(crate) fn give_back(&mut self, slots: impl Iterator<Item = usize>) {
        let Some(entries) = self.buffers else { return };
        let mask = self.slots as u16 - 1;
        for slot in slots {
            assert!(!self.lent[slot], "slot {slot} is given back once");
            self.lent[slot] = true;
            let address = self.slot_start(slot) as u64;
            // SAFETY: the index is below the number of entries; the kernel reads an entry only
            // once the tail is past it.
            let entry = unsafe { &mut *entries.add(usize::from(self.tail & mask)) };
            entry.set_addr(address);
            entry.set_len(SLOT_BYTES as u32);
            entry.set_bid(slot as u16);
            self.tail = self.tail.wrapping_add(1);
        }
        // SAFETY: `tail` lies within the first entry, is aligned, and only we write it.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(entries).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }

    /// The bytes of a slot that no operation has.
    pub(crate) fn slot(&self, slot: usize) -> &[u8] {
        assert!(!self.lent[slot], "slot {slot} is with the kernel");
        // SAFETY: within the arena; the kernel does not have it, and writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.slot_start(slot), SLOT_BYTES) }
    }

    /// As [`Self::slot`], to be written.
    pub(crate) fn slot_mut(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.lent[slot], "slot {slot} is with the kernel");
        // SAFETY: as in `slot`, and borrowed from `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.slot_start(slot), SLOT_BYTES) }
    }

    fn slot_start(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.lent.len(), "slot {slot} exists");
        // SAFETY: within the arena.
        unsafe { self.arena.add(slot * SLOT_BYTES) }
    }

    fn iovec(&self, slot: usize, bytes: usize) -> libc::iovec {
        libc::iovec { iov_base: self.slot_start(slot).cast(), iov_len: bytes }
    }

    /// The message of a slot that no operation has.
    fn message(&mut self, slot: usize) -> &mut Message {
        assert!(!self.lent[slot], "slot {slot} is with the kernel");
        // SAFETY: there are as many messages as slots; zeroes are a valid one; the kernel does
        // not have it.
        unsafe { &mut *self.messages.add(slot) }
    }

    /// Makes the first `bytes` of a slot a message to `to`, a GSO batch if `segment_bytes` is
    /// given.
    pub(crate) fn address(
        &mut self,
        slot: usize,
        to: SocketAddrV4,
        bytes: usize,
        segment_bytes: Option<u16>,
    ) {
        let iovec = self.iovec(slot, bytes);
        let message = self.message(slot);
        message.name.sin_family = libc::AF_INET as libc::sa_family_t;
        message.name.sin_port = to.port().to_be();
        message.name.sin_addr.s_addr = u32::from_ne_bytes(to.ip().octets());
        message.iovecs[0] = iovec;
        message.header.msg_name = (&raw mut message.name).cast();
        message.header.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
        message.header.msg_iov = message.iovecs.as_mut_ptr();
        message.header.msg_iovlen = 1;
        let Some(segment_bytes) = segment_bytes else { return };
        message.control.0[..8].copy_from_slice(&18_u64.to_ne_bytes());
        message.control.0[8..12].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
        message.control.0[12..16].copy_from_slice(&UDP_SEGMENT.to_ne_bytes());
        message.control.0[16..18].copy_from_slice(&segment_bytes.to_ne_bytes());
        message.header.msg_control = (&raw mut message.control).cast();
        message.header.msg_controllen = 24;
    }

    /// Queues an operation on the first `bytes` of `slot`; it is answered by the enter that
    /// submits it, as none may wait.
    pub(crate) fn queue(&mut self, operation: Operation, file: usize, slot: usize, bytes: usize) {
        let target = self.target(file);
        let start = self.slot_start(slot);
        let (data, fixed) = (slot as u64, slot as u16);
        let bytes = bytes as u32;
        let entry = match operation {
            Operation::Nop => {
                let nop = opcode::Nop::new().build().user_data(NO_SLOT);
                return self.push(&nop);
            }
            Operation::Read => {
                opcode::Read::new(target, start, bytes).rw_flags(libc::RWF_NOWAIT).build()
            }
            Operation::ReadFixed => opcode::ReadFixed::new(target, start, bytes, fixed)
                .rw_flags(libc::RWF_NOWAIT)
                .build(),
            Operation::Write => {
                opcode::Write::new(target, start, bytes).rw_flags(libc::RWF_NOWAIT).build()
            }
            Operation::WriteFixed => opcode::WriteFixed::new(target, start, bytes, fixed)
                .rw_flags(libc::RWF_NOWAIT)
                .build(),
            Operation::Writev => {
                let whole = self.iovec(slot, bytes as usize);
                let message = self.message(slot);
                message.iovecs = halves(whole);
                let iovecs = message.iovecs.as_ptr();
                opcode::Writev::new(target, iovecs, 2).rw_flags(libc::RWF_NOWAIT).build()
            }
            Operation::Receive | Operation::ReceiveLinked => {
                let header = self.receive_header(slot);
                let flags = libc::MSG_DONTWAIT as u32;
                let entry = opcode::RecvMsg::new(target, header).flags(flags).build();
                let linked = matches!(operation, Operation::ReceiveLinked);
                if linked { entry.flags(squeue::Flags::IO_LINK) } else { entry }
            }
            Operation::Send => {
                let header = &raw const self.message(slot).header;
                let flags = libc::MSG_DONTWAIT as u32;
                opcode::SendMsg::new(target, header).flags(flags).build()
            }
        };
        assert!(!self.lent[slot], "slot {slot} has one operation at a time");
        self.lent[slot] = true;
        self.push(&self.on_file(entry.user_data(data)));
    }

    fn receive_header(&mut self, slot: usize) -> *mut libc::msghdr {
        let whole = self.iovec(slot, SLOT_BYTES);
        let message = self.message(slot);
        message.iovecs[0] = whole;
        message.header.msg_name = (&raw mut message.name).cast();
        message.header.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
        message.header.msg_iov = message.iovecs.as_mut_ptr();
        message.header.msg_iovlen = 1;
        message.header.msg_control = (&raw mut message.control).cast();
        message.header.msg_controllen = CONTROL_BYTES;
        message.header.msg_flags = 0;
        &raw mut message.header
    }

    /// Queues an operation that waits for something to come.
    pub(crate) fn arm(&mut self, armed: Armed, file: usize) {
        let target = self.target(file);
        let entry = match armed {
            Armed::Poll => {
                opcode::PollAdd::new(target, libc::POLLIN as u32).build().user_data(NO_SLOT)
            }
            Armed::PollMultishot => opcode::PollAdd::new(target, libc::POLLIN as u32)
                .multi(true)
                .build()
                .user_data(NO_SLOT),
            Armed::Read => {
                assert!(!self.lent[0], "slot 0 has one operation at a time");
                self.lent[0] = true;
                let start = self.slot_start(0);
                opcode::Read::new(target, start, SLOT_BYTES as u32).build().user_data(0)
            }
            Armed::ReadMultishot => {
                opcode::ReadMulti::new(target, 0, BUFFER_GROUP).build().user_data(MULTISHOT)
            }
            Armed::ReceiveMultishot => {
                // The kernel copies what it needs of the header, and the lengths are all it needs.
                let header = self.multishot_header();
                let receive = opcode::RecvMsgMulti::new(target, header, BUFFER_GROUP);
                receive.build().user_data(MULTISHOT)
            }
        };
        self.push(&self.on_file(entry));
    }

    fn multishot_header(&mut self) -> *const libc::msghdr {
        // SAFETY: there is a message for slot 0, and multishots use no other part of messages.
        let message = unsafe { &mut *self.messages };
        message.header.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
        message.header.msg_controllen = CONTROL_BYTES;
        &raw const message.header
    }

    /// The number of a file: its place among the registered ones, or its descriptor.
    fn target(&self, file: usize) -> Fd {
        Fd(if self.setup.registered_files { file as i32 } else { self.files[file] })
    }

    /// Says which of the two the number is.
    fn on_file(&self, entry: squeue::Entry) -> squeue::Entry {
        if self.setup.registered_files { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry refers to is leaked, and `lent` keeps its slot from others.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "no batch is longer than the queue");
        self.queued += 1;
    }

    /// Submits what is queued and waits for `want` answers.
    pub(crate) fn enter(&mut self, want: u32) -> io::Result<()> {
        self.enter_raw(want, 0, std::ptr::null(), 0)
    }

    /// As [`Self::enter`], but for one answer at most `limit` long; if `min_wait_us` is not 0, as
    /// long as that for `want` answers before.
    pub(crate) fn wait(&mut self, want: u32, min_wait_us: u32, limit: Duration) -> io::Result<()> {
        let limit = Timespec::from(limit);
        let arguments = SubmitArgs::new().timespec(&limit).min_wait_usec(min_wait_us);
        let start = (&raw const arguments).cast();
        let entered = self.enter_raw(want, ENTER_EXT_ARG, start, size_of_val(&arguments));
        match entered {
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            entered => entered,
        }
    }

    fn enter_raw(
        &mut self,
        want: u32,
        flags: u32,
        argument: *const libc::c_void,
        argument_bytes: usize,
    ) -> io::Result<()> {
        let registered = if self.setup.registered_ring { ENTER_REGISTERED_RING } else { 0 };
        // SAFETY: the argument is null or lives in our caller, and the kernel reads it only.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                self.enter_fd,
                self.queued,
                want,
                flags | registered | ENTER_GETEVENTS,
                argument,
                argument_bytes,
            )
        };
        self.queued = 0;
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes all answers that are there.
    pub(crate) fn take(&mut self, mut each: impl FnMut(Done)) {
        for completion in self.ring.completion() {
            let (data, flags) = (completion.user_data(), completion.flags());
            let slot = match data {
                MULTISHOT => cqueue::buffer_select(flags).map(usize::from),
                NO_SLOT => None,
                slot => Some(slot as usize),
            };
            if let Some(slot) = slot {
                self.lent[slot] = false;
            }
            each(Done { result: completion.result(), slot, ended: !cqueue::more(flags) });
        }
    }
}

impl Drop for Ring {
    /// A thread has room for 16 registered rings, and the kernel does not clear it by itself.
    fn drop(&mut self) {
        if self.setup.registered_ring {
            let mut update = [u64::from(self.enter_fd as u32), 0];
            update_ring_fds(self.ring.as_raw_fd(), UNREGISTER_RING_FDS, &mut update).ok();
        }
    }
}

/// `update` is a struct io_uring_rsrc_update: offset, reserved, descriptor.
fn update_ring_fds(ring: RawFd, code: u32, update: &mut [u64; 2]) -> io::Result<()> {
    let start = update.as_mut_ptr();
    // SAFETY: the kernel reads and writes one io_uring_rsrc_update, which `update` is.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, code, start, 1) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The offload header and the rest.
fn halves(whole: libc::iovec) -> [libc::iovec; 2] {
    let rest = whole.iov_base.wrapping_byte_add(VNET_BYTES);
    [
        libc::iovec { iov_base: whole.iov_base, iov_len: VNET_BYTES },
        libc::iovec { iov_base: rest, iov_len: whole.iov_len - VNET_BYTES },
    ]
}

//! A ring as deep as the kernel has it, for the operations of a worker and no others: filters of
//! system calls don't see what a ring is asked for.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode};

/// `IORING_UNREGISTER_FILES` of linux/io_uring.h: what a ring that ends is still told.
const UNREGISTER_FILES: u8 = 3;

/// The deepest ring that the kernel has: answers held back until we ask (6.1), no second index
/// array (6.6), else without one or the other, else plain. Not yet [`enable`]d.
pub(super) fn set_up(entries: u32) -> io::Result<IoUring> {
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
    for (deferred, plain_queue) in [(true, true), (true, false)] {
        match build(deferred, plain_queue) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            built => return built,
        }
    }
    build(false, false)
}

/// Limits `ring` to reads, receives and writes of its registered files, and has it begin (kernel
/// 5.10).
pub(super) fn enable(ring: &IoUring) -> io::Result<()> {
    let mut allowed = [
        Restriction::register_op(UNREGISTER_FILES),
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::RecvMsg::CODE),
        Restriction::sqe_op(opcode::Writev::CODE),
        Restriction::sqe_flags_allowed(Flags::IO_LINK.bits()),
        Restriction::sqe_flags_required(Flags::FIXED_FILE.bits()),
    ];
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

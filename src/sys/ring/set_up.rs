//! A ring as deep as the kernel has it, and the operations that it must have.

use std::io;

use io_uring::{IoUring, opcode};

/// The deepest ring that the kernel has: answers held back until we ask (6.1), no second index
/// array (6.6), else without one or the other, else plain.
pub(super) fn set_up(entries: u32) -> io::Result<IoUring> {
    let build = |deferred: bool, plain_queue: bool| {
        let mut builder = IoUring::builder();
        builder.dontfork();
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

/// The first operation that `is_supported` denies.
pub(super) fn missing_operation(is_supported: impl Fn(u8) -> bool) -> Option<&'static str> {
    let needed = [
        (opcode::Read::CODE, "READ"),
        (opcode::Writev::CODE, "WRITEV"),
        (opcode::RecvMsg::CODE, "RECVMSG"),
    ];
    needed.into_iter().find(|(code, _)| !is_supported(*code)).map(|(_, name)| name)
}

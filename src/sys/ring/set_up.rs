//! A ring as deep as the kernel has it.

use std::io;

use io_uring::IoUring;

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

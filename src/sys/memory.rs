//! What the C library's allocator does with large blocks.

/// From this size on a block is mapped on its own: workers' buffers are larger, nearly all else is
/// smaller.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: std::ffi::c_int = 256 << 10;

/// Has a large block go back to the kernel whenever it is freed. Once the first was freed, glibc
/// would keep the next ones for whoever asks next (`mallopt(3)`, `M_MMAP_THRESHOLD`): megabytes
/// of a worker that has ended. Other C libraries keep none.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number of the allocator, under that one's lock, and takes no pointer.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

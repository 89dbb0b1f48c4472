//! What the C library's allocator does with memory that is freed.

/// From this size on a block is mapped on its own: workers' buffers are larger, nearly all else is
/// smaller.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: std::ffi::c_int = 256 << 10;

/// Of how many heaps threads take memory. One is enough: workers take none for packets.
#[cfg(target_env = "gnu")]
const HEAPS: std::ffi::c_int = 1;

/// Has glibc keep little of what is freed (`mallopt(3)`); other C libraries keep none. To be called
/// before there is a second thread.
///
/// A large block goes back to the kernel: once the first was freed, the next ones would stay with
/// whoever asks next, megabytes of a worker that has ended (`M_MMAP_THRESHOLD`). And threads have
/// one heap: each of those that list a store's files would leave holes in one of its own
/// (`M_ARENA_MAX`).
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets numbers of the allocator, under that one's lock, and takes no pointer.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

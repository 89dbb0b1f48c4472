//! Scratch for batches of TUN writes: each write gathers an offload header and ranges of an arena.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Answer, Range};

/// Bytes of the offload header in front of each packet (virtio_net_hdr, include/uapi/linux).
const HEADER_BYTES: usize = 10;

/// The writes of one batch as ranges of an arena, and what became of each. Holds no pointer
/// between calls that anybody follows.
pub struct WriteBatch {
    headers: Vec<[u8; HEADER_BYTES]>,
    first_ranges: Vec<usize>,
    ranges: Vec<Range>,
    /// Whether a write is a barrier: refused, it is the last that is tried.
    barriers: Vec<bool>,
    pub(super) iovecs: Vec<libc::iovec>,
    pub(super) results: Vec<Answer>,
}

impl WriteBatch {
    /// Scratch for at most `writes` writes of `ranges` ranges in all.
    #[must_use]
    pub fn new(writes: usize, ranges: usize) -> Self {
        Self {
            headers: Vec::with_capacity(writes),
            first_ranges: Vec::with_capacity(writes),
            ranges: Vec::with_capacity(ranges),
            barriers: Vec::with_capacity(writes),
            iovecs: Vec::with_capacity(writes + ranges),
            results: Vec::with_capacity(writes),
        }
    }

    /// Forgets the batch.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.first_ranges.clear();
        self.ranges.clear();
        self.barriers.clear();
        self.results.clear();
    }

    /// Adds a write: `header`, then the `ranges` of the arena that the batch is written from.
    /// While a barrier is refused, nothing behind it is written, so that what it held can be
    /// written in another form first.
    pub fn push(
        &mut self,
        header: &[u8; HEADER_BYTES],
        ranges: impl Iterator<Item = Range>,
        is_barrier: bool,
    ) {
        self.headers.push(*header);
        self.barriers.push(is_barrier);
        self.first_ranges.push(self.ranges.len());
        self.ranges.extend(ranges);
    }

    /// Writes in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.headers.len()
    }

    /// Whether the batch holds no write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Writes those from `first` on, one system call each, in order; returns how many were tried,
    /// at least one. A refused barrier is the last of them. [`Self::result`] tells of each. Ranges
    /// outside `arena` panic, as an index would.
    pub fn write_each(&mut self, tun: BorrowedFd<'_>, arena: &[u8], first: usize) -> usize {
        self.show(arena);
        for index in first..self.len() {
            let (first_part, count) = self.parts(index);
            let parts = &self.iovecs[first_part..first_part + count];
            // SAFETY: `show` has just pointed the iovecs at headers of `self` and parts of
            // `arena`, both borrowed for the call, and writev only reads through them.
            let written = unsafe {
                libc::writev(tun.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int)
            };
            self.results[index] = if written < 0 { Answer::last() } else { Answer(0) };
            if written < 0 && self.barriers[index] {
                return index + 1 - first;
            }
        }
        self.len() - first
    }

    /// The first barrier among the writes from `first` on.
    pub(super) fn first_barrier(&self, first: usize) -> Option<usize> {
        (first..self.len()).find(|&index| self.barriers[index])
    }

    /// What became of write `index`, once it was tried.
    pub fn result(&self, index: usize) -> io::Result<()> {
        self.results[index].result().map(|_| ())
    }

    /// Fills the iovecs: write `i` is those of [`Self::parts`]. The headers are complete, so no
    /// growth moves them.
    pub(super) fn show(&mut self, arena: &[u8]) {
        self.iovecs.clear();
        self.results.resize(self.headers.len(), Answer(0));
        for (index, header) in self.headers.iter().enumerate() {
            let next = self.first_ranges.get(index + 1).copied();
            let ranges = self.first_ranges[index]..next.unwrap_or(self.ranges.len());
            self.iovecs.push(iovec(header));
            self.iovecs.extend(
                self.ranges[ranges]
                    .iter()
                    .map(|range| iovec(&arena[range.offset..range.offset + range.bytes])),
            );
        }
    }

    /// First and number of the iovecs of write `index`.
    pub(super) fn parts(&self, index: usize) -> (usize, usize) {
        let next = self.first_ranges.get(index + 1).copied().unwrap_or(self.ranges.len());
        let ranges = next - self.first_ranges[index];
        // Each write before this one has a header of its own.
        (self.first_ranges[index] + index, ranges + 1)
    }
}

fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn each_write_gathers_its_header_and_its_own_ranges() {
        // A pipe in place of the device: what is written can be read again.
        let (reader, writer) = io::pipe().unwrap();
        let mut batch = WriteBatch::new(2, 3);
        let range = |offset, bytes| Range { offset, bytes };
        batch.push(b"0123456789", [range(0, 2), range(4, 1)].into_iter(), true);
        batch.push(b"abcdefghij", std::iter::once(range(2, 2)), false);
        assert_eq!(batch.write_each(writer.as_fd(), b"vwxyz", 0), 2);
        assert!(batch.result(0).is_ok() && batch.result(1).is_ok());
        drop(writer);
        let mut written = Vec::new();
        File::from(std::os::fd::OwnedFd::from(reader)).read_to_end(&mut written).unwrap();
        assert_eq!(written, b"0123456789vwzabcdefghijxy");
    }

    #[test]
    fn a_refused_write_costs_itself_and_no_other() {
        let (reader, _writer) = io::pipe().unwrap();
        let mut batch = WriteBatch::new(4, 1);
        for is_barrier in [false, false, true, false] {
            batch.push(&[0; HEADER_BYTES], std::iter::empty(), is_barrier);
        }
        // The end that can only be read.
        assert_eq!(batch.write_each(reader.as_fd(), &[], 0), 3, "a barrier was passed");
        for index in 0..3 {
            assert_eq!(batch.result(index).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
        assert_eq!(batch.write_each(reader.as_fd(), &[], 3), 1);
    }
}

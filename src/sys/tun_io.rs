//! Scratch for batches of TUN writes: each write gathers an offload header and spans of an arena.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::packet::Span;

use super::{Answer, UNANSWERED, iovec};

/// Bytes of the offload header in front of each packet (virtio_net_hdr, include/uapi/linux).
const HEADER_BYTES: usize = 10;

/// One write.
pub struct Write<'a> {
    /// The offload header.
    pub header: &'a [u8; HEADER_BYTES],
    /// Where the packet lies, in order.
    pub spans: &'a [Span],
    /// Whether nothing behind it may be written once it was refused, so that what it holds can be
    /// written in another form first.
    pub is_barrier: bool,
}

/// What the kernel is shown of a batch, and its answers. Holds no pointer between calls that
/// anybody follows.
pub struct WriteBatch {
    pub(super) iovecs: Vec<libc::iovec>,
    /// How many iovecs each write has.
    pub(super) parts: Vec<usize>,
    pub(super) barriers: Vec<bool>,
    pub(super) answers: Vec<Answer>,
}

impl WriteBatch {
    /// Scratch for at most `writes` writes of `spans` spans in all.
    pub fn new(writes: usize, spans: usize) -> Self {
        Self {
            iovecs: Vec::with_capacity(writes + spans),
            parts: Vec::with_capacity(writes),
            barriers: Vec::with_capacity(writes),
            answers: Vec::with_capacity(writes),
        }
    }

    /// Writes packets that lie in `arena`, one system call each, in order; returns how many were
    /// tried, at least one. A refused barrier is the last of them. [`Self::result`] tells of each.
    /// Spans outside `arena` panic, as an index would.
    pub fn write_each<'a>(
        &mut self,
        tun: BorrowedFd<'_>,
        arena: &'a [u8],
        writes: impl Iterator<Item = Write<'a>>,
    ) -> usize {
        self.fill(arena, writes);
        let mut iovecs = self.iovecs.as_slice();
        for (index, &count) in self.parts.iter().enumerate() {
            let (parts, rest) = iovecs.split_at(count);
            iovecs = rest;
            // SAFETY: `fill` has just pointed the iovecs at headers and parts of `arena`, both
            // borrowed beyond the call, and writev only reads through them.
            let written = unsafe {
                libc::writev(tun.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int)
            };
            self.answers[index] = if written < 0 { Answer::last() } else { Answer(0) };
            if written < 0 && self.barriers[index] {
                return index + 1;
            }
        }
        self.parts.len()
    }

    /// Writes in the last batch.
    pub fn writes(&self) -> usize {
        self.parts.len()
    }

    /// What became of write `index` of the last batch; an error unless it was tried.
    pub fn result(&self, index: usize) -> io::Result<()> {
        self.answers[index].result().map(drop)
    }

    /// Points the iovecs at `writes`.
    pub(super) fn fill<'a>(&mut self, arena: &'a [u8], writes: impl Iterator<Item = Write<'a>>) {
        self.iovecs.clear();
        self.parts.clear();
        self.barriers.clear();
        for Write { header, spans, is_barrier } in writes {
            self.iovecs.push(iovec(header));
            self.iovecs.extend(spans.iter().map(|span| iovec(&arena[span.range()])));
            self.parts.push(1 + spans.len());
            self.barriers.push(is_barrier);
        }
        self.answers.clear();
        self.answers.resize(self.parts.len(), UNANSWERED);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn each_write_gathers_its_header_and_spans() {
        // A pipe in place of the device: what is written can be read again.
        let (reader, writer) = io::pipe().unwrap();
        let mut batch = WriteBatch::new(2, 3);
        let (first, second) = ([Span::new(0, 2), Span::new(4, 1)], [Span::new(2, 2)]);
        let writes = [
            Write { header: b"0123456789", spans: &first, is_barrier: true },
            Write { header: b"abcdefghij", spans: &second, is_barrier: false },
        ];
        assert_eq!(batch.write_each(writer.as_fd(), b"vwxyz", writes.into_iter()), 2);
        assert!(batch.result(0).is_ok() && batch.result(1).is_ok());
        drop(writer);
        let mut written = Vec::new();
        File::from(std::os::fd::OwnedFd::from(reader)).read_to_end(&mut written).unwrap();
        assert_eq!(written, b"0123456789vwzabcdefghijxy");
    }

    #[test]
    fn only_a_refused_barrier_stops_the_batch() {
        let (reader, _writer) = io::pipe().unwrap();
        let mut batch = WriteBatch::new(4, 1);
        let writes = [false, false, true, false].map(|is_barrier| Write {
            header: &[0; HEADER_BYTES],
            spans: &[],
            is_barrier,
        });
        // The end that can only be read.
        let tried = batch.write_each(reader.as_fd(), &[], writes.into_iter());
        assert_eq!(tried, 3, "a barrier was passed");
        for index in 0..3 {
            assert_eq!(batch.result(index).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }
}

//! Where bytes lie in a worker's arena: the one form of a range from the parse to the iovec.

/// A range of a worker's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    /// First byte.
    pub offset: u32,
    /// Length in bytes.
    pub bytes: u32,
}

impl Span {
    /// The range `offset..offset + bytes`. Arenas are far below 4 GiB, so nothing is cut off.
    pub fn new(offset: usize, bytes: usize) -> Self {
        debug_assert!(u32::try_from(offset + bytes).is_ok(), "arenas are below 4 GiB");
        Self { offset: offset as u32, bytes: bytes as u32 }
    }

    /// The byte after the last.
    pub fn end(self) -> u32 {
        self.offset + self.bytes
    }

    /// The bytes of `arena` that lie in it; `None` if it reaches beyond.
    #[inline]
    pub fn of(self, arena: &[u8]) -> Option<&[u8]> {
        arena.get(self.range())
    }

    /// As [`Self::of`], to be edited.
    #[inline]
    pub fn of_mut(self, arena: &mut [u8]) -> Option<&mut [u8]> {
        arena.get_mut(self.range())
    }

    /// As an index range.
    pub fn range(self) -> std::ops::Range<usize> {
        self.offset as usize..self.end() as usize
    }
}

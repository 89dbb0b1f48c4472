//! Segmentation offload as pure functions over slices and ranges: split super-packets, plan
//! trains of datagrams, coalesce received packets.
//!
//! Nothing here copies a payload. Bytes stay where a read put them; plans name them as ranges
//! of the worker's arena, and the I/O layer turns ranges into iovecs. Split and coalesce are
//! inverse to each other, which the tests hold.

// What arrives decides what is read here, so nothing may be read that might not be there.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::string_slice
    )
)]

mod coalesce;
mod send_plan;
mod split;
mod vnet_hdr;

pub use coalesce::{CoalesceLimits, Coalescer, ITEMS_MAX, PACKETS_PER_ITEM, WriteItem};
pub use send_plan::{
    MESSAGES_MAX, Message, PIECES_PER_MESSAGE, SEGMENTS_MAX, SendLimits, SendPlan,
};
pub use split::{BadOffload, HEADER_BYTES_MAX, Splitter};
pub use vnet_hdr::{
    PartialChecksum, Segmentation, SegmentationKind, VNET_HEADER_BYTES, VnetHeader,
};

/// A range of a worker's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// First byte.
    pub offset: u32,
    /// Length in bytes.
    pub bytes: u32,
}

impl Piece {
    /// The range `offset..offset + bytes`. Arenas are far below 4 GiB, so nothing is cut off.
    #[must_use]
    pub fn new(offset: usize, bytes: usize) -> Self {
        debug_assert!(u32::try_from(offset + bytes).is_ok(), "arenas are below 4 GiB");
        Self { offset: offset as u32, bytes: bytes as u32 }
    }

    /// The byte after the last.
    #[must_use]
    pub fn end(self) -> u32 {
        self.offset + self.bytes
    }

    /// The bytes of `arena` that lie in it; `None` if it reaches beyond.
    #[inline]
    #[must_use]
    pub fn of(self, arena: &[u8]) -> Option<&[u8]> {
        arena.get(self.range())
    }

    /// As [`Self::of`], to be edited.
    #[inline]
    #[must_use]
    pub fn of_mut(self, arena: &mut [u8]) -> Option<&mut [u8]> {
        arena.get_mut(self.range())
    }

    /// As an index range.
    #[must_use]
    pub fn range(self) -> std::ops::Range<usize> {
        self.offset as usize..self.end() as usize
    }
}

/// A plan has no room for another entry: send or write what it holds, clear it, and push again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

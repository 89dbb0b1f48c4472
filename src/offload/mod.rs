//! Segmentation offload as pure functions over slices and spans: split super-packets, plan GSO
//! batches, coalesce received packets.
//!
//! Nothing here copies a payload. Bytes stay where a read put them; plans name them as spans of
//! the worker's arena, and the I/O layer turns spans into iovecs. Split and coalesce are
//! inverse to each other, which the tests hold.

// What arrives decides what is read here, so nothing may be read that might not be there.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::string_slice, clippy::panic))]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::unwrap_used, clippy::unreachable))]

mod coalesce;
mod merge;
mod send_plan;
mod split;
mod vnet_hdr;

pub use coalesce::{CoalesceLimits, Coalescer, ITEMS_MAX, PACKETS_PER_ITEM, WriteItem};
pub use send_plan::{MESSAGES_MAX, Message, SEGMENTS_MAX, SPANS_PER_MESSAGE, SendPlan};
pub use split::{HEADER_BYTES_MAX, Splitter};
pub use vnet_hdr::{
    PartialChecksum, Segmentation, SegmentationKind, VNET_HEADER_BYTES, VnetHeader,
};

/// A plan has no room for another entry: send or write what it holds, clear it, and push again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

//! From the network to the TUN device: have a batch of receives judged and merged, write it.

use std::io::{self, IoSlice};
use std::net::SocketAddrV4;
use std::os::fd::AsFd;

use crate::forward::{Ingress, Pass, Train};
use crate::offload::{
    CoalesceLimits, Coalescer, ITEMS_MAX, PACKETS_PER_ITEM, Piece, SegmentationKind,
    VNET_HEADER_BYTES,
};
use crate::stats::{DirectionStats, DropReason};
use crate::sys::Range;
use crate::sys::tun_io::WriteBatch;
use crate::sys::udp::SendBatch;

use super::WorkerConfig;
use super::contain::{Half, Progress};
use super::io::{Io, RECEIVE_SLOTS, Receives};
use super::refusal::{WriteRefusal, read_write};
use super::transmit::as_range;

pub(super) struct Receive {
    pub(super) receives: Receives,
    /// Packets of the last turn, those in trains included.
    pub(super) packets: usize,
    ingress: Ingress,
    writes: WriteBatch,
    reply: SendBatch,
    /// Why the TUN device is gone, once a write has found it so.
    pub(super) gone: Option<io::Error>,
    progress: Progress,
}

impl Half for Receive {
    const SOURCE: &'static str = "the network";

    fn move_batch(&mut self, io: &mut impl Io, config: &WorkerConfig, pass: &Pass<'_>) {
        while let Some(index) = self.progress.next(pass.stats) {
            let slot = usize::from(self.receives.filled[index]);
            self.take(io, config, pass, slot);
        }
        self.write_plan(io, config, pass.stats);
        self.send_replies(config);
    }

    fn progress(&mut self) -> &mut Progress {
        &mut self.progress
    }

    fn abandon(&mut self) {
        self.ingress.abandon();
    }

    fn current(&self) -> &[u8] {
        self.ingress.current().of(&self.receives.arena).unwrap_or_default()
    }
}

impl Receive {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        let offload = config.tun.offload();
        let limits = CoalesceLimits {
            tcp: offload.tso,
            udp_segments_max: if offload.uso { config.udp_segments_max } else { 1 },
        };
        Self {
            receives: Receives::new(),
            packets: 0,
            ingress: Ingress::new(limits),
            writes: WriteBatch::new(ITEMS_MAX, ITEMS_MAX * PACKETS_PER_ITEM),
            reply: SendBatch::new(1, 1),
            gone: None,
            progress: Progress::default(),
        }
    }

    /// A batch was received, and is to be moved to the last packet, whatever became of the device.
    pub(super) fn begin_turn(&mut self) {
        self.packets = 0;
        self.progress.start(self.receives.filled.len());
    }

    /// Has the datagram or train in `slot` judged.
    fn take(&mut self, io: &mut impl Io, config: &WorkerConfig, pass: &Pass<'_>, slot: usize) {
        let received = self.receives.batch.received(slot);
        if let Some(overflows) = received.overflows {
            let new = config.socket.new_overflows(overflows);
            config.stats.receive_overflows.add(u64::from(new));
        }
        let train = Train {
            bytes: Piece::new(slot * RECEIVE_SLOTS.stride, received.bytes),
            segment_bytes: received.segment_bytes.unwrap_or(received.bytes as u16),
            sender: received.source,
        };
        self.packets += received.bytes.div_ceil(usize::from(train.segment_bytes.max(1)));
        let mut taken = self.ingress.process(pass, &mut self.receives.arena, train);
        while taken.is_err() {
            self.write_plan(io, config, pass.stats);
            taken = self.ingress.resume(pass, &mut self.receives.arena);
        }
    }

    /// Carries out the writes planned so far. Those that a device gone meanwhile can't take are
    /// dropped like any other, so that every packet received has its outcome.
    fn write_plan(&mut self, io: &mut impl Io, config: &WorkerConfig, stats: &DirectionStats) {
        let Self { receives, ingress, writes, .. } = self;
        let (arena, plan) = (&mut receives.arena, ingress.coalescer_mut());
        plan.finish(arena);
        writes.clear();
        for (index, item) in plan.items().iter().enumerate() {
            let ranges = plan.pieces(index).iter().map(as_range);
            // What follows a super-packet may be of its flow, and must not overtake its packets.
            writes.push(&item.vnet_header, ranges, item.merged().is_some());
        }
        let mut first = 0;
        while first < writes.len() {
            let offered = io.write(writes, arena, first);
            let end = offered.as_ref().map_or(writes.len(), |tried| first + tried.max(&1));
            for index in first..end {
                let written = match &offered {
                    Ok(_) => writes.result(index),
                    Err(error) => Err(io::Error::from(error.kind())),
                };
                if let Some(error) = settle_write(config, stats, arena, plan, index, written) {
                    self.gone = Some(error);
                }
            }
            first = end;
        }
        plan.clear();
    }

    fn send_replies(&mut self, config: &WorkerConfig) {
        let replies = self.ingress.replies_mut();
        for (reply, bytes) in replies.iter() {
            if let Some(endpoint) = reply.endpoint {
                send_reply(config, &mut self.reply, endpoint, bytes);
            }
        }
        replies.clear();
    }
}

/// Counts the outcome of write `index`, and writes its packets one by one if it was refused as a
/// super-packet; returns the error that says that the device is gone.
fn settle_write(
    config: &WorkerConfig,
    stats: &DirectionStats,
    arena: &mut [u8],
    plan: &mut Coalescer,
    index: usize,
    written: io::Result<()>,
) -> Option<io::Error> {
    let item = plan.items()[index];
    let Err(error) = written else {
        stats.packets_forwarded.add(u64::from(item.packets));
        stats.bytes_forwarded.add(u64::from(item.packet_bytes));
        stats.writes.add(1);
        return None;
    };
    match read_write(&error, item.merged().is_some()) {
        WriteRefusal::Gone => {
            stats.drop(DropReason::TunWriteFailed, u64::from(item.packets));
            return Some(error);
        }
        WriteRefusal::Drop(reason) => stats.drop(reason, u64::from(item.packets)),
        WriteRefusal::Super => {
            config.stats.tun_fallbacks.add(1);
            write_one_by_one(config, stats, arena, plan, index);
            lower(plan, item.merged());
        }
    }
    None
}

fn send_reply(config: &WorkerConfig, batch: &mut SendBatch, endpoint: SocketAddrV4, bytes: &[u8]) {
    batch.clear();
    let whole = Range { offset: 0, bytes: bytes.len() };
    batch.push(endpoint, None, std::iter::once(whole));
    // The sender repeats what mattered, and so will the error.
    batch.send(config.socket.as_fd(), bytes, 0).ok();
}

/// Writes the packets of a refused super-packet, as they were received, each on its own.
fn write_one_by_one(
    config: &WorkerConfig,
    stats: &DirectionStats,
    arena: &mut [u8],
    plan: &Coalescer,
    index: usize,
) {
    let header = [0; VNET_HEADER_BYTES];
    plan.unmerge(arena, index, |packet| {
        match config.tun.write(&[IoSlice::new(&header), IoSlice::new(packet)]) {
            Ok(()) => {
                stats.packets_forwarded.add(1);
                stats.bytes_forwarded.add(packet.len() as u64);
                stats.writes.add(1);
            }
            Err(error) => match read_write(&error, false) {
                WriteRefusal::Drop(reason) => stats.drop(reason, 1),
                WriteRefusal::Gone | WriteRefusal::Super => {
                    stats.drop(DropReason::TunWriteFailed, 1);
                }
            },
        }
    });
}

/// Stops merging the kind that the device refused.
fn lower(plan: &mut Coalescer, merged: Option<SegmentationKind>) {
    let limits = plan.limits();
    plan.set_limits(match merged {
        Some(SegmentationKind::Tcp) => CoalesceLimits { tcp: false, ..limits },
        Some(SegmentationKind::Udp) => CoalesceLimits { udp_segments_max: 1, ..limits },
        None => limits,
    });
}

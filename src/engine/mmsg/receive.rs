//! From the network to the TUN device: receive a batch, have it judged and merged, write it.

use std::io::{self, IoSlice};
use std::net::SocketAddrV4;
use std::os::fd::AsFd;

use crate::engine::refusal::{WriteRefusal, read_write, receive_is_drained};
use crate::engine::{WorkerConfig, WorkerEnd};
use crate::forward::{Ingress, Pass, Train};
use crate::offload::{
    CoalesceLimits, Coalescer, PACKETS_PER_ITEM, Piece, SegmentationKind, VNET_HEADER_BYTES,
};
use crate::stats::{DirectionStats, DropReason};
use crate::sys::Range;
use crate::sys::udp::{ReceiveBatch, SendBatch};

use super::{BATCH_BYTES, BATCH_PACKETS, Turn};

/// A slot holds any datagram and any train (65,507 bytes).
const SLOT_BYTES: usize = 64 << 10;

/// Distance between slots: a page and a line more than a slot, so that the first bytes of all
/// slots don't fall into the same cache set.
const SLOT_STRIDE: usize = SLOT_BYTES + 4096 + 64;

/// Slots in a batch: as many single datagrams as a batch may hold.
const SLOTS: usize = BATCH_PACKETS;

/// The smallest datagram that the size estimate assumes, so that a quiet link's next batch may
/// fill every slot.
const DATAGRAM_BYTES_MIN: usize = BATCH_BYTES / SLOTS;

pub(super) struct Receive {
    arena: Box<[u8]>,
    batch: ReceiveBatch,
    ingress: Ingress,
    reply: SendBatch,
    /// The mean receive of the last batch: the guess for the next, which bounds its bytes. Where
    /// the guess is wrong once, a batch may fill all its slots, 4 MiB, and the next guess is right.
    expected_bytes: usize,
    overflows_seen: u32,
    /// Why the TUN device is gone, once a write has found it so.
    gone: Option<io::Error>,
}

impl Receive {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        let offload = config.tun.offload();
        let limits = CoalesceLimits {
            tcp: offload.tso,
            udp_segments_max: if offload.uso { config.udp_segments_max } else { 1 },
        };
        Self {
            arena: vec![0; SLOTS * SLOT_STRIDE].into_boxed_slice(),
            batch: ReceiveBatch::new(SLOTS),
            ingress: Ingress::new(limits),
            reply: SendBatch::new(1, 1),
            expected_bytes: DATAGRAM_BYTES_MIN,
            // The kernel counts for the socket's life, and socket and counters outlive a worker.
            overflows_seen: config.stats.receive_overflows.get() as u32,
            gone: None,
        }
    }

    /// Moves one batch.
    pub(super) fn turn(
        &mut self,
        config: &WorkerConfig,
        pass: &Pass<'_>,
    ) -> Result<Turn, WorkerEnd> {
        let mut drained = false;
        let mut failed = None;
        let (mut slots_used, mut bytes) = (0, 0);
        while slots_used < SLOTS && bytes < BATCH_BYTES {
            let wanted = (BATCH_BYTES - bytes).div_ceil(self.expected_bytes);
            let wanted = wanted.min(SLOTS - slots_used);
            let arena = &mut self.arena[slots_used * SLOT_STRIDE..];
            let socket = config.socket.as_fd();
            let received = self.batch.receive(socket, arena, SLOT_BYTES, SLOT_STRIDE, wanted);
            let received = match received {
                Ok(received) => received,
                Err(error) if receive_is_drained(&error) => 0,
                Err(error) => {
                    failed = Some(error);
                    0
                }
            };
            for index in 0..received {
                bytes += self.take(config, pass, slots_used + index, index);
            }
            slots_used += received;
            if received < wanted {
                drained = true;
                break;
            }
        }
        if let Some(mean_bytes) = bytes.checked_div(slots_used) {
            self.expected_bytes = mean_bytes.max(DATAGRAM_BYTES_MIN);
        }
        self.write_plan(config, pass.stats);
        self.send_replies(config);
        match (self.gone.take(), failed) {
            (Some(error), _) => Err(WorkerEnd::TunGone(error)),
            (None, Some(error)) => Err(WorkerEnd::WaitFailed(error)),
            (None, None) => Ok(Turn { bytes, drained }),
        }
    }

    /// Has the datagram or train in `slot` judged; `index` is its place in the last receive.
    fn take(&mut self, config: &WorkerConfig, pass: &Pass<'_>, slot: usize, index: usize) -> usize {
        let received = self.batch.received(index);
        if let Some(overflows) = received.overflows {
            let new = overflows.wrapping_sub(self.overflows_seen);
            config.stats.receive_overflows.add(u64::from(new));
            self.overflows_seen = overflows;
        }
        let train = Train {
            bytes: Piece::new(slot * SLOT_STRIDE, received.bytes),
            segment_bytes: received.segment_bytes.unwrap_or(received.bytes as u16),
            sender: received.source,
        };
        let mut taken = self.ingress.process(pass, &mut self.arena, train);
        while taken.is_err() {
            self.write_plan(config, pass.stats);
            taken = self.ingress.resume(pass, &mut self.arena);
        }
        received.bytes
    }

    /// Carries out the writes planned so far. Those that a device gone meanwhile can't take are
    /// dropped like any other, so that every packet received has its outcome.
    fn write_plan(&mut self, config: &WorkerConfig, stats: &DirectionStats) {
        let plan = self.ingress.coalescer_mut();
        plan.finish(&mut self.arena);
        for index in 0..plan.items().len() {
            let item = plan.items()[index];
            let Err(error) = write_item(config, &self.arena, plan, index) else {
                stats.packets_forwarded.add(u64::from(item.packets));
                stats.bytes_forwarded.add(u64::from(item.packet_bytes));
                stats.writes.add(1);
                continue;
            };
            match read_write(&error, item.merged().is_some()) {
                WriteRefusal::Gone => {
                    stats.drop(DropReason::TunWriteFailed, u64::from(item.packets));
                    self.gone = Some(error);
                }
                WriteRefusal::Drop(reason) => stats.drop(reason, u64::from(item.packets)),
                WriteRefusal::Super => {
                    config.stats.tun_fallbacks.add(1);
                    write_one_by_one(config, stats, &mut self.arena, plan, index);
                    lower(plan, item.merged());
                }
            }
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

fn send_reply(config: &WorkerConfig, batch: &mut SendBatch, endpoint: SocketAddrV4, bytes: &[u8]) {
    batch.clear();
    let whole = Range { offset: 0, bytes: bytes.len() };
    batch.push(endpoint, None, std::iter::once(whole));
    // The sender repeats what mattered, and so will the error.
    batch.send(config.socket.as_fd(), bytes, 0).ok();
}

fn write_item(
    config: &WorkerConfig,
    arena: &[u8],
    plan: &Coalescer,
    index: usize,
) -> io::Result<()> {
    let header = IoSlice::new(&plan.items()[index].vnet_header);
    let pieces = plan.pieces(index);
    if let [packet] = pieces {
        return config.tun.write(&[header, IoSlice::new(&arena[packet.range()])]);
    }
    let mut parts = [IoSlice::new(&[]); PACKETS_PER_ITEM + 1];
    parts[0] = header;
    for (part, piece) in parts[1..].iter_mut().zip(pieces) {
        *part = IoSlice::new(&arena[piece.range()]);
    }
    config.tun.write(&parts[..=pieces.len()])
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

//! What draining a full queue, or filling one, costs per packet by each means. The queues are
//! filled from the other core while the worker only waits, so the sender's speed plays no part.

use std::hint::black_box;
use std::io::{self, IoSlice};
use std::net::UdpSocket;
use std::os::fd::AsFd;

use anyhow::Result;
use weft::device::Tun;
use weft::packet::{Span, checksum};
use weft::sys::Slots;
use weft::sys::udp::{Datagrams, ReceiveBatch, SendBatch};

use super::Table;
use super::lab::{
    BATCH_BYTES, BATCH_SEGMENT_BYTES, Feeder, Fill, Lab, SMALL_PACKET_BYTES, empty, now, readv,
    thread_time,
};
use super::raw::{Armed, Operation, Ring, SLOT_BYTES, Setup, VNET_BYTES};

const TUN: usize = 0;
const SOCKET: usize = 1;
const SENDER: usize = 2;

/// In front of the payload that a multishot receive brings: its own header, a name and controls.
const MULTISHOT_HEADER_BYTES: usize = 16 + 16 + 64;

const SLOTS: Slots = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };

/// One way to move packets: moves as many as it is asked to.
struct Way<'a> {
    name: String,
    step: Box<dyn FnMut(usize) + 'a>,
}

impl<'a> Way<'a> {
    fn new(name: impl Into<String>, step: impl FnMut(usize) + 'a) -> Self {
        Self { name: name.into(), step: Box::new(step) }
    }
}

/// What the worker does with what it got: a payload is summed, as its checksum would be.
fn look(bytes: &[u8]) {
    if bytes.len() > SMALL_PACKET_BYTES * 2 {
        black_box(checksum::sum(bytes));
    } else {
        black_box(bytes.first());
    }
}

/// Runs the ways in turn, `rounds` times; the first is the one that others are compared with.
fn compare(
    table: &mut Table,
    what: &str,
    (count, rounds): (usize, usize),
    prepare: &mut dyn FnMut(),
    ways: &mut [Way<'_>],
) {
    let mut samples = vec![(Vec::new(), Vec::new()); ways.len()];
    for round in 0..rounds + rounds / 10 {
        for (way, (wall, cpu)) in ways.iter_mut().zip(&mut samples) {
            prepare();
            let (wall_before, cpu_before) = (now(), thread_time());
            (way.step)(count);
            let (cpu_after, wall_after) = (thread_time(), now());
            // The first rounds warm caches and fault pages in.
            if round >= rounds / 10 {
                wall.push((wall_after - wall_before) as f64 / count as f64);
                cpu.push((cpu_after - cpu_before) as f64 / count as f64);
            }
        }
    }
    for (way, (wall, cpu)) in ways.iter().zip(&mut samples) {
        table.cost(what, &way.name, wall, cpu);
    }
}

/// Reads one by one into the first `slots` slots in turn.
fn read_each<'a>(name: &str, tun: &'a Tun, slots: usize) -> Way<'a> {
    let mut arena = vec![1_u8; slots * SLOT_BYTES];
    let mut turn = 0;
    Way::new(name, move |count| {
        for _ in 0..count {
            let slot = &mut arena[turn * SLOT_BYTES..][..SLOT_BYTES];
            turn = (turn + 1) % slots;
            let mut header = [0; VNET_BYTES];
            let bytes = readv(tun, &mut header, slot).expect("the queue is full");
            look(&slot[..bytes]);
        }
    })
}

/// The same into the first slot, the offload header with the packet: what READ does as well.
fn read_whole<'a>(tun: &'a Tun) -> Way<'a> {
    let mut slot = vec![1_u8; SLOT_BYTES];
    Way::new("read into one slot, header and packet in one piece", move |count| {
        for _ in 0..count {
            let bytes = rustix::io::read(tun, &mut slot).expect("the queue is full");
            look(&slot[..bytes]);
        }
    })
}

/// Offers `batch` operations in one enter, until `count` are done.
fn by_batches<'a>(
    name: String,
    setup: Setup,
    lab: &Lab,
    (operation, file, batch): (Operation, usize, usize),
) -> Result<Way<'a>> {
    let mut ring = Ring::open(setup, &lab.files(), batch)?;
    let mut came = Vec::with_capacity(batch);
    Ok(Way::new(name, move |count| {
        let mut left = count;
        while left > 0 {
            let offered = batch.min(left);
            for slot in 0..offered {
                ring.queue(operation, file, slot, SLOT_BYTES);
            }
            ring.enter(offered as u32).expect("the ring can be entered");
            ring.take(|done| came.push(done));
            for done in came.drain(..) {
                assert!(done.result >= 0, "{operation:?}: {}", error_of(done.result));
                look(&ring.slot(done.slot.unwrap_or(0))[..done.result as usize]);
            }
            left -= offered;
        }
    }))
}

fn error_of(result: i32) -> io::Error {
    io::Error::from_raw_os_error(-result)
}

/// A multishot operation over `buffers` provided buffers.
fn multishot<'a>(
    name: &str,
    lab: &Lab,
    (armed, file, buffers): (Armed, usize, usize),
) -> Result<Way<'a>> {
    let mut ring = Ring::open(Setup::BEST, &lab.files(), buffers)?;
    ring.provide(buffers)?;
    let header_bytes = match armed {
        Armed::ReceiveMultishot => MULTISHOT_HEADER_BYTES,
        Armed::Poll | Armed::PollMultishot | Armed::Read | Armed::ReadMultishot => 0,
    };
    let (mut is_armed, mut came) = (false, Vec::with_capacity(buffers));
    Ok(Way::new(name, move |count| {
        let mut left = count;
        while left > 0 {
            if !is_armed {
                ring.arm(armed, file);
                is_armed = true;
            }
            ring.enter(1).expect("the ring can be entered");
            ring.take(|done| came.push(done));
            for done in &came {
                is_armed &= !done.ended;
                let Some(slot) = done.slot else {
                    let refusal = -done.result;
                    assert!(refusal == libc::ENOBUFS, "{}", error_of(done.result));
                    continue;
                };
                look(&ring.slot(slot)[header_bytes..done.result as usize]);
                left -= 1;
            }
            ring.give_back(came.drain(..).filter_map(|done| done.slot));
        }
    }))
}

pub(crate) fn tun_reads(table: &mut Table, lab: &Lab, feeder: &Feeder) -> Result<()> {
    let fixed = Setup { fixed_buffers: true, ..Setup::BEST };
    let read = |batch| (Operation::Read, TUN, batch);
    let mut ways = vec![read_each("readv, one by one", &lab.tun, 1)];
    ways.push(read_whole(&lab.tun));
    ways.push(read_each("readv, 64 slots in turn", &lab.tun, 64));
    for batch in [1, 8, 32, 64] {
        ways.push(by_batches(format!("ring, READ x {batch}"), Setup::BEST, lab, read(batch))?);
    }
    let operation = (Operation::ReadFixed, TUN, 32);
    ways.push(by_batches("ring, READ_FIXED x 32".to_owned(), fixed, lab, operation)?);
    for buffers in [64, 16] {
        let name = format!("ring, READ_MULTISHOT, {buffers} buffers");
        ways.push(multishot(&name, lab, (Armed::ReadMultishot, TUN, buffers))?);
    }
    // Multishots need it, and nothing else here reads more than there is.
    lab.set_waiting(true)?;
    let mut prepare = || feeder.fill(Fill::TunSmall, 512);
    compare(table, "TUN read, 64 B", (512, 100), &mut prepare, &mut ways);

    let what = "TUN read, 62 KiB super-packets, summed";
    let mut prepare = || feeder.fill(Fill::TunSuper, 32);
    let mut ways = vec![read_each("readv into one slot", &lab.tun, 1), read_whole(&lab.tun)];
    for slots in [3, 16, 32] {
        ways.push(read_each(&format!("readv, {slots} slots in turn"), &lab.tun, slots));
    }
    for batch in [1, 2, 3, 16] {
        ways.push(by_batches(format!("ring, READ x {batch}"), Setup::BEST, lab, read(batch))?);
    }
    let operation = (Operation::ReadFixed, TUN, 3);
    ways.push(by_batches("ring, READ_FIXED x 3".to_owned(), fixed, lab, operation)?);
    for buffers in [4, 16, 32] {
        let name = format!("ring, READ_MULTISHOT, {buffers} buffers");
        ways.push(multishot(&name, lab, (Armed::ReadMultishot, TUN, buffers))?);
    }
    compare(table, what, (32, 200), &mut prepare, &mut ways);
    lab.set_waiting(false)
}

fn receive_each(socket: &UdpSocket, slots: usize) -> Way<'_> {
    let mut arena = vec![1_u8; slots * SLOT_BYTES];
    let mut batch = ReceiveBatch::new(slots);
    Way::new(format!("recvmmsg x {slots}"), move |count| {
        let mut left = count;
        while left > 0 {
            let slots = slots.min(left);
            let came = batch
                .receive(socket.as_fd(), &mut arena, SLOTS, 0..slots)
                .expect("the queue is full");
            for slot in 0..came {
                look(&arena[slot * SLOT_BYTES..][..batch.received(slot).bytes]);
            }
            left -= came;
        }
    })
}

/// What is received, and by which numbers of slots and buffers.
struct Receives {
    what: &'static str,
    fill: Fill,
    count: usize,
    batches: &'static [usize],
    buffers: &'static [usize],
}

const RECEIVES: [Receives; 2] = [
    Receives {
        what: "UDP receive, 92 B singles",
        fill: Fill::UdpSmall,
        count: 512,
        batches: &[64, 32, 8],
        buffers: &[64, 16],
    },
    Receives {
        what: "UDP receive, GSO batches of 44 x 1472 B, summed",
        fill: Fill::UdpBatch,
        count: 32,
        batches: &[3, 1],
        buffers: &[4, 16, 32],
    },
];

pub(crate) fn receives(table: &mut Table, lab: &Lab, feeder: &Feeder) -> Result<()> {
    for Receives { what, fill, count, batches, buffers } in RECEIVES {
        let mut ways: Vec<_> =
            batches.iter().map(|&slots| receive_each(&lab.socket, slots)).collect();
        for &batch in batches {
            let operation = (Operation::Receive, SOCKET, batch);
            let name = format!("ring, RECVMSG x {batch}");
            ways.push(by_batches(name, Setup::BEST, lab, operation)?);
        }
        let linked = (Operation::ReceiveLinked, SOCKET, batches[0]);
        let name = format!("ring, RECVMSG x {}, linked", batches[0]);
        ways.push(by_batches(name, Setup::BEST, lab, linked)?);
        for &buffers in buffers {
            let name = format!("ring, RECVMSG_MULTISHOT, {buffers} buffers");
            ways.push(multishot(&name, lab, (Armed::ReceiveMultishot, SOCKET, buffers))?);
        }
        lab.set_waiting(true)?;
        let mut prepare = || feeder.fill(fill, count);
        compare(table, what, (count, 150), &mut prepare, &mut ways);
        lab.set_waiting(false)?;
    }
    Ok(())
}

/// Writes the same packet from each of `batch` slots in one enter.
fn write_batches<'a>(lab: &Lab, operation: Operation, batch: usize) -> Result<Way<'a>> {
    let fixed_buffers = matches!(operation, Operation::WriteFixed);
    let setup = Setup { fixed_buffers, ..Setup::BEST };
    let mut ring = Ring::open(setup, &lab.files(), batch)?;
    let packet = lab.packet_in();
    for slot in 0..batch {
        ring.slot_mut(slot)[..packet.len()].copy_from_slice(&packet);
    }
    Ok(Way::new(format!("ring, {operation:?} x {batch}"), move |count| {
        for _ in 0..count / batch {
            for slot in 0..batch {
                ring.queue(operation, TUN, slot, packet.len());
            }
            ring.enter(batch as u32).expect("the ring can be entered");
            ring.take(|done| assert!(done.result > 0, "{}", error_of(done.result)));
        }
    }))
}

pub(crate) fn tun_writes(table: &mut Table, lab: &Lab) -> Result<()> {
    let packet = lab.packet_in();
    let (header, rest) = packet.split_at(VNET_BYTES);
    let mut ways = vec![
        Way::new("writev, one by one", |count| {
            for _ in 0..count {
                let parts = [IoSlice::new(header), IoSlice::new(rest)];
                lab.tun.write(&parts).expect("the device is up");
            }
        }),
        Way::new("write, one by one", |count| {
            for _ in 0..count {
                rustix::io::write(&lab.tun, &packet).expect("the device is up");
            }
        }),
    ];
    for batch in [1, 8, 32, 64] {
        ways.push(write_batches(lab, Operation::Writev, batch)?);
    }
    for operation in [Operation::Write, Operation::WriteFixed] {
        ways.push(write_batches(lab, operation, 32)?);
    }
    let mut prepare = || empty(&lab.inside);
    compare(table, "TUN write, 64 B, to a socket", (512, 100), &mut prepare, &mut ways);
    Ok(())
}

/// What is sent, and by which numbers of messages.
struct Sends {
    what: &'static str,
    bytes: usize,
    segment_bytes: Option<u16>,
    count: usize,
    batches: &'static [usize],
}

const SENDS: [Sends; 2] = [
    Sends {
        what: "UDP send, 92 B singles",
        bytes: SMALL_PACKET_BYTES,
        segment_bytes: None,
        count: 512,
        batches: &[64, 8, 1],
    },
    Sends {
        what: "UDP send, GSO batches of 44 x 1472 B",
        bytes: BATCH_BYTES,
        segment_bytes: Some(BATCH_SEGMENT_BYTES),
        count: 12,
        batches: &[3, 1],
    },
];

pub(crate) fn sends(table: &mut Table, lab: &Lab) -> Result<()> {
    let to = lab.address()?;
    for Sends { what, bytes, segment_bytes, count, batches } in SENDS {
        let mut ways = Vec::new();
        for &size in batches {
            let arena = vec![7_u8; size * SLOT_BYTES];
            let mut batch = SendBatch::new(size, size);
            ways.push(Way::new(format!("sendmmsg x {size}"), move |count| {
                for _ in 0..count / size {
                    let messages = (0..size).map(|slot| Datagrams {
                        destination: to.into(),
                        segment_bytes,
                        spans: [Span::new(slot * SLOT_BYTES, bytes)],
                    });
                    let sent = batch.send(lab.sender.as_fd(), &arena, messages);
                    assert!(sent.is_ok_and(|sent| sent == size), "all are sent");
                }
            }));
        }
        for &size in batches {
            let mut ring = Ring::open(Setup::BEST, &lab.files(), size)?;
            ways.push(Way::new(format!("ring, SENDMSG x {size}"), move |count| {
                for _ in 0..count / size {
                    for slot in 0..size {
                        ring.address(slot, to, bytes, segment_bytes);
                        ring.queue(Operation::Send, SENDER, slot, bytes);
                    }
                    ring.enter(size as u32).expect("the ring can be entered");
                    ring.take(|done| assert!(done.result > 0, "{}", error_of(done.result)));
                }
            }));
        }
        let mut prepare = || empty(&lab.socket);
        compare(table, what, (count, 200), &mut prepare, &mut ways);
        empty(&lab.socket);
    }
    Ok(())
}

/// Registered ring, registered files, deferred work: on and off, for few and many operations.
pub(crate) fn setups(table: &mut Table, lab: &Lab, feeder: &Feeder) -> Result<()> {
    let best = Setup::BEST;
    let none = Setup { deferred: false, registered_ring: false, registered_files: false, ..best };
    let setups = [
        ("all on", best),
        ("registered ring off", Setup { registered_ring: false, ..best }),
        ("registered files off", Setup { registered_files: false, ..best }),
        ("DEFER_TASKRUN off", Setup { deferred: false, ..best }),
        ("all off", none),
    ];
    for batch in [1, 32] {
        let mut ways = Vec::new();
        for (name, setup) in setups {
            let name = format!("ring, READ x {batch}, {name}");
            ways.push(by_batches(name, setup, lab, (Operation::Read, TUN, batch))?);
        }
        let mut prepare = || feeder.fill(Fill::TunSmall, 512);
        compare(table, "set-up, TUN read, 64 B", (512, 100), &mut prepare, &mut ways);
        let mut ways = Vec::new();
        for (name, setup) in setups {
            let name = format!("ring, NOP x {batch}, {name}");
            ways.push(by_batches(name, setup, lab, (Operation::Nop, TUN, batch))?);
        }
        compare(table, "set-up, NOP", (512, 100), &mut || {}, &mut ways);
    }
    Ok(())
}

/// What asking an empty queue costs.
pub(crate) fn refusals(table: &mut Table, lab: &Lab) -> Result<()> {
    let mut slot = vec![0_u8; SLOT_BYTES];
    let mut ways = vec![
        Way::new("readv", |count| {
            for _ in 0..count {
                let mut header = [0; VNET_BYTES];
                assert!(readv(&lab.tun, &mut header, &mut slot).is_err(), "the device is empty");
            }
        }),
        Way::new("read", |count| {
            let mut whole = [0; 2048];
            for _ in 0..count {
                assert!(rustix::io::read(&lab.tun, &mut whole).is_err(), "the device is empty");
            }
        }),
        Way::new("recvmmsg x 64", |count| {
            let mut arena = vec![0_u8; 64 * SLOT_BYTES];
            let mut batch = ReceiveBatch::new(64);
            for _ in 0..count {
                let came = batch.receive(lab.socket.as_fd(), &mut arena, SLOTS, 0..64);
                assert!(came.is_err(), "the socket is empty");
            }
        }),
    ];
    let mut ring_ways = Vec::new();
    let kinds =
        [(Operation::Read, TUN), (Operation::Receive, SOCKET), (Operation::ReceiveLinked, SOCKET)];
    for batch in [1, 8, 32] {
        for (operation, file) in kinds {
            let mut ring = Ring::open(Setup::BEST, &lab.files(), batch)?;
            let name = format!("ring, {operation:?} x {batch}");
            ring_ways.push(Way::new(name, move |count| {
                for _ in 0..count.div_ceil(batch) {
                    for slot in 0..batch {
                        ring.queue(operation, file, slot, SLOT_BYTES);
                    }
                    ring.enter(batch as u32).expect("the ring can be entered");
                    let refused = [-libc::EAGAIN, -libc::ECANCELED];
                    ring.take(|done| assert!(refused.contains(&done.result), "it is empty"));
                }
            }));
        }
    }
    ways.append(&mut ring_ways);
    compare(table, "refused for want of packets, per operation", (512, 100), &mut || {}, &mut ways);
    Ok(())
}

/// What a turn costs that finds one packet in the device and nothing in the socket.
pub(crate) fn turns(table: &mut Table, lab: &Lab, feeder: &Feeder) -> Result<()> {
    let mut arena = vec![0_u8; 64 * SLOT_BYTES];
    let mut batch = ReceiveBatch::new(64);
    let mut ways = vec![Way::new("readv until refused, then recvmmsg x 64", move |_| {
        let mut header = [0; VNET_BYTES];
        while readv(&lab.tun, &mut header, &mut arena[..SLOT_BYTES]).is_ok() {}
        let came = batch.receive(lab.socket.as_fd(), &mut arena, SLOTS, 0..64);
        assert!(came.is_err(), "the socket is empty");
    })];
    for each in [1, 2, 4, 8, 32] {
        let mut ring = Ring::open(Setup::BEST, &lab.files(), each * 2)?;
        ways.push(Way::new(format!("ring, READ x {each} and RECVMSG x {each}"), move |_| {
            for slot in 0..each {
                ring.queue(Operation::Read, TUN, slot, SLOT_BYTES);
            }
            for slot in each..each * 2 {
                ring.queue(Operation::Receive, SOCKET, slot, SLOT_BYTES);
            }
            ring.enter(each as u32 * 2).expect("the ring can be entered");
            let mut came = 0;
            ring.take(|done| came += usize::from(done.result > 0));
            assert_eq!(came, 1, "there was one packet");
        }));
    }
    let mut ring = Ring::open(Setup::BEST, &lab.files(), 16)?;
    ring.provide(16)?;
    lab.set_waiting(true)?;
    ring.arm(Armed::ReadMultishot, TUN);
    ring.arm(Armed::ReceiveMultishot, SOCKET);
    ring.enter(0)?;
    ways.push(Way::new("ring, READ_MULTISHOT and RECVMSG_MULTISHOT stay armed", move |_| {
        let mut came = None;
        while came.is_none() {
            ring.enter(1).expect("the ring can be entered");
            ring.take(|done| came = done.slot);
        }
        ring.give_back(came.into_iter());
    }));
    // The others must not wait, and the armed ones are armed by now.
    lab.set_waiting(false)?;
    let mut prepare = || feeder.fill(Fill::TunSmall, 1);
    compare(table, "a turn that finds one packet", (1, 400), &mut prepare, &mut ways);
    Ok(())
}

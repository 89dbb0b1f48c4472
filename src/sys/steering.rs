//! Which queue of a TUN device a packet goes to: a small eBPF program (bpf(2), TUNSETSTEERINGEBPF
//! in drivers/net/tun.c).

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::bpf::{self, ProgramKind};
use super::check;

/// One instruction as the kernel takes it (`struct bpf_insn`): `registers` has the destination in
/// its low and the source in its high half.
const fn instruction(code: u8, registers: u8, jump: i16, value: i32) -> u64 {
    let [jump_first, jump_last] = jump.to_ne_bytes();
    let [a, b, c, d] = value.to_ne_bytes();
    u64::from_ne_bytes([code, registers, jump_first, jump_last, a, b, c, d])
}

/// Loads into register 0 from the packet, network byte order taken care of. Beyond the packet's
/// end the program ends with 0.
const LOAD_WORD: u8 = 0x20;
const LOAD_HALF: u8 = 0x28;
const LOAD_BYTE: u8 = 0x30;
/// The same, at the offset in the source register.
const LOAD_WORD_AT: u8 = 0x40;
const MOVE: u8 = 0xbf;
const XOR: u8 = 0xaf;
const AND_VALUE: u8 = 0x57;
const MULTIPLY_VALUE: u8 = 0x24;
const SHIFT_LEFT_VALUE: u8 = 0x64;
const SHIFT_RIGHT_VALUE: u8 = 0x74;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const EXIT: u8 = 0x95;

/// 2^32 over the golden ratio, odd: multiplied by it, each bit of the lower half reaches the upper
/// one.
const MIX: i32 = 0x9e37_79b1_u32 as i32;

/// TCP's protocol number.
const TCP: i32 = 6;

/// The fragment word without its reserved bit, and what it is for a packet that is no fragment and
/// must not become one.
const FRAGMENT_MASK: i32 = 0x7fff;
const DONT_FRAGMENT: i32 = 0x4000;

/// A hash of an IPv4 packet's addresses and, of a TCP packet that must not be fragmented, its
/// ports. Later fragments have no ports, and other protocols mix datagrams that are fragmented with
/// ones that fit: by ports they would part, and overtake each other. TCP sets Don't Fragment on all
/// packets of a connection or on none. Register 6 must hold the packet for loads; register 7
/// gathers the hash, register 8 has the header's length. The kernel takes the result modulo the
/// number of queues.
const BY_FLOW: [u64; 25] = [
    instruction(MOVE, 0x16, 0, 0),
    instruction(LOAD_WORD, 0, 0, 12),
    instruction(MOVE, 0x07, 0, 0),
    instruction(MULTIPLY_VALUE, 0x07, 0, MIX),
    instruction(LOAD_WORD, 0, 0, 16),
    instruction(XOR, 0x07, 0, 0),
    instruction(LOAD_BYTE, 0, 0, 9),
    instruction(JUMP_UNLESS_EQUAL, 0, 10, TCP),
    instruction(LOAD_HALF, 0, 0, 6),
    instruction(AND_VALUE, 0, 0, FRAGMENT_MASK),
    instruction(JUMP_UNLESS_EQUAL, 0, 7, DONT_FRAGMENT),
    instruction(LOAD_BYTE, 0, 0, 0),
    instruction(AND_VALUE, 0, 0, 0x0f),
    instruction(SHIFT_LEFT_VALUE, 0, 0, 2),
    instruction(MOVE, 0x08, 0, 0),
    instruction(LOAD_WORD_AT, 0x80, 0, 0),
    instruction(MULTIPLY_VALUE, 0x07, 0, MIX),
    instruction(XOR, 0x07, 0, 0),
    // Where the two jumps past the ports end. A product's bits know nothing of the factor's higher
    // ones, where the source port is: fold these down first.
    instruction(MOVE, 0x70, 0, 0),
    instruction(SHIFT_RIGHT_VALUE, 0x00, 0, 16),
    instruction(XOR, 0x07, 0, 0),
    instruction(MULTIPLY_VALUE, 0x07, 0, MIX),
    instruction(SHIFT_RIGHT_VALUE, 0x07, 0, 16),
    instruction(MOVE, 0x70, 0, 0),
    instruction(EXIT, 0, 0, 0),
];

/// Has the device choose a packet's queue by its flow alone, instead of by where packets of the
/// flow's other direction were written. EPERM without CAP_BPF (CAP_SYS_ADMIN before kernel 5.8)
/// where programs are for the privileged only.
pub fn steer_by_flow(tun: BorrowedFd<'_>) -> io::Result<()> {
    let program = bpf::load(ProgramKind::Filter, &BY_FLOW, &[], &mut [])?;
    let descriptor: c_int = program.as_raw_fd();
    // SAFETY: TUNSETSTEERINGEBPF reads one int, which outlives the call; the device takes its own
    // reference to the program.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETSTEERINGEBPF, &raw const descriptor) })
        .map(drop)
}

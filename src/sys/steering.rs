//! Which queue of a TUN device a packet goes to: small eBPF programs (`steering.c` in the folder of
//! this name, where clang's instructions of it are as well; bpf(2), TUNSETSTEERINGEBPF in
//! drivers/net/tun.c).

use std::ffi::c_int;
use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use super::bpf::{self, Map, MapShape, ProgramKind};
use super::check;

/// The instructions of `weft_flows`.
pub const FLOWS: &[u8] = include_bytes!("steering/weft_flows.bin");
/// Those of `weft_lanes`; the constant of a map reference is the map's number.
pub const BY_SENDER: &[u8] = include_bytes!("steering/weft_lanes.bin");

/// Queues of each worker: the prompt lane, and three bulk lanes. More lanes part more senders, and
/// cost 50 ns each time a worker sleeps.
pub const LANES: NonZeroU16 = NonZeroU16::new(4).expect("not zero");

/// `due_map` in `steering.c`: half a megabyte.
pub const DUE: MapShape = MapShape::array(8, 1 << 16, 0);

/// A program that chooses queues.
#[derive(Debug)]
pub struct Steering(OwnedFd);

impl Steering {
    /// By sender and flow, [`LANES`] queues for each worker. EPERM without CAP_BPF; EINVAL before
    /// kernel 5.8.
    pub fn by_sender() -> io::Result<Self> {
        let due = Map::create(DUE)?;
        bpf::load(ProgramKind::Filter, BY_SENDER, &[&due], &mut []).map(Self)
    }

    /// By flow, one queue for each worker. EPERM without CAP_BPF (CAP_SYS_ADMIN before kernel 5.8)
    /// where programs are for the privileged only.
    pub fn by_flow() -> io::Result<Self> {
        bpf::load(ProgramKind::Filter, FLOWS, &[], &mut []).map(Self)
    }

    /// Has the device of queue `tun` choose so.
    pub(crate) fn attach(&self, tun: BorrowedFd<'_>) -> io::Result<()> {
        let program: c_int = self.0.as_raw_fd();
        // SAFETY: TUNSETSTEERINGEBPF reads one int, which outlives the call; the device takes its
        // own reference to the program.
        check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETSTEERINGEBPF, &raw const program) })
            .map(drop)
    }
}

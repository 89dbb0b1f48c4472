//! eBPF maps, programs and attachments: bpf(2) (include/uapi/linux/bpf.h, kernel/bpf/syscall.c).

use std::ffi::{CStr, c_int, c_long};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use super::check;

const MAP_CREATE: c_int = 0;
const MAP_UPDATE: c_int = 2;
const MAP_DELETE: c_int = 3;
const PROGRAM_LOAD: c_int = 5;
const INFO: c_int = 15;
const LINK_CREATE: c_int = 28;

/// What a program is for.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum ProgramKind {
    /// Computes a number from a packet. (`BPF_PROG_TYPE_SOCKET_FILTER`)
    Filter = 1,
    /// Sees the packets of a device. (`BPF_PROG_TYPE_SCHED_CLS`)
    Classifier = 3,
}

/// Programs that call no function which the kernel keeps for GPL programs.
const LICENSE: &CStr = c"Apache-2.0";

/// A 64-bit constant takes two instructions: the code of the first one, and what its source
/// register says of the constant: the number of a map's descriptor (BPF_PSEUDO_MAP_FD).
const LOAD_CONSTANT: u8 = 0x18;
const MAP_DESCRIPTOR: u8 = 1;

/// How a map finds its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// By a hash of the key.
    Hash = 1,
    /// By their number, a u32.
    Array = 2,
}

/// What a map is made of: the leading members of `union bpf_attr` for BPF_MAP_CREATE.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MapShape {
    /// How values are found.
    pub kind: MapKind,
    /// Bytes of a key.
    pub key_bytes: u32,
    /// Bytes of a value.
    pub value_bytes: u32,
    /// Most values that it holds.
    pub entries: u32,
    /// `BPF_F_*`.
    pub flags: u32,
}

impl MapShape {
    /// An array of `entries` values.
    pub const fn array(value_bytes: usize, entries: u32, flags: u32) -> Self {
        let value_bytes = value_bytes as u32;
        Self { kind: MapKind::Array, key_bytes: 4, value_bytes, entries, flags }
    }
}

/// `BPF_F_NO_PREALLOC`: memory for what the map holds, not for what it may hold.
pub const NO_PREALLOCATION: u32 = 1;
/// `BPF_F_MMAPABLE`: the map's memory may be seen by [`Map::memory`].
pub const MAPPABLE: u32 = 1 << 10;

/// A map in the kernel.
#[derive(Debug)]
pub struct Map {
    descriptor: OwnedFd,
    shape: MapShape,
}

/// Where on a device a program sees packets. (`BPF_TCX_INGRESS`, `BPF_TCX_EGRESS`)
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum Hook {
    /// As they arrive, before the IP stack.
    Ingress = 46,
    /// As they leave, after it.
    Egress = 47,
}

/// The leading members of `union bpf_attr` for BPF_MAP_UPDATE_ELEM and BPF_MAP_DELETE_ELEM; those
/// left out count as zero, here and below.
#[repr(C)]
struct Element {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// For BPF_PROG_LOAD.
#[repr(C)]
struct LoadProgram {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
}

/// For BPF_OBJ_GET_INFO_BY_FD.
#[repr(C)]
struct GetInfo {
    descriptor: u32,
    info_bytes: u32,
    info: u64,
}

/// `struct bpf_link_info` of a link to a device by TCX, and where in it the device is.
type LinkInfo = [u32; 6];
const DEVICE_AT: usize = 4;

/// Calls bpf(2).
///
/// # Safety
/// `A` must be what the kernel takes for `command`, and the pointers in it must lead to as much
/// memory as it reads or writes there, for as long as the call lasts.
unsafe fn bpf<A>(command: c_int, attributes: &mut A) -> io::Result<c_int> {
    let attributes: *mut A = attributes;
    // SAFETY: the kernel reads and writes at most `size_of::<A>()` bytes of `attributes`, a live
    // structure; the rest is the caller's promise.
    let result: c_long =
        unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<A>()) };
    check(result as c_int).map(|number| number as c_int)
}

/// Owns the descriptor that a call of bpf(2) has made.
fn own(descriptor: c_int) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

fn number(descriptor: BorrowedFd<'_>) -> u32 {
    // Descriptors are not negative.
    descriptor.as_raw_fd() as u32
}

impl Map {
    /// Makes a map.
    pub fn create(shape: MapShape) -> io::Result<Self> {
        let mut attributes = shape;
        // SAFETY: BPF_MAP_CREATE takes numbers only.
        let descriptor = own(unsafe { bpf(MAP_CREATE, &mut attributes) }?);
        Ok(Self { descriptor, shape })
    }

    /// Puts `value` at `key`, in place of another.
    pub fn update(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        assert_eq!(value.len(), self.shape.value_bytes as usize, "a value has the map's length");
        // The kernel only reads the value.
        let mut attributes = self.element(key, value.as_ptr().cast_mut());
        // SAFETY: key and value are as long as the map's, which is asserted here and in `element`.
        unsafe { bpf(MAP_UPDATE, &mut attributes) }.map(drop)
    }

    /// Removes what is at `key`; ENOENT if there is nothing.
    pub fn delete(&self, key: &[u8]) -> io::Result<()> {
        let mut attributes = self.element(key, std::ptr::null_mut());
        // SAFETY: the key is as long as the map's, which `element` asserts.
        unsafe { bpf(MAP_DELETE, &mut attributes) }.map(drop)
    }

    /// The values of an array, as programs see them.
    pub fn memory(&self) -> io::Result<Memory> {
        let bytes = self.shape.value_bytes as usize * self.shape.entries as usize;
        if self.shape.kind != MapKind::Array || !self.shape.value_bytes.is_multiple_of(8) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: a new mapping at a place that the kernel chooses touches no memory of ours.
        let place = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let map = self.descriptor.as_raw_fd();
            libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, map, 0)
        };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory { place: place.cast(), bytes })
    }

    fn element(&self, key: &[u8], value: *mut u8) -> Element {
        assert_eq!(key.len(), self.shape.key_bytes as usize, "a key has the map's length");
        let map = number(self.descriptor.as_fd());
        Element { map, padding: 0, key: key.as_ptr() as u64, value: value as u64, flags: 0 }
    }
}

/// The memory of an array, which the kernel's programs write meanwhile.
#[derive(Debug)]
pub struct Memory {
    place: *const AtomicU64,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and all that others get of it are atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// All of it, in words of the processor's byte order.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `bytes` long, aligned to a page, readable and writable, and lives
        // as long as `self`; whoever else writes there does so by atomic operations on whole words.
        unsafe { std::slice::from_raw_parts(self.place, self.bytes / size_of::<AtomicU64>()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `memory` made, of that length, and no reference into it
        // outlives `self`. Unmapping a whole mapping cannot fail.
        unsafe { libc::munmap(self.place.cast_mut().cast(), self.bytes) };
    }
}

/// Loads a program. In its `instructions` (`struct bpf_insn`) the constant of each
/// map reference is the map's number among `maps`. What the verifier says goes to `log`, if that
/// has room, up to the first zero. EPERM without CAP_BPF (CAP_SYS_ADMIN before kernel 5.8).
pub fn load(
    kind: ProgramKind,
    instructions: &[u8],
    maps: &[&Map],
    log: &mut [u8],
) -> io::Result<OwnedFd> {
    let mut instructions = instructions.as_chunks::<8>().0.to_vec();
    for [code, registers, _, _, constant @ ..] in &mut instructions {
        if *code == LOAD_CONSTANT && *registers >> 4 == MAP_DESCRIPTOR {
            let map = maps.get(u32::from_ne_bytes(*constant) as usize);
            let map = map.ok_or(io::ErrorKind::InvalidInput)?.descriptor.as_raw_fd();
            *constant = map.to_ne_bytes();
        }
    }
    let mut attributes = LoadProgram {
        kind: kind as u32,
        instruction_count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_bytes: log.len() as u32,
        log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
    };
    // SAFETY: BPF_PROG_LOAD reads the instructions and a constant that ends with a zero, and writes
    // at most `log_bytes` to the log; all three outlive the call.
    unsafe { bpf(PROGRAM_LOAD, &mut attributes) }.map(own)
}

/// Has `program` see the packets of the device numbered `device`, after programs that are there
/// already, until the descriptor returned is closed. Needs TCX (kernel 6.6); EINVAL without.
pub fn attach(program: BorrowedFd<'_>, device: u32, hook: Hook) -> io::Result<OwnedFd> {
    // The member `link_create`, up to its flags.
    let mut attributes = [number(program), device, hook as u32, 0];
    // SAFETY: BPF_LINK_CREATE takes numbers only.
    unsafe { bpf(LINK_CREATE, &mut attributes) }.map(own)
}

/// The number of the device that `link`, which [`attach`] gave, is attached to; 0 if somebody has
/// detached it, or if the device is gone.
pub fn attached_to(link: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = LinkInfo::default();
    let mut attributes = GetInfo {
        descriptor: number(link),
        info_bytes: size_of::<LinkInfo>() as u32,
        info: (&raw mut info) as u64,
    };
    // SAFETY: BPF_OBJ_GET_INFO_BY_FD writes at most `info_bytes` to `info`, which outlives the
    // call, and for which any bytes are valid.
    unsafe { bpf(INFO, &mut attributes) }?;
    Ok(info[DEVICE_AT])
}

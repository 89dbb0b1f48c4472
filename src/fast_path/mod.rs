//! The kernel's way for packets of the udp backend: programs that encapsulate and deliver where the
//! packets are (`tunnel.c`), what they go by, and what they count. Whether they may run, and for
//! whom, is `src/backend/udp/kernel_plane.rs`.
//!
//! Users need no compiler: the instructions are in this folder, as clang 14 made them from
//! `tunnel.c`, and the suite compares. They are embedded as they go to the kernel, not as the
//! compiler's ELF file, so nothing here parses one. `WEFT_WRITE_INSTRUCTIONS=1 cargo test
//! instructions` writes them.

mod layout;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use derive_more::AddAssign;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::route::Prefix;
use crate::sys::bpf::{self, Hook, Map, Memory, ProgramKind};

use self::layout::{COUNT_WORDS, key_of, key_of_v6};

pub use self::layout::{LENGTHS_MAX, MAPS, PEERS_MAX, PeerEntry, Settings};

/// The instructions of `weft_out`; the constant of a map reference is the map's number.
pub const OUT: &[u8] = include_bytes!("weft_out.bin");
/// Those of `weft_in`.
pub const IN: &[u8] = include_bytes!("weft_in.bin");
/// Those of `weft_gro`.
pub const GRO: &[u8] = include_bytes!("weft_gro.bin");

/// Room for what the verifier says of a program that it refuses; its reason is at the end, and
/// without room for all of it the kernel gives nothing of use.
const VERIFIER_LOG_BYTES: usize = 4 << 20;

/// The only key of the settings.
const ONLY: [u8; 4] = [0; 4];

/// Why the programs can't run.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refused {what}")]
pub struct FastPathError {
    what: String,
    source: io::Error,
}

/// The maps, in the order of [`MAPS`].
#[derive(Debug)]
pub struct Maps {
    settings: Map,
    peers: Map,
    counts: Map,
    streams: Map,
    peers_v6: Map,
}

/// The loaded programs with their maps.
#[derive(Debug)]
pub struct FastPath {
    /// The maps.
    pub maps: Maps,
    /// What the programs count.
    pub counts: Arc<Counts>,
    /// In the order of [`Program`].
    programs: [OwnedFd; 3],
}

/// One of the programs.
#[derive(Debug, Clone, Copy)]
pub enum Program {
    /// For what leaves by the TUN device.
    Out,
    /// For what arrives by the device beneath the tunnel.
    In,
    /// For what comes, merged, out of the second end of the veth pair.
    Gro,
}

/// While it lives, a program sees the packets of a device.
#[derive(Debug)]
pub struct Link {
    descriptor: OwnedFd,
    device: u32,
}

/// What the programs counted, for every peer.
#[derive(Debug)]
pub struct Counts(Memory);

/// What the programs counted for one peer. Super-packets count as the packets that they stand for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign)]
pub struct PeerCounts {
    /// Packets sent to it.
    pub packets_sent: u64,
    /// Their bytes, without what the tunnel adds.
    pub bytes_sent: u64,
    /// Those among them that say that the path to it is in use.
    pub long_packets_sent: u64,
    /// Packets delivered from it.
    pub packets_received: u64,
    /// Their bytes, without what the tunnel adds.
    pub bytes_received: u64,
    /// Those among them that are long, or came with others in one long buffer.
    pub long_packets_received: u64,
    /// The buffers that these came in: fewer than packets if the device delivers super-packets.
    pub buffers_received: u64,
}

impl Maps {
    /// Makes empty maps: without settings the programs take no packet.
    pub fn create() -> io::Result<Self> {
        let [settings, peers, counts, streams, peers_v6] = MAPS.map(Map::create);
        Ok(Self {
            settings: settings?,
            peers: peers?,
            counts: counts?,
            streams: streams?,
            peers_v6: peers_v6?,
        })
    }

    /// Loads a program that refers to these maps.
    pub fn load(&self, name: &'static str, instructions: &[u8]) -> Result<OwnedFd, FastPathError> {
        let Self { settings, peers, counts, streams, peers_v6 } = self;
        let maps = [settings, peers, counts, streams, peers_v6];
        let load = |log: &mut [u8]| bpf::load(ProgramKind::Classifier, instructions, &maps, log);
        load(&mut []).or_else(|source| {
            // Once more, to hear the reason.
            let mut log = vec![0; VERIFIER_LOG_BYTES];
            load(&mut log).map_err(|_same| {
                let what = format!("the program {name}: {}", last_word(&log));
                FastPathError { what, source }
            })
        })
    }

    /// Publishes what the programs go by.
    pub fn publish(&self, settings: &Settings) -> io::Result<()> {
        self.settings.update(&ONLY, &settings.to_bytes())
    }

    /// Puts in the peer that has leased `subnet`.
    pub fn set_peer(&self, subnet: Prefix, entry: PeerEntry) -> io::Result<()> {
        self.peers.update(&key_of(subnet), &entry.to_bytes(subnet.network()))
    }

    /// Puts in the peer that has leased `subnet`, in the other family.
    pub fn set_peer_v6(&self, subnet: Prefix<Ipv6Addr>, entry: PeerEntry) -> io::Result<()> {
        self.peers_v6.update(&key_of_v6(subnet), &entry.to_bytes(Ipv4Addr::UNSPECIFIED))
    }

    /// Takes out the peer that had leased `subnet`.
    pub fn remove_peer(&self, subnet: Prefix) -> io::Result<()> {
        self.peers.delete(&key_of(subnet))
    }

    /// The same, in the other family.
    pub fn remove_peer_v6(&self, subnet: Prefix<Ipv6Addr>) -> io::Result<()> {
        self.peers_v6.delete(&key_of_v6(subnet))
    }

    /// What the programs count.
    pub fn counts(&self) -> io::Result<Counts> {
        Ok(Counts(self.counts.memory()?))
    }
}

impl FastPath {
    /// Makes the maps and loads the programs, which take no packet yet.
    pub fn load() -> Result<Self, FastPathError> {
        let maps = Maps::create().or_else(|error| {
            // Before kernel 5.11 maps count as locked memory.
            let unlimited = Rlimit { current: None, maximum: None };
            setrlimit(Resource::Memlock, unlimited).map_or(Err(error), |()| Maps::create())
        });
        let refused = |source| FastPathError { what: "a map".to_owned(), source };
        let maps = maps.map_err(refused)?;
        let counts = Arc::new(maps.counts().map_err(refused)?);
        let load = |program: Program| maps.load(program.name(), program.properties().1);
        let programs = [load(Program::Out)?, load(Program::In)?, load(Program::Gro)?];
        Ok(Self { maps, counts, programs })
    }

    /// A loaded program.
    pub fn descriptor(&self, program: Program) -> BorrowedFd<'_> {
        self.programs[program as usize].as_fd()
    }

    /// Has a program see the packets of the device numbered `device`. Nothing if the kernel has no
    /// such link, before 6.6.
    pub fn link(&self, program: Program, device: u32) -> Result<Option<Link>, FastPathError> {
        match bpf::attach(self.descriptor(program), device, program.properties().2) {
            Ok(descriptor) => Ok(Some(Link { descriptor, device })),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
            Err(source) => {
                let what = format!("to attach a program to device {device}");
                Err(FastPathError { what, source })
            }
        }
    }
}

impl Program {
    /// Its name in `tunnel.c`, its instructions, and where it sees packets.
    const fn properties(self) -> (&'static str, &'static [u8], Hook) {
        match self {
            Self::Out => ("weft_out", OUT, Hook::Egress),
            Self::In => ("weft_in", IN, Hook::Ingress),
            Self::Gro => ("weft_gro", GRO, Hook::Ingress),
        }
    }

    /// Its name in `tunnel.c`.
    pub fn name(self) -> &'static str {
        self.properties().0
    }
}

impl Link {
    /// Whether nobody has detached it.
    pub fn is_attached(&self) -> bool {
        bpf::attached_to(self.descriptor.as_fd()).is_ok_and(|device| device == self.device)
    }
}

impl Counts {
    /// What was counted for the peer whose entry has this number.
    pub fn of(&self, number: u32) -> PeerCounts {
        self.each(number, |word| word.load(Ordering::Relaxed))
    }

    /// The same, and sets it to zero.
    pub fn take(&self, number: u32) -> PeerCounts {
        self.each(number, |word| word.swap(0, Ordering::Relaxed))
    }

    fn each(&self, number: u32, read: fn(&AtomicU64) -> u64) -> PeerCounts {
        let start = number as usize * COUNT_WORDS;
        let words = self.0.words().get(start..start + COUNT_WORDS).unwrap_or_default();
        let word = |at: usize| words.get(at).map_or(0, read);
        PeerCounts {
            packets_sent: word(0),
            bytes_sent: word(1),
            long_packets_sent: word(2),
            packets_received: word(8),
            bytes_received: word(9),
            long_packets_received: word(10),
            buffers_received: word(11),
        }
    }
}

/// The last line but the verifier's own statistics, which has the reason.
fn last_word(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    let text = String::from_utf8_lossy(&log[..end]);
    let mut lines = text.lines().rev().filter(|line| !line.starts_with("processed "));
    lines.next().unwrap_or("it gives no reason").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verifiers_reason_is_its_last_line() {
        let log = b"0: (bf) r6 = r1\nR5 !read_ok\n\
            processed 3 insns (limit 1000000) max_states_per_insn 0\n\0\0\0";
        assert_eq!(last_word(log), "R5 !read_ok");
        assert!(!last_word(&[0; 4]).is_empty(), "an operator is told nothing");
    }
}

//! The kernel's programs, compiled from their sources.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::path::Path;
use std::process::Command;

use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget};

/// `struct map` in `tunnel.c`: kind, bytes of a key, bytes of a value, entries, flags.
pub(crate) type MapWords = [u32; 5];

/// What clang made of `tunnel.c`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Compiled {
    pub(crate) out: Vec<u8>,
    pub(crate) inward: Vec<u8>,
    pub(crate) gro: Vec<u8>,
    /// In the order in which the source has them, which is that of their numbers.
    pub(crate) maps: Vec<MapWords>,
}

/// Compiles the programs for devices whose frames have `link_bytes` before the IPv4 header.
pub(crate) fn compile(link_bytes: usize) -> Compiled {
    let define = format!("-DLINK_BYTES={link_bytes}");
    let (programs, maps) =
        compile_file("src/fast_path/tunnel.c", &define, ["tc_out", "tc_in", "tc_gro"]);
    let [out, inward, gro] = programs;
    Compiled { out, inward, gro, maps }
}

/// Compiles a file; the instructions of the programs in the sections named, and the maps in the
/// order in which the source has them, which is that of their numbers.
pub(crate) fn compile_file<const N: usize>(
    path: &str,
    define: &str,
    sections: [&str; N],
) -> ([Vec<u8>; N], Vec<MapWords>) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("programs.o");
    let headers = format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let done = Command::new("clang-14")
        .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g0", "-Wall", "-Wextra", "-Werror", "-c"])
        .args(["-isystem", &headers, define, "-o"])
        .args([&output, &source])
        .output()
        .expect("clang-14 is there: scripts/setup --test");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    read(&std::fs::read(&output).unwrap(), sections)
}

fn read<const N: usize>(file: &[u8], sections: [&str; N]) -> ([Vec<u8>; N], Vec<MapWords>) {
    let file = object::File::parse(file).unwrap();
    let maps: Vec<u32> = words(file.section_by_name("maps").unwrap().data().unwrap());
    let program = |name: &str| {
        let section = file.section_by_name(name).unwrap();
        let mut instructions = section.data().unwrap().to_vec();
        for (offset, relocation) in section.relocations() {
            let RelocationTarget::Symbol(symbol) = relocation.target() else {
                panic!("{name} refers to something else than a symbol");
            };
            let symbol = file.symbol_by_index(symbol).unwrap();
            assert!(symbol.name().unwrap().ends_with("_map"), "{name} refers to {symbol:?}");
            let number = (symbol.address() / size_of::<MapWords>() as u64) as u32;
            let instruction = &mut instructions[offset as usize..][..8];
            // A constant whose source register says that it is a map.
            instruction[1] |= 1 << 4;
            instruction[4..].copy_from_slice(&number.to_le_bytes());
        }
        instructions
    };
    let maps = maps.chunks_exact(5).map(|map| map.try_into().unwrap()).collect();
    (sections.map(program), maps)
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|chunk| u32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

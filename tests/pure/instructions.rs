//! Whether the committed instructions of the kernel's programs are those of their sources. With
//! `WEFT_WRITE_INSTRUCTIONS=1` in the environment the test writes them.

use std::path::Path;

use weft::fast_path::{GRO, IN, MAPS, OUT};
use weft::sys::bpf::MapShape;
use weft::sys::steering::{BY_SENDER, DUE, FLOWS};

use crate::bpf::{MapWords, compile, compile_file};

/// A program's name, and its instructions, compiled and committed.
type Program<'a> = (&'a str, &'a [u8], &'a [u8]);

#[expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
fn check(folder: &str, source: &str, programs: &[Program<'_>]) {
    for (name, compiled, committed) in programs {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{folder}/{name}.bin"));
        if std::env::var_os("WEFT_WRITE_INSTRUCTIONS").is_some() {
            std::fs::write(&path, compiled).unwrap();
        }
        assert!(
            compiled == committed || std::fs::read(&path).unwrap() == *compiled,
            "the kernel would run another {name} than {source} has: write {} again",
            path.display()
        );
    }
}

#[test]
fn instructions_are_those_of_the_source() {
    let compiled = compile(0);
    check(
        "src/fast_path",
        "tunnel.c",
        &[
            ("weft_out", &compiled.out, OUT),
            ("weft_in", &compiled.inward, IN),
            ("weft_gro", &compiled.gro, GRO),
        ],
    );
    let ([flows, lanes], _) = steering();
    check(
        "src/sys/steering",
        "steering.c",
        &[("weft_flows", &flows, FLOWS), ("weft_lanes", &lanes, BY_SENDER)],
    );
}

fn steering() -> ([Vec<u8>; 2], Vec<MapWords>) {
    compile_file("src/sys/steering/steering.c", "-DNOTHING", ["flows", "lanes"])
}

#[test]
fn maps_are_those_of_the_source() {
    let words =
        |map: MapShape| [map.kind as u32, map.key_bytes, map.value_bytes, map.entries, map.flags];
    assert_eq!(compile(0).maps, MAPS.map(words));
    assert_eq!(steering().1, [words(DUE)]);
}

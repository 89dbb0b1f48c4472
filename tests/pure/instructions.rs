//! Whether the committed instructions of the kernel's programs are those of their sources. With
//! `WEFT_WRITE_INSTRUCTIONS=1` in the environment the test writes them.

use std::fmt::Write;
use std::path::Path;

use weft::fast_path::{GRO, IN, MAPS, OUT};
use weft::sys::bpf::MapShape;
use weft::sys::steering::{BY_SENDER, DUE, FLOWS};

use crate::bpf::{MapWords, compile, compile_file};

/// A program's name as a constant and in its source, and its instructions, compiled and committed.
type Program<'a> = (&'a str, &'a str, &'a [u64], &'a [u64]);

#[expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]
fn check(folder: &str, source: &str, programs: &[Program<'_>]) {
    let mut text = format!(
        "//! The instructions of `{source}` beside this file, as clang 14 makes them; the constant \
         of a map\n//! reference is the map's number. Written by `WEFT_WRITE_INSTRUCTIONS=1 \
         cargo test instructions`.\n"
    );
    for (name, what, instructions, _) in programs {
        let count = instructions.len();
        write!(text, "\n/// `{what}`.\n#[rustfmt::skip]\npub const {name}: [u64; {count}] = [")
            .unwrap();
        for (index, instruction) in instructions.iter().enumerate() {
            let gap = if index % 4 == 0 { "\n    " } else { " " };
            write!(text, "{gap}0x{instruction:016x},").unwrap();
        }
        text.push_str("\n];\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join("instructions.rs");
    if std::env::var_os("WEFT_WRITE_INSTRUCTIONS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let same = programs.iter().all(|(_, _, compiled, committed)| compiled == committed);
    assert!(
        same || std::fs::read_to_string(&path).unwrap() == text,
        "the kernel would run other programs than {source}: write {} again",
        path.display()
    );
}

#[test]
fn instructions_are_those_of_the_source() {
    let compiled = compile(0);
    check(
        "src/fast_path",
        "tunnel.c",
        &[
            ("OUT", "weft_out", &compiled.out, &OUT),
            ("IN", "weft_in", &compiled.inward, &IN),
            ("GRO", "weft_gro", &compiled.gro, &GRO),
        ],
    );
    let ([flows, lanes], _) = steering();
    check(
        "src/sys/steering",
        "steering.c",
        &[("FLOWS", "weft_flows", &flows, &FLOWS), ("BY_SENDER", "weft_lanes", &lanes, &BY_SENDER)],
    );
}

fn steering() -> ([Vec<u64>; 2], Vec<MapWords>) {
    compile_file("src/sys/steering/steering.c", "-DNOTHING", ["flows", "lanes"])
}

#[test]
fn maps_are_those_of_the_source() {
    let words =
        |map: MapShape| [map.kind as u32, map.key_bytes, map.value_bytes, map.entries, map.flags];
    assert_eq!(compile(0).maps, MAPS.map(words));
    assert_eq!(steering().1, [words(DUE)]);
}

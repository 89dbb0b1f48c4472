//! Whether the committed instructions of the fast path are those of its source. With
//! `WEFT_WRITE_INSTRUCTIONS=1` in the environment the test writes them.

use std::fmt::Write;
use std::path::Path;

use weft::fast_path::{GRO, IN, MAPS, OUT};

use crate::bpf::compile;

const PATH: &str = "src/fast_path/instructions.rs";
const HEAD: &str = "\
//! The instructions of `tunnel.c` beside this file, as clang 14 makes them; the constant of a map
//! reference is the map's number. Written by `WEFT_WRITE_INSTRUCTIONS=1 cargo test instructions`.
";

#[test]
fn instructions_are_those_of_the_source() {
    let compiled = compile(0);
    let mut text = HEAD.to_owned();
    for (name, what, instructions) in [
        ("OUT", "`weft_out`", &compiled.out),
        ("IN", "`weft_in`", &compiled.inward),
        ("GRO", "`weft_gro`", &compiled.gro),
    ] {
        let count = instructions.len();
        write!(text, "\n/// {what}.\n#[rustfmt::skip]\npub const {name}: [u64; {count}] = [")
            .unwrap();
        for (index, instruction) in instructions.iter().enumerate() {
            let gap = if index % 4 == 0 { "\n    " } else { " " };
            write!(text, "{gap}0x{instruction:016x},").unwrap();
        }
        text.push_str("\n];\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PATH);
    if std::env::var_os("WEFT_WRITE_INSTRUCTIONS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let same = OUT[..] == compiled.out && IN[..] == compiled.inward && GRO[..] == compiled.gro;
    assert!(
        same || std::fs::read_to_string(&path).unwrap() == text,
        "the kernel would run other programs than tunnel.c: write {PATH} again"
    );
}

#[test]
fn maps_are_those_of_the_source() {
    let shapes =
        MAPS.map(|map| [map.kind as u32, map.key_bytes, map.value_bytes, map.entries, map.flags]);
    assert_eq!(compile(0).maps, shapes);
}

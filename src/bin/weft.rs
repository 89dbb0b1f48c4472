//! weft, the operator's tool: asks a running weftd about itself.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    weft::tool::main(std::env::args_os())
}

//! weftd, the overlay network daemon: takes flanneld's flags and does flanneld's work.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    weft::daemon::main(std::env::args_os(), &|name| std::env::var_os(name), |_| ())
}

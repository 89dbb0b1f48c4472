//! weft-cni: flannel's CNI plugin, which `weft install-cni` puts on a node. Apart from the tool:
//! it runs on the node itself, whose C library may be older than the container's, or another. A
//! release links it statically, which the tool can't be, because that looks up host names.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    weft::tool::cni_plugin()
}

//! The baseline of the benchmark: one packet per system call, as flannel's C proxy works.
//!
//! Owns nothing but the command line and the fixed source port; the loop is in `plain`. The
//! caller gives the device its address, MTU and route.

mod plain;

use std::io::Write;

use anyhow::{Result, ensure};

const USAGE: &str = "\
usage: one-packet --tun NAME --bind ADDRESS:PORT [--route SUBNET=ADDRESS:PORT]...
Creates the TUN device NAME and forwards between it and UDP, one packet per system call.
";

fn main() -> Result<()> {
    let Some(options) = plain::Options::from_args()? else {
        return Ok(std::io::stdout().write_all(USAGE.as_bytes())?);
    };
    ensure!(options.ports.is_none(), "--ports belongs to plain-peer; see --help");
    let socket = plain::bind_nonblocking(options.bind)?;
    plain::run(&options, &socket, |packet, peer| socket.send_to(packet, peer))
}

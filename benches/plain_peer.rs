//! A test peer that speaks the plain protocol from source ports that nobody announced.
//!
//! Receivers of this protocol ignore the source port; a peer built on that freedom must still be
//! understood. Owns the choice of the sending socket; the loop is in `plain`.

mod plain;

use std::io::{self, Write};
use std::net::{SocketAddrV4, UdpSocket};

use anyhow::{Context, Result};

const USAGE: &str = "\
usage: plain-peer --tun NAME --bind ADDRESS:PORT [--route SUBNET=ADDRESS:PORT]... [--ports K]
As one-packet, but sends from K sockets in turn, each on a port of the kernel's choice.
--ports 0, the default, takes a new port for every packet.
";

fn main() -> Result<()> {
    let Some(options) = plain::Options::from_args()? else {
        return Ok(io::stdout().write_all(USAGE.as_bytes())?);
    };
    let socket = plain::bind_nonblocking(options.bind)?;
    let any_port = SocketAddrV4::new(*options.bind.ip(), 0);
    let senders = (0..options.ports.unwrap_or(0))
        .map(|_| UdpSocket::bind(any_port))
        .collect::<io::Result<Vec<_>>>()
        .with_context(|| format!("bind the sending sockets to {any_port}"))?;
    let mut turn = senders.iter().cycle();
    plain::run(&options, &socket, |packet, peer| match turn.next() {
        Some(sender) => sender.send_to(packet, peer),
        None => UdpSocket::bind(any_port)?.send_to(packet, peer),
    })
}

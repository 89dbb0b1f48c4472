//! The far end: echoes pings, counts floods, answers questions about the counts.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use weft::sys::Slots;
use weft::sys::udp::ReceiveBatch;

use crate::wire::{Header, Kind, Tally};
use crate::{echo_of, sink_of};

/// Datagrams taken in one call.
const BATCH: usize = 64;
/// Room for one datagram.
const SLOT_BYTES: usize = 2048;
/// About 10,000 small datagrams: what is lost here would be blamed on the plane.
const BUFFER_BYTES: usize = 8 << 20;

/// Serves on `address` until the process is ended.
///
/// # Errors
/// When a port is taken, or a socket breaks.
pub(crate) fn run(address: Ipv4Addr) -> Result<()> {
    let echo = bind(echo_of(address))?;
    let sink = bind(sink_of(address))?;
    let buffers = "size the sink's buffer (needs CAP_NET_ADMIN)";
    set_socket_recv_buffer_size_force(&sink, BUFFER_BYTES).context(buffers)?;
    sink.set_nonblocking(true).context("make the sink's socket non-blocking")?;
    std::thread::scope(|threads| {
        let echoing = threads.spawn(|| serve_echo(&echo));
        serve_counts(&sink)?;
        echoing.join().ok().context("the echo thread panicked")?
    })
}

fn bind(address: std::net::SocketAddrV4) -> Result<UdpSocket> {
    UdpSocket::bind(address).with_context(|| format!("bind UDP {address}"))
}

fn serve_echo(socket: &UdpSocket) -> Result<()> {
    let mut datagram = [0; SLOT_BYTES];
    loop {
        let (bytes, from) = socket.recv_from(&mut datagram).context("receive a ping")?;
        // A reply that is refused is a lost reply, which the client counts.
        socket.send_to(&datagram[..bytes], from).ok();
    }
}

fn serve_counts(socket: &UdpSocket) -> Result<()> {
    let (mut batch, mut arena) = (ReceiveBatch::new(BATCH), vec![0; BATCH * SLOT_BYTES]);
    let mut tally = Tally::new(0);
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("wait for datagrams"),
        }
        while let Ok(count) = receive(&mut batch, socket, &mut arena) {
            for index in 0..count {
                let received = batch.received(index);
                let datagram = &arena[index * SLOT_BYTES..][..received.bytes];
                let Some(header) = Header::decode(datagram) else { continue };
                match header.kind {
                    Kind::Data => tally.count(&header),
                    Kind::Count => {
                        // A lost answer is asked for again.
                        socket.send_to(&tally.answer(header), received.source).ok();
                    }
                    Kind::Ping => {}
                }
            }
        }
    }
}

/// Takes what is there; an error when nothing is.
fn receive(
    batch: &mut ReceiveBatch,
    socket: &UdpSocket,
    arena: &mut [u8],
) -> std::io::Result<usize> {
    let layout = Slots { slot_bytes: SLOT_BYTES, stride: SLOT_BYTES };
    batch.receive(socket.as_fd(), arena, layout, 0..BATCH)
}

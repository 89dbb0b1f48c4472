//! The socket of the daemon's echoes: sends them like any packet of this host, so that routes, the
//! tunnel and firewalls see nothing unusual, and receives the answers.

use std::future::pending;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use crate::device::{only_types, receive_message, tell_arrival};
use crate::packet::echo::{ANSWERS, Answer, REQUESTS, Request, TTL, Tokens};

/// Room for the answers to several searches for a path's MTU at once.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Answers received in one go, far more than were asked for: a flood of unsolicited ones must not
/// block the control plane.
const ANSWERS_MAX: usize = 2048;

/// Length of an echo that asks whether a peer is there: as a usual ping.
pub(in crate::backend) const ECHO_BYTES: u16 = 84;

/// Any packet fits.
const PACKET_BYTES_MAX: usize = 64 << 10;

#[derive(Debug)]
pub(in crate::backend) struct Echoes {
    socket: Socket,
    tokens: Tokens,
    identifier: u16,
    buffer: Box<[u8]>,
}

impl Echoes {
    /// Wants the right to raw sockets.
    pub(super) fn open() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::RAW.nonblocking(), Some(Protocol::ICMPV4))?;
        let [reply, unreachable, expired] = ANSWERS;
        only_types(socket.as_fd(), &[reply, unreachable, expired, REQUESTS])?;
        tell_arrival(socket.as_fd())?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.set_header_included_v4(true)?;
        Ok(Self {
            socket,
            tokens: Tokens::default(),
            identifier: fastrand::u16(..),
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
        })
    }

    /// Sends an echo as the kernel routes it.
    pub(super) fn send(&mut self, to: Ipv4Addr, ttl: u8, sequence: u16) -> io::Result<()> {
        self.write([Ipv4Addr::UNSPECIFIED, to], ttl, ECHO_BYTES, sequence);
        let to = SocketAddr::from((to, 0));
        self.socket.send_to(&self.buffer[..ECHO_BYTES.into()], &to.into()).map(drop)
    }

    /// An echo of this length, for another way to send it.
    pub(in crate::backend) fn packet(
        &mut self,
        addresses: [Ipv4Addr; 2],
        bytes: u16,
        sequence: u16,
    ) -> &[u8] {
        self.write(addresses, TTL, bytes, sequence);
        &self.buffer[..bytes.into()]
    }

    fn write(&mut self, [source, destination]: [Ipv4Addr; 2], ttl: u8, bytes: u16, sequence: u16) {
        let token = self.tokens.of(destination, sequence, bytes);
        Request { source, destination, ttl, identifier: self.identifier, sequence, token }
            .write(&mut self.buffer[..bytes.into()]);
    }

    /// What a packet says, however it came.
    pub(super) fn read(&self, packet: &[u8]) -> Option<Answer> {
        Answer::read(packet, &|to, sequence, bytes| self.tokens.of(to, sequence, bytes))
    }

    /// Takes what has come: by which interfaces, and how long ago.
    pub(super) fn receive(&mut self) -> Vec<(u32, Duration, Answer)> {
        let mut messages = Vec::new();
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        for _ in 0..ANSWERS_MAX {
            let Ok(arrival) = receive_message(self.socket.as_fd(), &mut self.buffer) else { break };
            let message = self.read(&self.buffer[..arrival.bytes]);
            let age = arrival.at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
            messages.extend(message.map(|message| (arrival.interface, age, message)));
        }
        messages
    }

    /// Until something has come. Cancel-safe. The runtime knows the socket for so long only: else
    /// each answer would wake this thread, and each echo that leaves the send buffer.
    pub(super) async fn readable(&self) {
        // tokio's only type for datagrams: the kernel's calls are the same. Without a descriptor to
        // spare, answers wait until something is due.
        let copy = self.socket.try_clone();
        match copy.and_then(|copy| UdpSocket::from_std(OwnedFd::from(copy).into())) {
            Ok(socket) => socket.readable().await.unwrap_or_default(),
            Err(_) => pending().await,
        }
    }
}

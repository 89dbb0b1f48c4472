//! The socket of the daemon's echoes: sends them like any packet of this host, so that routes, the
//! tunnel and firewalls see nothing unusual, and receives the answers.

use std::future::pending;
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use tokio::net::UdpSocket;

use super::classic_bpf::{END, EQUAL, HALF_BEHIND, HEADER};
use crate::device::{Datagrams, SendBatch, only_types, receive_message, tell_arrival};
use crate::packet::Span;
use crate::packet::echo::{ANSWERS, Answer, REQUESTS, Request, TTL, Tokens};

/// Room for the answers to several searches for a path's MTU at once.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Room for some hundred errors and requests: each says no more than the one before.
const OTHERS_BUFFER_BYTES: usize = 128 << 10;

/// Answers received in one go, far more than were asked for: a flood of unsolicited ones must not
/// block the control plane.
const ANSWERS_MAX: usize = 2048;

/// Length of an echo that asks whether a peer is there: as a usual ping.
pub(in crate::backend) const ECHO_BYTES: u16 = 84;

/// Any packet fits.
const PACKET_BYTES_MAX: usize = 64 << 10;

/// Echoes that are sent with one call: as many as fit in the buffer, more than one tick has.
const BATCH_MAX: usize = PACKET_BYTES_MAX / ECHO_BYTES as usize;

/// An echo to send as the kernel routes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Echo {
    /// Of which peer a refusal says something.
    pub(super) of: Option<Ipv4Addr>,
    pub(super) to: Ipv4Addr,
    pub(super) ttl: u8,
    pub(super) sequence: u16,
}

#[derive(Debug)]
pub(in crate::backend) struct Echoes {
    socket: Socket,
    /// Where errors come, which anybody can make up, and others' echoes to this host, if they are
    /// of interest: beside the answers, which a flood of them must not crowd out.
    others: Socket,
    tokens: Tokens,
    identifier: u16,
    buffer: Box<[u8]>,
}

impl Echoes {
    /// Wants the right to raw sockets. Others' echoes to this host are told of if it `is_asked`.
    pub(super) fn open(is_asked: bool) -> io::Result<Self> {
        let identifier = fastrand::u16(..);
        let [replies, errors @ ..] = ANSWERS;
        let socket = raw_socket(&[replies], RECEIVE_BUFFER_BYTES)?;
        socket.attach_filter(&own_only(identifier))?;
        socket.set_header_included_v4(true)?;
        let others: Vec<u8> = errors.into_iter().chain(is_asked.then_some(REQUESTS)).collect();
        Ok(Self {
            socket,
            others: raw_socket(&others, OTHERS_BUFFER_BYTES)?,
            tokens: Tokens::default(),
            identifier,
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
        })
    }

    /// Sends all of these, whichever of them are `refused`.
    pub(super) fn send(&mut self, echoes: &[Echo], mut refused: impl FnMut(Echo, io::Error)) {
        for echoes in echoes.chunks(BATCH_MAX) {
            let place = |at: usize| Span::new(at * usize::from(ECHO_BYTES), ECHO_BYTES.into());
            for (at, echo) in echoes.iter().enumerate() {
                let addresses = [Ipv4Addr::UNSPECIFIED, echo.to];
                self.write(addresses, echo.ttl, place(at), echo.sequence);
            }
            let (mut batch, mut next) = (SendBatch::new(echoes.len(), echoes.len()), 0);
            while let Some(first) = echoes.get(next) {
                let messages = echoes.iter().enumerate().skip(next).map(|(at, echo)| {
                    let destination = SocketAddrV4::new(echo.to, 0);
                    Datagrams { destination, segment_bytes: None, spans: [place(at)] }
                });
                // The call ends before one that the kernel refuses, or with its error if it is the
                // first: those behind it need another.
                next += match batch.send(self.socket.as_fd(), &self.buffer, messages) {
                    Ok(sent) => sent.max(1),
                    Err(error) => {
                        refused(*first, error);
                        1
                    }
                };
            }
        }
    }

    /// An echo of this length, for another way to send it.
    pub(in crate::backend) fn packet(
        &mut self,
        addresses: [Ipv4Addr; 2],
        bytes: u16,
        sequence: u16,
    ) -> &[u8] {
        self.write(addresses, TTL, Span::new(0, bytes.into()), sequence);
        &self.buffer[..bytes.into()]
    }

    fn write(&mut self, [source, destination]: [Ipv4Addr; 2], ttl: u8, place: Span, sequence: u16) {
        // Lengths are those of echoes, 16 bits wide.
        let token = self.tokens.of(destination, sequence, place.bytes as u16);
        Request { source, destination, ttl, identifier: self.identifier, sequence, token }
            .write(&mut self.buffer[place.range()]);
    }

    /// What a packet says, however it came.
    pub(super) fn read(&self, packet: &[u8]) -> Option<Answer> {
        Answer::read(packet, &|to, sequence, bytes| self.tokens.of(to, sequence, bytes))
    }

    /// Takes what has come: by which interfaces, and how long ago.
    pub(super) fn receive(&mut self) -> Vec<(u32, Duration, Answer)> {
        let mut messages = Vec::new();
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        for socket in [&self.socket, &self.others] {
            for _ in 0..ANSWERS_MAX {
                let Ok(arrival) = receive_message(socket.as_fd(), &mut self.buffer) else { break };
                let message = self.read(&self.buffer[..arrival.bytes]);
                let age = arrival.at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
                messages.extend(message.map(|message| (arrival.interface, age, message)));
            }
        }
        messages
    }

    /// Until something has come. Cancel-safe. The runtime knows the socket for so long only: else
    /// each answer would wake this thread, and each echo that leaves the send buffer.
    pub(super) async fn readable(&self) {
        tokio::select! {
            () = readable(&self.socket) => {}
            () = readable(&self.others) => {}
        }
    }
}

async fn readable(socket: &Socket) {
    // tokio's only type for datagrams: the kernel's calls are the same. Without a descriptor to
    // spare, answers wait until something is due.
    let copy = socket.try_clone();
    match copy.and_then(|copy| UdpSocket::from_std(OwnedFd::from(copy).into())) {
        Ok(socket) => socket.readable().await.unwrap_or_default(),
        Err(_) => pending().await,
    }
}

/// Takes what came before the filter of a new socket, which may be anything.
pub(super) fn discard(mut socket: &Socket, packets_max: usize) {
    for _ in 0..packets_max {
        if socket.read(&mut [0]).is_err() {
            break;
        }
    }
}

/// Receives ICMP of these types, with such a buffer at least.
fn raw_socket(types: &[u8], buffer_bytes: usize) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW.nonblocking(), Some(Protocol::ICMPV4))?;
    only_types(socket.as_fd(), types)?;
    discard(&socket, ANSWERS_MAX);
    tell_arrival(socket.as_fd())?;
    // Without CAP_NET_ADMIN no more than net.core.rmem_max.
    if set_socket_recv_buffer_size_force(&socket, buffer_bytes).is_err() {
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    Ok(socket)
}

/// Lets in what has this identifier: whoever pings from this host or makes replies up could fill
/// the buffer, and answers of peers would be lost. Sees packets from their IPv4 header on
/// (`raw_rcv`, net/ipv4/raw.c).
fn own_only(identifier: u16) -> [SockFilter; 5] {
    [
        SockFilter::new(HEADER, 0, 0, 0),
        SockFilter::new(HALF_BEHIND, 0, 0, 4),
        SockFilter::new(EQUAL, 0, 1, identifier.into()),
        SockFilter::new(END, 0, 0, PACKET_BYTES_MAX as u32),
        SockFilter::new(END, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn loopback(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, 0, 0, last)
    }

    #[test]
    fn echoes_behind_a_refused_one_are_sent_once() {
        let Ok(mut echoes) = Echoes::open(false) else {
            println!("skipped: no right to raw sockets");
            return;
        };
        // No route leads there from this host, which may be without any network: that is refused.
        let nowhere = Ipv4Addr::BROADCAST;
        let all = [loopback(1), nowhere, nowhere, loopback(2), loopback(3), nowhere];
        let all = all.map(|to| Echo { of: Some(to), to, ttl: TTL, sequence: 9 });
        let mut refused = Vec::new();
        echoes.send(&all, |echo, _| refused.push(echo.of));
        assert_eq!(refused, [Some(nowhere); 3]);
        assert_eq!(answerers(&mut echoes, 3), [1, 2, 3].map(loopback));
    }

    /// Who answers, once so many have.
    fn answerers(echoes: &mut Echoes, count: usize) -> Vec<Ipv4Addr> {
        let mut came = Vec::new();
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while came.len() < count && std::time::Instant::now() < end {
            let replies = echoes.receive().into_iter().filter_map(|(.., answer)| match answer {
                Answer::Reply(reply) => Some(reply.source),
                Answer::Asked(_) | Answer::Lost { .. } | Answer::Refused { .. } => None,
            });
            came.extend(replies);
        }
        came.sort_unstable();
        came
    }

    #[test]
    fn others_pings_do_not_crowd_out_an_answer() {
        let opened = [false, true, false].map(Echoes::open);
        let [Ok(mut echoes), Ok(mut asked), Ok(mut others)] = opened else {
            println!("skipped: no right to raw sockets");
            return;
        };
        (echoes.identifier, asked.identifier, others.identifier) = (1, 2, 3);
        for echoes in [&echoes, &asked] {
            echoes.socket.attach_filter(&own_only(echoes.identifier)).unwrap();
        }
        // Each with its answer takes up twice the kernel's record of a packet and more.
        let mut left = 2 * RECEIVE_BUFFER_BYTES / 768;
        let ping = Echo { of: None, to: loopback(5), ttl: TTL, sequence: 1 };
        while left > 0 {
            let mut refused = 0;
            others.send(&vec![ping; left], |_, _| refused += 1);
            left = refused;
        }
        let echo = Echo { of: None, to: loopback(4), ttl: TTL, sequence: 9 };
        for echoes in [&mut echoes, &mut asked] {
            echoes.send(&[echo], |_, error| panic!("{error}"));
            assert_eq!(answerers(echoes, 1), [loopback(4)]);
        }
    }

    #[test]
    fn made_up_errors_do_not_crowd_out_an_answer() {
        let (Ok(mut echoes), Ok(forger)) = (Echoes::open(false), raw_socket(&[], 4096)) else {
            println!("skipped: no right to raw sockets");
            return;
        };
        // Port unreachable, with nothing of what was refused.
        let error = [3, 3, 0xfc, 0xfc, 0, 0, 0, 0];
        let to = SocketAddrV4::new(loopback(6), 0).into();
        for _ in 0..2 * RECEIVE_BUFFER_BYTES / 768 {
            while forger.send_to(&error, &to).is_err() {}
        }
        let echo = Echo { of: None, to: loopback(4), ttl: TTL, sequence: 9 };
        echoes.send(&[echo], |_, error| panic!("{error}"));
        assert_eq!(answerers(&mut echoes, 1), [loopback(4)]);
    }

    #[test]
    fn who_asks_is_told_of_where_that_is_of_interest() {
        let [Ok(mut echoes), Ok(mut asked)] = [false, true].map(Echoes::open) else {
            println!("skipped: no right to raw sockets");
            return;
        };
        let is_asked = |echoes: &mut Echoes| {
            echoes.receive().iter().any(|(.., answer)| matches!(answer, Answer::Asked(_)))
        };
        let echo = Echo { of: None, to: loopback(1), ttl: TTL, sequence: 9 };
        let end = std::time::Instant::now() + Duration::from_secs(5);
        loop {
            echoes.send(&[echo], |_, _| {});
            assert!(!is_asked(&mut echoes));
            if is_asked(&mut asked) {
                return;
            }
            assert!(std::time::Instant::now() < end, "nobody asked");
        }
    }
}

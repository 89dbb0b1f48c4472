//! The socket of the daemon's echoes: sends them like any packet of this host, so that routes, the
//! tunnel and firewalls see nothing unusual, and receives the answers.

use std::future::pending;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime};

use futures_util::future::select_all;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use tokio::net::UdpSocket;

use super::classic_bpf::{END, EQUAL, HALF, HALF_BEHIND, HEADER};
use crate::device::{Datagrams, SendBatch, only_types, receive_message, tell_arrival};
use crate::packet::echo::{Answer, Kinds, Message, Request, TTL, Tokens};
use crate::packet::{Family, Span, ipv6_header};
use crate::route::Families;

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
    pub(super) of: Option<IpAddr>,
    pub(super) to: IpAddr,
    pub(super) ttl: u8,
    pub(super) sequence: u16,
}

#[derive(Debug)]
pub(in crate::backend) struct Echoes {
    v4: Option<Sockets>,
    v6: Option<Sockets>,
    tokens: Tokens,
    identifier: u16,
    buffer: Box<[u8]>,
}

/// Those of one family.
#[derive(Debug)]
struct Sockets {
    /// Where echoes leave, and answers come.
    replies: Socket,
    /// Where errors come, which anybody can make up, and others' echoes to this host, if they are
    /// of interest: beside the answers, which a flood of them must not crowd out.
    others: Socket,
}

impl Sockets {
    fn open(domain: Domain, identifier: u16, is_asked: bool) -> io::Result<Self> {
        let kinds = if domain == Domain::IPV4 { Kinds::V4 } else { Kinds::V6 };
        let [reply, errors @ ..] = kinds.answers();
        let replies = raw_socket(domain, &[reply], RECEIVE_BUFFER_BYTES)?;
        replies.attach_filter(&own_only(domain, identifier))?;
        if domain == Domain::IPV4 {
            replies.set_header_included_v4(true)?;
        }
        let others: Vec<u8> = errors.into_iter().chain(is_asked.then_some(kinds.request)).collect();
        Ok(Self { replies, others: raw_socket(domain, &others, OTHERS_BUFFER_BYTES)? })
    }
}

impl Echoes {
    /// Wants the right to raw sockets. Others' echoes to this host are told of if it `is_asked`.
    pub(super) fn open(families: Families<(), ()>, is_asked: bool) -> io::Result<Self> {
        let identifier = fastrand::u16(..);
        let open = |domain| Sockets::open(domain, identifier, is_asked);
        let v4 = families.v4().map(|()| open(Domain::IPV4)).transpose()?;
        let v6 = match families.v6().map(|()| open(Domain::IPV6)) {
            Some(Err(error)) if v4.is_none() => return Err(error),
            // A kernel without IPv6 costs IPv4 nothing.
            opened => opened.and_then(Result::ok),
        };
        Ok(Self {
            v4,
            v6,
            tokens: Tokens::default(),
            identifier,
            buffer: vec![0; PACKET_BYTES_MAX].into_boxed_slice(),
        })
    }

    pub(super) fn has_ipv6(&self) -> bool {
        self.v6.is_some()
    }

    /// Sends all of these, whichever of them are `refused`.
    pub(super) fn send(&mut self, echoes: &[Echo], mut refused: impl FnMut(Echo, io::Error)) {
        let (mut v4, mut v6) = (Vec::with_capacity(echoes.len()), Vec::new());
        for echo in echoes {
            match echo.to {
                IpAddr::V4(to) => v4.push((*echo, to)),
                IpAddr::V6(to) => v6.push((*echo, to)),
            }
        }
        for echoes in v4.chunks(BATCH_MAX) {
            self.send_v4(echoes, &mut refused);
        }
        for (echo, to) in v6 {
            self.send_v6(echo, to).unwrap_or_else(|error| refused(echo, error));
        }
    }

    fn send_v4(&mut self, echoes: &[(Echo, Ipv4Addr)], refused: &mut impl FnMut(Echo, io::Error)) {
        let place = |at: usize| Span::new(at * usize::from(ECHO_BYTES), ECHO_BYTES.into());
        for (at, (echo, to)) in echoes.iter().enumerate() {
            self.write([Ipv4Addr::UNSPECIFIED, *to], echo.ttl, place(at), echo.sequence);
        }
        let Some(Sockets { replies: socket, .. }) = &self.v4 else { return };
        let (mut batch, mut next) = (SendBatch::new(echoes.len(), echoes.len()), 0);
        while let Some((first, _)) = echoes.get(next) {
            let messages = echoes.iter().enumerate().skip(next).map(|(at, (_, to))| {
                let destination = SocketAddr::from((*to, 0));
                Datagrams { destination, segment_bytes: None, spans: [place(at)] }
            });
            // The call ends before one that the kernel refuses, or with its error if it is the
            // first: those behind it need another.
            next += match batch.send(socket.as_fd(), &self.buffer, messages) {
                Ok(sent) => sent.max(1),
                Err(error) => {
                    refused(*first, error);
                    1
                }
            };
        }
    }

    /// One by one: the kernel writes the header, with the hop limit of the socket, for it alone
    /// knows the source, and the checksum goes by that.
    fn send_v6(&mut self, Echo { ttl, sequence, .. }: Echo, to: Ipv6Addr) -> io::Result<()> {
        let place = Span::new(0, ECHO_BYTES.into());
        self.write([Ipv6Addr::UNSPECIFIED, to], ttl, place, sequence);
        let Some(Sockets { replies: socket, .. }) = &self.v6 else { return Ok(()) };
        socket.set_unicast_hops_v6(ttl.into())?;
        let message = &self.buffer[ipv6_header::HEADER_BYTES_MIN..ECHO_BYTES.into()];
        socket.send_to(message, &SocketAddrV6::new(to, 0, 0, 0).into()).map(drop)
    }

    /// An echo of this length from the first of two addresses of one family to the second, for
    /// another way to send it.
    pub(in crate::backend) fn packet(
        &mut self,
        addresses: [IpAddr; 2],
        bytes: u16,
        sequence: u16,
    ) -> Option<&[u8]> {
        let place = Span::new(0, bytes.into());
        match addresses {
            [IpAddr::V4(own), IpAddr::V4(to)] => self.write([own, to], TTL, place, sequence),
            [IpAddr::V6(own), IpAddr::V6(to)] => self.write([own, to], TTL, place, sequence),
            _ => return None,
        }
        self.buffer.get(..bytes.into())
    }

    fn write<A: Family>(
        &mut self,
        [source, destination]: [A; 2],
        ttl: u8,
        place: Span,
        sequence: u16,
    ) {
        // Lengths are those of echoes, 16 bits wide.
        let token = self.tokens.of(destination.into(), sequence, place.bytes as u16);
        Request { source, destination, ttl, identifier: self.identifier, sequence, token }
            .write(&mut self.buffer[place.range()]);
    }

    /// What a message says, however it came.
    pub(super) fn read(&self, message: &Message<'_>) -> Option<Answer> {
        Answer::of(message, &|to, sequence, bytes| self.tokens.of(to, sequence, bytes))
    }

    /// Takes what has come: by which interfaces, and how long ago.
    pub(super) fn receive(&mut self) -> Vec<(u32, Duration, Answer)> {
        let mut messages = Vec::new();
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        for socket in sockets(&self.v4, &self.v6) {
            for _ in 0..ANSWERS_MAX {
                let Ok(arrival) = receive_message(socket.as_fd(), &mut self.buffer) else { break };
                let bytes = &self.buffer[..arrival.bytes];
                let message = Message::received(arrival.source, bytes);
                let message = message.and_then(|message| self.read(&message));
                let age = arrival.at.map_or(Duration::ZERO, |at| now.saturating_sub(at));
                messages.extend(message.map(|message| (arrival.interface, age, message)));
            }
        }
        messages
    }

    /// Until something has come. Cancel-safe. The runtime knows the sockets for so long only: else
    /// each answer would wake this thread, and each echo that leaves the send buffer.
    pub(super) async fn readable(&self) {
        select_all(sockets(&self.v4, &self.v6).map(|socket| Box::pin(readable(socket)))).await;
    }
}

/// Those that are open, one at least.
fn sockets<'a>(
    v4: &'a Option<Sockets>,
    v6: &'a Option<Sockets>,
) -> impl Iterator<Item = &'a Socket> {
    v4.iter().chain(v6).flat_map(|it| [&it.replies, &it.others])
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
fn raw_socket(domain: Domain, types: &[u8], buffer_bytes: usize) -> io::Result<Socket> {
    let icmp = if domain == Domain::IPV4 { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
    let socket = Socket::new(domain, Type::RAW.nonblocking(), Some(icmp))?;
    only_types(socket.as_fd(), types, domain == Domain::IPV6)?;
    discard(&socket, ANSWERS_MAX);
    tell_arrival(socket.as_fd(), domain == Domain::IPV6)?;
    // Without CAP_NET_ADMIN no more than net.core.rmem_max.
    if set_socket_recv_buffer_size_force(&socket, buffer_bytes).is_err() {
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    Ok(socket)
}

/// Lets in what has this identifier: whoever pings from this host or makes replies up could fill
/// the buffer, and answers of peers would be lost. Sees packets of IPv4 from their header on
/// (`raw_rcv`, net/ipv4/raw.c), of IPv6 what follows that (`rawv6_rcv`, net/ipv6/raw.c).
fn own_only(domain: Domain, identifier: u16) -> Vec<SockFilter> {
    let loads = match domain {
        Domain::IPV4 => vec![(HEADER, 0), (HALF_BEHIND, 4)],
        _ => vec![(HALF, 4)],
    };
    let loads = loads.into_iter().map(|(code, value)| SockFilter::new(code, 0, 0, value));
    let rest = [
        SockFilter::new(EQUAL, 0, 1, identifier.into()),
        SockFilter::new(END, 0, 0, PACKET_BYTES_MAX as u32),
        SockFilter::new(END, 0, 0, 0),
    ];
    loads.chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    const fn loopback(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(127, 0, 0, last))
    }

    fn open(is_asked: bool) -> io::Result<Echoes> {
        Echoes::open(Families::default(), is_asked)
    }

    #[test]
    fn echoes_behind_a_refused_one_are_sent_once() {
        let Ok(mut echoes) = open(false) else {
            println!("skipped: no right to raw sockets");
            return;
        };
        // No route leads there from this host, which may be without any network: that is refused.
        let nowhere = IpAddr::V4(Ipv4Addr::BROADCAST);
        let all = [loopback(1), nowhere, nowhere, loopback(2), loopback(3), nowhere];
        let all = all.map(|to| Echo { of: Some(to), to, ttl: TTL, sequence: 9 });
        let mut refused = Vec::new();
        echoes.send(&all, |echo, _| refused.push(echo.of));
        assert_eq!(refused, [Some(nowhere); 3]);
        assert_eq!(answerers(&mut echoes, 3), [1, 2, 3].map(loopback));
    }

    /// Who answers, once so many have.
    fn answerers(echoes: &mut Echoes, count: usize) -> Vec<IpAddr> {
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

    /// By the kernel's answers: hop limit, checksum, length and identifier are as they must be.
    #[test]
    fn echoes_of_ipv6_are_answered() {
        let families = [Families::of_v6(None, ()), Families::of_v6(Some(()), ())];
        let opened = families.map(|families| Echoes::open(families, true));
        let [Ok(mut alone), Ok(mut both)] = opened else {
            println!("skipped: no right to raw sockets, or no IPv6");
            return;
        };
        assert!(alone.v4.is_none() && alone.has_ipv6() && both.has_ipv6());
        let own = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let echo = |to, ttl| Echo { of: Some(to), to, ttl, sequence: 9 };
        alone.send(&[echo(own, 1)], |_, error| panic!("{error}"));
        assert_eq!(answerers(&mut alone, 1), [own]);
        both.send(&[echo(own, TTL), echo(loopback(3), TTL)], |_, error| panic!("{error}"));
        assert_eq!(answerers(&mut both, 2), [loopback(3), own], "each by its own family");
    }

    #[test]
    fn others_pings_do_not_crowd_out_an_answer() {
        let opened = [false, true, false].map(open);
        let [Ok(mut echoes), Ok(mut asked), Ok(mut others)] = opened else {
            println!("skipped: no right to raw sockets");
            return;
        };
        (echoes.identifier, asked.identifier, others.identifier) = (1, 2, 3);
        for echoes in [&echoes, &asked] {
            let socket = &echoes.v4.as_ref().unwrap().replies;
            socket.attach_filter(&own_only(Domain::IPV4, echoes.identifier)).unwrap();
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
        let (Ok(mut echoes), Ok(forger)) = (open(false), raw_socket(Domain::IPV4, &[], 4096))
        else {
            println!("skipped: no right to raw sockets");
            return;
        };
        // Port unreachable, with nothing of what was refused.
        let error = [3, 3, 0xfc, 0xfc, 0, 0, 0, 0];
        let to = SocketAddr::new(loopback(6), 0).into();
        for _ in 0..2 * RECEIVE_BUFFER_BYTES / 768 {
            while forger.send_to(&error, &to).is_err() {}
        }
        let echo = Echo { of: None, to: loopback(4), ttl: TTL, sequence: 9 };
        echoes.send(&[echo], |_, error| panic!("{error}"));
        assert_eq!(answerers(&mut echoes, 1), [loopback(4)]);
    }

    #[test]
    fn who_asks_is_told_of_where_that_is_of_interest() {
        let [Ok(mut echoes), Ok(mut asked)] = [false, true].map(open) else {
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

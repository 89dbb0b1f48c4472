//! Pings: several targets at once, each with a few echoes, from an ordinary raw socket.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use derive_more::Display;
use rustix::io::Errno;
use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};

use crate::device::{only_types, receive_message};
use crate::packet::Family;
use crate::packet::echo::{Answer, Kinds, Message, Reply, Request, TTL, Tokens};
use crate::sys::echo::never_fragment_ipv6;
use crate::sys::udp::set_fragmenting;
use crate::tool::refusal::why;

/// Echoes to each target in one round. Where one stays unanswered, all of that node are asked in
/// another round: a cause that is named shall not rest on one burst of loss.
const ECHOES: usize = 5;
const ROUNDS: usize = 2;

/// Between two echoes to a target: a burst of loss shall not take all.
const PAUSE: Duration = Duration::from_millis(150);

/// How long the last answers are waited for.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Any answer fits.
const PACKET_BYTES_MAX: usize = 64 << 10;

/// Who is to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, Serialize)]
#[display(rename_all = "kebab-case")]
#[serde(rename_all = "kebab-case")]
pub(super) enum Leg {
    /// The node's host.
    Host,
    /// Its end of the overlay.
    Tunnel,
    /// The same, to packets as long as may be.
    TunnelFull,
    /// A pod behind it.
    Pod,
}

/// Echoes to one target, and what became of them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Echoes {
    pub(super) leg: Leg,
    pub(super) address: IpAddr,
    /// Length of the packets. They may not be fragmented.
    pub(super) bytes: u16,
    pub(super) sent: usize,
    pub(super) answered: usize,
    /// The median.
    pub(super) round_trip_microseconds: Option<u64>,
    /// Why this host did not send one.
    pub(super) refused: Option<String>,
    /// Whether that was OUTPUT, which what is forwarded does not pass.
    #[serde(skip)]
    pub(super) is_by_output: bool,
    /// Where one of them went in circles until it expired, by who says so.
    pub(super) expired_at: Option<IpAddr>,
    #[serde(skip)]
    pub(super) round_trips: Vec<u64>,
}

impl Echoes {
    /// Echoes that are yet to be sent.
    pub(super) fn new(leg: Leg, address: IpAddr, bytes: u16) -> Self {
        Self {
            leg,
            address,
            bytes,
            sent: 0,
            answered: 0,
            round_trip_microseconds: None,
            refused: None,
            is_by_output: false,
            expired_at: None,
            round_trips: Vec::new(),
        }
    }

    /// The answers were of this host, which has the address itself.
    pub(super) fn is_own(&mut self) {
        (self.answered, self.round_trip_microseconds) = (0, None);
        let why = "this host itself has that address (`ip address`), so nothing leaves it";
        self.refused = Some(why.to_owned());
    }

    fn answer(&mut self, round_trip: Duration) {
        self.round_trips.push(round_trip.as_micros() as u64);
        self.round_trips.sort_unstable();
        self.answered = self.round_trips.len();
        self.round_trip_microseconds = self.round_trips.get(self.answered / 2).copied();
    }
}

/// The echoes that are unanswered, by their tokens: when each was sent, to which node's which
/// target.
type Sent = HashMap<u64, (usize, usize, Instant)>;

/// Pings all targets of the nodes, small and large ones in turn, in less than four seconds for each
/// family whatever their number; those behind the host from one of the `pods_gateways`, if this
/// host has that address, so that answers come back as a pod's do. A node is of one family.
pub(super) fn ping(nodes: &mut [Vec<Echoes>], pods_gateways: &[IpAddr]) -> anyhow::Result<()> {
    ping_over::<Ipv4Addr>(nodes, pods_gateways)?;
    ping_over::<Ipv6Addr>(nodes, pods_gateways)
}

fn ping_over<A: Family>(nodes: &mut [Vec<Echoes>], gateways: &[IpAddr]) -> anyhow::Result<()> {
    let is_meant = |legs: &[Echoes]| legs.first().is_some_and(|it| A::of(it.address).is_some());
    let mut asked: Vec<_> = (0..nodes.len()).filter(|node| is_meant(&nodes[*node])).collect();
    if asked.is_empty() {
        return Ok(());
    }
    let is_ipv6 = A::VERSION == 6;
    let socket =
        open(is_ipv6).context("cannot open a raw ICMP socket: run as root (CAP_NET_RAW)")?;
    let gateway = gateways.iter().find(|it| it.is_ipv6() == is_ipv6);
    let inner = gateway.and_then(|from| {
        let socket = open(is_ipv6).ok()?;
        socket.bind(&SocketAddr::new(*from, 0).into()).ok()?;
        Some(socket)
    });
    // What one node was sent tells nothing of what another has to answer.
    let (tokens, identifier, mut sequence) = (Tokens::default(), fastrand::u16(..), 0_u16);
    let mut sent = Sent::new();
    let mut packet = vec![0; PACKET_BYTES_MAX];
    for turn in 1..=ROUNDS * ECHOES {
        let ends_round = turn.is_multiple_of(ECHOES);
        let end = Instant::now() + if ends_round { ANSWER_MAX } else { PAUSE };
        for &node in &asked {
            for (at, target) in nodes[node].iter_mut().enumerate() {
                let Some(destination) = A::of(target.address) else { continue };
                let bytes = usize::from(target.bytes).max(Request::<A>::BYTES_MIN);
                let packet = &mut packet[..bytes];
                sequence = sequence.wrapping_add(1);
                let token = tokens.of(target.address, sequence, bytes as u16);
                // All zeroes: none.
                let (source, ttl) = (A::of_bits(A::mask(0)), TTL);
                Request { source, destination, ttl, identifier, sequence, token }.write(packet);
                sent.insert(token, (node, at, Instant::now()));
                target.sent += 1;
                let by = inner.as_ref().filter(|_| target.leg != Leg::Host).unwrap_or(&socket);
                // The kernel writes the header.
                let message = &packet[A::HEADER_BYTES_MIN..];
                let destination = SocketAddr::new(target.address, 0).into();
                if let Err(error) = by.send_to(message, &destination) {
                    target.refused = Some(why(&error));
                    target.is_by_output = Errno::from_io_error(&error) == Some(Errno::PERM);
                }
            }
        }
        receive(&socket, end, &tokens, &mut sent, nodes)?;
        if ends_round {
            asked.retain(|node| nodes[*node].iter().any(|target| target.answered < target.sent));
        }
    }
    Ok(())
}

fn open(is_ipv6: bool) -> io::Result<Socket> {
    let (domain, icmp, kinds) = match is_ipv6 {
        false => (Domain::IPV4, Protocol::ICMPV4, Kinds::V4),
        true => (Domain::IPV6, Protocol::ICMPV6, Kinds::V6),
    };
    let socket = Socket::new(domain, Type::RAW, Some(icmp))?;
    only_types(socket.as_fd(), &kinds.answers(), is_ipv6)?;
    match is_ipv6 {
        false => set_fragmenting(socket.as_fd(), (Ipv4Addr::UNSPECIFIED, 0).into(), false)?,
        true => never_fragment_ipv6(socket.as_fd())?,
    }
    socket.set_recv_buffer_size(4 << 20)?;
    Ok(socket)
}

/// Has reads wait so long at most. The kernel takes less than a microsecond for no limit.
pub(super) fn receive_within(socket: &Socket, left: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))
}

/// Takes answers until `end`, or until all came.
fn receive(
    socket: &Socket,
    end: Instant,
    tokens: &Tokens,
    sent: &mut Sent,
    nodes: &mut [Vec<Echoes>],
) -> anyhow::Result<()> {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    while !sent.is_empty() {
        let wait = end.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            break;
        }
        receive_within(socket, wait)?;
        let received = match receive_message(socket.as_fd(), &mut buffer) {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot receive answers"),
        };
        let token_of = |to, sequence, bytes| tokens.of(to, sequence, bytes);
        let message = Message::received(received.source, &buffer[..received.bytes]);
        let Some(message) = message else { continue };
        if let Some((node, target, at)) =
            Reply::of(&message).and_then(|reply| sent.remove(&reply.token))
        {
            nodes[node][target].answer(at.elapsed());
        }
        if let Some(Answer::Lost { by, destination, code: None, .. }) =
            Answer::of(&message, &token_of)
        {
            let meant = nodes.iter_mut().flatten().filter(|it| it.address == destination);
            meant.for_each(|target| target.expired_at = Some(by));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_those_answered() {
        let mut echoes = Echoes::new(Leg::Host, Ipv4Addr::LOCALHOST.into(), 84);
        assert_eq!((echoes.answered, echoes.round_trip_microseconds), (0, None));
        for milliseconds in [5, 1, 9] {
            echoes.answer(Duration::from_millis(milliseconds));
        }
        assert_eq!((echoes.answered, echoes.round_trip_microseconds), (3, Some(5000)));
    }
}

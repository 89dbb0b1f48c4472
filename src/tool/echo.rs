//! Pings: several targets at once, each with a few echoes, from an ordinary raw socket.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use derive_more::Display;
use rustix::io::Errno;
use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};

use crate::device::only_types;
use crate::packet::echo::{ANSWERS, Answer, ECHO_BYTES_MIN, Reply, Request, TTL, Tokens};
use crate::packet::ipv4::HEADER_BYTES_MIN;
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
    pub(super) address: Ipv4Addr,
    /// Length of the IPv4 packets. They may not be fragmented.
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
    pub(super) expired_at: Option<Ipv4Addr>,
    #[serde(skip)]
    pub(super) round_trips: Vec<u64>,
}

impl Echoes {
    /// Echoes that are yet to be sent.
    pub(super) fn new(leg: Leg, address: Ipv4Addr, bytes: u16) -> Self {
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
        let why = "this host itself has that address (`ip -4 address`), so nothing leaves it";
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

/// Pings all targets of the nodes, small and large ones in turn, in less than four seconds whatever
/// their number; those behind the host from the `pods_gateway`, if this host has that address, so
/// that answers come back as a pod's do.
pub(super) fn ping(
    nodes: &mut [Vec<Echoes>],
    pods_gateway: Option<Ipv4Addr>,
) -> anyhow::Result<()> {
    let socket = open().context("cannot open a raw ICMP socket: run as root (CAP_NET_RAW)")?;
    let inner = pods_gateway.and_then(|from| {
        let socket = open().ok()?;
        socket.bind(&SocketAddrV4::new(from, 0).into()).ok()?;
        Some(socket)
    });
    // What one node was sent tells nothing of what another has to answer.
    let (tokens, identifier, mut sequence) = (Tokens::default(), fastrand::u16(..), 0_u16);
    let mut sent = Sent::new();
    let mut packet = vec![0; PACKET_BYTES_MAX];
    let mut asked: Vec<usize> = (0..nodes.len()).collect();
    for turn in 1..=ROUNDS * ECHOES {
        let ends_round = turn.is_multiple_of(ECHOES);
        let end = Instant::now() + if ends_round { ANSWER_MAX } else { PAUSE };
        for &node in &asked {
            for (at, target) in nodes[node].iter_mut().enumerate() {
                let packet = &mut packet[..usize::from(target.bytes).max(ECHO_BYTES_MIN)];
                let (source, destination) = (Ipv4Addr::UNSPECIFIED, target.address);
                sequence = sequence.wrapping_add(1);
                let token = tokens.of(destination, sequence, packet.len() as u16);
                Request { source, destination, ttl: TTL, identifier, sequence, token }
                    .write(packet);
                sent.insert(token, (node, at, Instant::now()));
                target.sent += 1;
                let by = inner.as_ref().filter(|_| target.leg != Leg::Host).unwrap_or(&socket);
                // The kernel writes the IPv4 header.
                let message = &packet[HEADER_BYTES_MIN..];
                if let Err(error) = by.send_to(message, &SocketAddrV4::new(destination, 0).into()) {
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

fn open() -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    only_types(socket.as_fd(), &ANSWERS)?;
    set_fragmenting(socket.as_fd(), false)?;
    socket.set_recv_buffer_size(4 << 20)?;
    Ok(socket)
}

/// Has reads wait so long at most. The kernel takes less than a microsecond for no limit.
pub(super) fn receive_within(socket: &Socket, left: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))
}

/// Takes answers until `end`, or until all came.
fn receive(
    mut socket: &Socket,
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
        let received = match socket.read(&mut buffer) {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot receive answers"),
        };
        let packet = &buffer[..received];
        if let Some((node, target, at)) =
            Reply::read(packet).and_then(|reply| sent.remove(&reply.token))
        {
            nodes[node][target].answer(at.elapsed());
        }
        let token_of = |to, sequence, bytes| tokens.of(to, sequence, bytes);
        if let Some(Answer::Lost { by, destination, code: None, .. }) =
            Answer::read(packet, &token_of)
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
        let mut echoes = Echoes::new(Leg::Host, Ipv4Addr::LOCALHOST, 84);
        assert_eq!((echoes.answered, echoes.round_trip_microseconds), (0, None));
        for milliseconds in [5, 1, 9] {
            echoes.answer(Duration::from_millis(milliseconds));
        }
        assert_eq!((echoes.answered, echoes.round_trip_microseconds), (3, Some(5000)));
    }
}

//! Pings: several targets at once, each with a few echoes, from an ordinary raw socket.

use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use crate::device::only_types;
use crate::packet::checksum;
use crate::packet::echo::{ANSWERS, ECHO_BYTES_MIN, Reply};
use crate::sys::udp::set_fragmenting;

/// Echoes to each target.
pub(super) const ECHOES: usize = 5;

/// Between two echoes to a target: a burst of loss shall not take all.
const PAUSE: Duration = Duration::from_millis(150);

/// How long the last answers are waited for.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Any answer fits.
const PACKET_BYTES_MAX: usize = 64 << 10;

const IPV4_BYTES: usize = 20;
const ECHO_REQUEST: u8 = 8;

/// Whom to ping, and with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) address: Ipv4Addr,
    /// Length of the IPv4 packets. They may not be fragmented.
    pub(super) bytes: u16,
    /// Whether it is behind the host, so that the answers are to come back as a pod's do.
    pub(super) is_inner: bool,
}

/// What became of the echoes to one target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Of those that were answered, in the order of the answers.
    pub(super) round_trips: Vec<Duration>,
    /// Why this host did not send one.
    pub(super) refused: Option<Errno>,
}

impl Outcome {
    pub(super) fn answered(&self) -> usize {
        self.round_trips.len()
    }

    pub(super) fn median(&self) -> Option<Duration> {
        let mut sorted = self.round_trips.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}

/// An echo on its way.
struct Sent {
    target: usize,
    at: Instant,
    is_answered: bool,
}

/// Pings all targets, in less than three seconds whatever their number; inner ones from the
/// `pods_gateway`, if this host has that address.
pub(super) fn ping(
    targets: &[Target],
    pods_gateway: Option<Ipv4Addr>,
) -> anyhow::Result<Vec<Outcome>> {
    let socket = open().context("cannot open a raw ICMP socket: run as root (CAP_NET_RAW)")?;
    let inner = pods_gateway.and_then(|from| {
        let socket = open().ok()?;
        socket.bind(&SocketAddrV4::new(from, 0).into()).ok()?;
        Some(socket)
    });
    let first_token = fastrand::u64(..);
    let mut sent: Vec<Sent> = Vec::new();
    let mut outcomes = vec![Outcome::default(); targets.len()];
    let mut packet = vec![0; PACKET_BYTES_MAX];
    for _ in 0..ECHOES {
        let round_ends = Instant::now() + PAUSE;
        for (number, target) in targets.iter().enumerate() {
            let token = first_token.wrapping_add(sent.len() as u64);
            let message = write_message(&mut packet, usize::from(target.bytes), token);
            sent.push(Sent { target: number, at: Instant::now(), is_answered: false });
            let to = SocketAddrV4::new(target.address, 0);
            let by = inner.as_ref().filter(|_| target.is_inner).unwrap_or(&socket);
            if let Err(error) = by.send_to(message, &to.into()) {
                outcomes[number].refused = Errno::from_io_error(&error);
            }
        }
        receive(&socket, round_ends, first_token, &mut sent, &mut outcomes)?;
    }
    receive(&socket, Instant::now() + ANSWER_MAX, first_token, &mut sent, &mut outcomes)?;
    Ok(outcomes)
}

fn open() -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    only_types(socket.as_fd(), &ANSWERS[..1])?;
    set_fragmenting(socket.as_fd(), false)?;
    socket.set_recv_buffer_size(4 << 20)?;
    Ok(socket)
}

/// An echo request that makes an IPv4 packet of `bytes`; the kernel writes the IPv4 header.
fn write_message(buffer: &mut [u8], bytes: usize, token: u64) -> &[u8] {
    let message = &mut buffer[..bytes.max(ECHO_BYTES_MIN) - IPV4_BYTES];
    message.fill(0);
    message[0] = ECHO_REQUEST;
    message[8..16].copy_from_slice(&token.to_be_bytes());
    // All that follows is zero.
    let sum = checksum::finish(checksum::sum(&message[..16]));
    message[2..4].copy_from_slice(&sum);
    message
}

/// Takes answers until `end`, or until all came.
fn receive(
    socket: &Socket,
    end: Instant,
    first_token: u64,
    sent: &mut [Sent],
    outcomes: &mut [Outcome],
) -> anyhow::Result<()> {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let mut left = sent.iter().filter(|echo| !echo.is_answered).count();
    while left > 0 {
        let wait = end.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            break;
        }
        socket.set_read_timeout(Some(wait))?;
        let received = {
            let mut reader = socket;
            match reader.read(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).context("cannot receive answers"),
            }
        };
        let now = Instant::now();
        let Some(reply) = Reply::read(&buffer[..received]) else { continue };
        let number = usize::try_from(reply.token.wrapping_sub(first_token)).ok();
        let Some(echo) = number.and_then(|number| sent.get_mut(number)) else { continue };
        if !std::mem::replace(&mut echo.is_answered, true) {
            left -= 1;
            outcomes[echo.target].round_trips.push(now.duration_since(echo.at));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_a_request_of_its_length() {
        let mut buffer = vec![0xff; 2000];
        let message = write_message(&mut buffer, 1472, 0x0102_0304_0506_0708);
        assert_eq!(message.len(), 1452);
        assert_eq!(message[..2], [8, 0]);
        assert_eq!(message[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(checksum::finish(checksum::sum(message)), [0, 0], "its checksum is wrong");
    }

    #[test]
    fn the_median_is_of_those_answered() {
        let round_trips = [5, 1, 9].map(Duration::from_millis).to_vec();
        let outcome = Outcome { round_trips, refused: None };
        assert_eq!((outcome.answered(), outcome.median()), (3, Some(Duration::from_millis(5))));
        assert_eq!(Outcome::default().median(), None);
    }
}

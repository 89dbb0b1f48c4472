//! The ping-pong: one datagram on the way at a time.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::echo_of;
use crate::wire::{DATAGRAM_BYTES_MAX, Header, Kind};

/// Rounds of this long are not counted: caches, neighbours and sleep states settle.
const WARM_UP: Duration = Duration::from_millis(200);
/// An echo that takes longer is lost, and counts as one that took this long: leaving it out would
/// flatter a plane that drops under load.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Digits that the histogram keeps.
const DIGITS: u8 = 3;

/// Pings `address` for `duration` with payloads of `bytes`.
///
/// # Errors
/// When the socket breaks.
pub(crate) fn run(address: Ipv4Addr, duration: Duration, bytes: usize) -> Result<Value> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("bind a UDP socket")?;
    socket.connect(echo_of(address)).context("connect to the server")?;
    socket.set_read_timeout(Some(TIMEOUT)).context("limit the wait for an echo")?;
    let highest = (2 * TIMEOUT).as_nanos() as u64;
    let mut histogram = Histogram::<u64>::new_with_bounds(100, highest, DIGITS)?;
    let (mut lost, started) = (0_u64, Instant::now());
    for sequence in 0.. {
        let sent = Instant::now();
        if sent - started >= WARM_UP + duration {
            break;
        }
        let echoed = round(&socket, sequence, bytes)?;
        if sent - started < WARM_UP {
            continue;
        }
        lost += u64::from(!echoed);
        let taken = if echoed { sent.elapsed() } else { TIMEOUT };
        histogram.saturating_record(taken.as_nanos() as u64);
    }
    Ok(summary(&histogram, lost))
}

/// Sends one datagram and waits for its echo; false when it does not come in time.
fn round(socket: &UdpSocket, sequence: u64, bytes: usize) -> Result<bool> {
    let mut datagram = [0; DATAGRAM_BYTES_MAX];
    let header = Header { kind: Kind::Ping, trial: 0, flow: 0, sequence };
    let encoded = header.encode();
    datagram[..encoded.len()].copy_from_slice(&encoded);
    if let Err(error) = socket.send(&datagram[..bytes]) {
        return passing(error.kind()).then_some(false).with_context(|| format!("send: {error}"));
    }
    loop {
        match socket.recv(&mut datagram) {
            // Echoes that come after their time belong to earlier rounds.
            Ok(length) if Header::decode(&datagram[..length]) == Some(header) => return Ok(true),
            Ok(_) => {}
            Err(error) if passing(error.kind()) => return Ok(false),
            Err(error) => return Err(error).context("receive an echo"),
        }
    }
}

/// Errors that mean a lost packet: a timeout, or a refusal on the way.
fn passing(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock
            | ErrorKind::TimedOut
            | ErrorKind::ConnectionRefused
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    )
}

/// Half round trips in microseconds.
fn summary(round_trips_ns: &Histogram<u64>, lost: u64) -> Value {
    let half_us = |nanoseconds: u64| nanoseconds as f64 / 2000.0;
    let at = |quantile: f64| half_us(round_trips_ns.value_at_quantile(quantile));
    json!({
        "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999),
        "max_us": half_us(round_trips_ns.max()), "pings": round_trips_ns.len(), "lost_pings": lost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_round_trip_reported_losses_in_tail() {
        let mut round_trips = Histogram::<u64>::new_with_bounds(100, 1_000_000_000, 3).unwrap();
        for _ in 0..990 {
            round_trips.record(40_000).unwrap();
        }
        for _ in 0..10 {
            round_trips.record(TIMEOUT.as_nanos() as u64).unwrap();
        }
        let summary = summary(&round_trips, 10);
        let near = |field: &str, expected: f64| {
            let value = summary[field].as_f64().unwrap();
            assert!((value / expected - 1.0).abs() < 0.002, "{field} is {value}, not {expected}");
        };
        near("p50_us", 20.0);
        near("p99_us", 20.0);
        near("p999_us", 50_000.0);
        assert_eq!((&summary["pings"], &summary["lost_pings"]), (&json!(1000), &json!(10)));
    }
}

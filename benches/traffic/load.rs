//! The sender: datagrams of given sizes at a given rate, and what the server saw of them.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use weft::packet::Span;
use weft::sys::udp::{Datagrams, SendBatch};

use crate::pace::{BURST_PACKETS_MAX, Due, Pace};
use crate::sink_of;
use crate::wire::{ANSWER_BYTES, FLOWS_MAX, HEADER_BYTES, Header, IP_UDP_BYTES, Kind, counts};

const SLOT_BYTES: usize = 2048;
/// How long the queues on the way have to run empty before the first question, and between two.
const DRAIN: Duration = Duration::from_millis(30);
/// Questions without an answer before the server is taken for gone: 3 s in all.
const QUESTIONS_MAX: u64 = 100;

/// Payload sizes, one after the other, again and again.
pub(crate) struct Mix(Vec<usize>);

impl Mix {
    /// Every datagram has a payload of `bytes`.
    pub(crate) fn one_size(bytes: usize) -> Self {
        Self(vec![bytes])
    }

    /// IPv4 packets of 64, 594 and `mtu` bytes, 7:4:1, spread evenly; `None` for an MTU that is
    /// smaller than the middle size or larger than an Ethernet frame.
    pub(crate) fn imix(mtu: usize) -> Option<Self> {
        let (small, middle, large) = (64, 594, mtu);
        let packets = [
            small, middle, small, small, middle, small, large, small, middle, small, middle, small,
        ];
        let fits = (middle..=1500).contains(&mtu);
        fits.then(|| Self(packets.iter().map(|bytes| bytes - IP_UDP_BYTES).collect()))
    }

    fn bytes(&self, at: usize) -> usize {
        self.0[at % self.0.len()]
    }
}

/// How much to send.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// Datagrams a second; as fast as they go without.
    pub(crate) rate_pps: Option<u64>,
    pub(crate) duration: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) offered: u64,
    pub(crate) received: u64,
    pub(crate) reordered: u64,
    pub(crate) seconds: f64,
}

impl Outcome {
    pub(crate) fn offered_pps(&self) -> f64 {
        self.offered as f64 / self.seconds
    }

    pub(crate) fn lost_fraction(&self) -> f64 {
        let lost = self.offered.saturating_sub(self.received);
        if self.offered == 0 { 0.0 } else { lost as f64 / self.offered as f64 }
    }

    pub(crate) fn to_json(self) -> Value {
        json!({
            "offered_kpps": self.offered_pps() / 1e3,
            "kpps": self.received as f64 / self.seconds / 1e3,
            "lost_percent": self.lost_fraction() * 100.0,
            "offered": self.offered, "lost": self.offered.saturating_sub(self.received),
            "reordered": self.reordered, "seconds": self.seconds,
        })
    }
}

/// One socket per flow, and everything that a burst needs, made once.
pub(crate) struct Sender {
    sink: SocketAddrV4,
    flows: Vec<(UdpSocket, u64)>,
    mix: Mix,
    mix_at: usize,
    trial: u32,
    arena: Vec<u8>,
    batch: SendBatch,
}

impl Sender {
    /// A sender to the server at `address`.
    ///
    /// # Errors
    /// When there are no or too many flows, or a socket can't be made.
    pub(crate) fn new(address: Ipv4Addr, flows: usize, mix: Mix) -> Result<Self> {
        ensure!((1..=FLOWS_MAX).contains(&flows), "--flows {flows}: expected 1 to {FLOWS_MAX}");
        let sockets = (0..flows).map(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)));
        let sockets: Vec<_> = sockets.collect::<std::io::Result<_>>().context("bind")?;
        Ok(Self {
            sink: sink_of(address),
            flows: sockets.into_iter().map(|socket| (socket, 0)).collect(),
            mix,
            mix_at: 0,
            // Different in every process, so that a server that lives on can't mistake one for
            // another.
            trial: std::process::id() << 8,
            arena: vec![0; BURST_PACKETS_MAX * SLOT_BYTES],
            batch: SendBatch::new(BURST_PACKETS_MAX, BURST_PACKETS_MAX),
        })
    }

    /// Sends `load` and asks what arrived.
    ///
    /// # Errors
    /// When the socket breaks or the server does not answer.
    pub(crate) fn run(&mut self, load: Load) -> Result<Outcome> {
        self.trial = self.trial.wrapping_add(1);
        self.flows.iter_mut().for_each(|(_, sequence)| *sequence = 0);
        let (mut pace, mut offered, mut flow) = (Pace::new(load.rate_pps), 0, 0);
        let started = Instant::now();
        let mut elapsed = Duration::ZERO;
        while elapsed < load.duration {
            match pace.due(elapsed) {
                Due::Wait(wait) => std::thread::sleep(wait),
                Due::Send(packets) => {
                    let sent = self.burst(flow, packets)?;
                    pace.sent(sent);
                    offered += sent as u64;
                    flow = (flow + 1) % self.flows.len();
                }
            }
            elapsed = started.elapsed();
        }
        let (received, reordered) = self.ask()?;
        Ok(Outcome { offered, received, reordered, seconds: elapsed.as_secs_f64() })
    }

    /// Sends up to `packets` of one flow in one call and gives how many went; those that did not
    /// were never offered.
    fn burst(&mut self, flow: usize, packets: usize) -> Result<usize> {
        let (socket, sequence) = &mut self.flows[flow];
        for slot in 0..packets {
            let sequence = *sequence + slot as u64;
            let header =
                Header { kind: Kind::Data, trial: self.trial, flow: flow as u32, sequence };
            let offset = slot * SLOT_BYTES;
            self.arena[offset..offset + HEADER_BYTES].copy_from_slice(&header.encode());
        }
        let messages = (0..packets).map(|slot| Datagrams {
            destination: self.sink.into(),
            segment_bytes: None,
            spans: [Span::new(slot * SLOT_BYTES, self.mix.bytes(self.mix_at + slot))],
        });
        match self.batch.send(socket.as_fd(), &self.arena, messages) {
            Ok(sent) => {
                *sequence += sent as u64;
                self.mix_at = (self.mix_at + sent) % self.mix.0.len();
                Ok(sent)
            }
            // The socket's own queue is full: its packets are still on this host.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let limit = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&limit)).ok();
                Ok(0)
            }
            // ENOBUFS: a queue behind the socket is full. As on a card, nothing was sent.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) =>
            {
                Ok(0)
            }
            Err(error) => Err(error).with_context(|| format!("send to {}", self.sink)),
        }
    }

    /// Asks for the trial's counts until two answers in a row agree.
    fn ask(&self) -> Result<(u64, u64)> {
        let (socket, _) = &self.flows[0];
        socket.set_read_timeout(Some(DRAIN)).context("limit the wait for the counts")?;
        let mut last = None;
        for sequence in 0..QUESTIONS_MAX {
            std::thread::sleep(DRAIN);
            let question = Header { kind: Kind::Count, trial: self.trial, flow: 0, sequence };
            // Whatever refuses the question, the next one follows.
            socket.send_to(&question.encode(), self.sink).ok();
            let mut answer = [0; ANSWER_BYTES];
            let Ok(length) = socket.recv(&mut answer) else { continue };
            let Some(counts) = counts(&answer[..length], question) else { continue };
            if last.replace(counts) == Some(counts) {
                return Ok(counts);
            }
        }
        bail!("the server at {} does not answer; is `traffic serve` running there?", self.sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_keeps_proportions_sizes_include_headers() {
        let Mix(sizes) = Mix::imix(1472).unwrap();
        let of = |packet: usize| sizes.iter().filter(|bytes| **bytes + 28 == packet).count();
        assert_eq!((sizes.len(), of(64), of(594), of(1472)), (12, 7, 4, 1));
        assert!(sizes.iter().all(|bytes| *bytes >= HEADER_BYTES), "room for the header");
        assert!(Mix::imix(593).is_none() && Mix::imix(1501).is_none());
    }

    #[test]
    fn outcome_reports_lost_of_offered() {
        let outcome = Outcome { offered: 2000, received: 1990, reordered: 3, seconds: 2.0 };
        assert!((outcome.lost_fraction() - 0.005).abs() < 1e-12);
        assert!((outcome.offered_pps() - 1000.0).abs() < 1e-9);
        assert_eq!(outcome.to_json()["lost"], json!(10));
        let none = Outcome { offered: 0, received: 0, reordered: 0, seconds: 1.0 };
        assert!(none.lost_fraction() == 0.0, "nothing offered, nothing lost");
    }
}

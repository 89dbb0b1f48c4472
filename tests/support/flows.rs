//! TCP flows that stay open and keep talking: small blocks all the time, echoed by the other side
//! and compared byte by byte. One thread each side, whatever the number of flows.

use std::collections::VecDeque;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::lab::{Namespace, comes_true};

/// Between two blocks of a flow.
const PERIOD: Duration = Duration::from_millis(20);

const BLOCK_BYTES: usize = 256;

/// Unanswered bytes after which a flow waits.
const AHEAD_MAX: u64 = 64 * 1024;

/// From the last block to its echo, at the end.
const LAST_ECHO: Duration = Duration::from_secs(5);

/// Open flows.
pub(crate) struct Flows {
    near: Vec<Flow>,
    far: Vec<TcpStream>,
}

/// What became of flows.
#[derive(Debug, Default)]
pub(crate) struct FlowReport {
    /// Flows that were whole and open to the end.
    pub(crate) open: usize,
    /// Why the others were not.
    pub(crate) broken: Vec<String>,
    /// Bytes that came back.
    pub(crate) bytes: u64,
    /// The longest time for which a flow that waited for an echo got nothing.
    pub(crate) longest_stall: Duration,
}

impl fmt::Display for FlowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { open, broken, bytes, longest_stall } = self;
        let kilobytes = bytes / 1000;
        write!(f, "{open} flows open, {kilobytes} kB echoed, longest stall {longest_stall:.1?}")?;
        if broken.is_empty() { Ok(()) } else { write!(f, ", broken: {broken:?}") }
    }
}

struct Flow {
    stream: TcpStream,
    written: u64,
    read: u64,
    waits_since: Option<Instant>,
    longest_stall: Duration,
    broken: Option<String>,
}

impl Flows {
    /// Connects `count` flows from one pod to another.
    ///
    /// # Panics
    /// When one cannot be connected.
    #[track_caller]
    pub(crate) fn open(from: &Namespace, to: &Namespace, address: Ipv4Addr, count: usize) -> Self {
        let listener = to.enter(|| TcpListener::bind((address, 0))).expect("the server listens");
        let target = listener.local_addr().expect("a listener has an address");
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let stream = from.enter(|| TcpStream::connect_timeout(&target, Duration::from_secs(5)));
            let stream = stream.unwrap_or_else(|error| panic!("TCP connect to {target}: {error}"));
            let (accepted, _) = listener.accept().expect("what was connected can be accepted");
            for stream in [&stream, &accepted] {
                stream.set_nonblocking(true).expect("an open socket can be set");
                stream.set_nodelay(true).expect("an open socket can be set");
            }
            near.push(Flow {
                stream,
                written: 0,
                read: 0,
                waits_since: None,
                longest_stall: Duration::ZERO,
                broken: None,
            });
            far.push(accepted);
        }
        Self { near, far }
    }

    /// Talks on all flows until `stop`, and then waits for the last echo.
    pub(crate) fn talk(self, stop: &AtomicBool) -> FlowReport {
        let Self { mut near, far } = self;
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| echo(far, &ended));
            while !stop.load(Ordering::Relaxed) {
                near.iter_mut().for_each(Flow::write);
                near.iter_mut().for_each(Flow::read);
                thread::sleep(PERIOD);
            }
            comes_true(LAST_ECHO, || {
                near.iter_mut().for_each(Flow::read);
                !near.iter().any(Flow::waits)
            });
            ended.store(true, Ordering::Relaxed);
        });
        let mut report = FlowReport::default();
        for flow in near {
            report.bytes += flow.read;
            report.longest_stall = report.longest_stall.max(flow.longest_stall);
            match flow.broken {
                Some(why) => report.broken.push(why),
                None if flow.read < flow.written => report.broken.push("stuck".to_owned()),
                None => report.open += 1,
            }
        }
        report
    }
}

impl Flow {
    fn waits(&self) -> bool {
        self.broken.is_none() && self.read < self.written
    }

    fn write(&mut self) {
        if self.broken.is_some() || self.written - self.read > AHEAD_MAX {
            return;
        }
        let block = bytes_at(self.written);
        match self.stream.write(&block) {
            Ok(count) => {
                self.written += count as u64;
                self.waits_since.get_or_insert_with(Instant::now);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => self.broken = Some(format!("write: {error}")),
        }
    }

    fn read(&mut self) {
        let mut block = [0; BLOCK_BYTES];
        while self.waits() {
            match self.stream.read(&mut block) {
                Ok(0) => self.broken = Some("closed by the other side".to_owned()),
                Ok(count) => {
                    if block[..count] != bytes_at(self.read)[..count] {
                        self.broken = Some("the data came back changed".to_owned());
                    }
                    self.read += count as u64;
                    let waited = self.waits_since.take().map_or(Duration::ZERO, |at| at.elapsed());
                    self.longest_stall = self.longest_stall.max(waited);
                    self.waits_since = self.waits().then(Instant::now);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => self.broken = Some(format!("read: {error}")),
            }
        }
    }
}

/// What a flow says from this position on: each byte follows from its place.
fn bytes_at(position: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    for (place, byte) in (position..).zip(&mut block) {
        // The low byte of a multiple: long cycles, and no two neighbours alike.
        *byte = (place.wrapping_mul(0x9E37_79B9) >> 16) as u8;
    }
    block
}

/// Sends back what comes, until `ended`; a flow that fails is the other side's to tell.
fn echo(streams: Vec<TcpStream>, ended: &AtomicBool) {
    let mut flows: Vec<(TcpStream, VecDeque<u8>)> =
        streams.into_iter().map(|stream| (stream, VecDeque::new())).collect();
    let mut buffer = [0; 4096];
    while !ended.load(Ordering::Relaxed) {
        for (stream, waiting) in &mut flows {
            if let Ok(count) = stream.read(&mut buffer) {
                waiting.extend(&buffer[..count]);
            }
            let (head, _) = waiting.as_slices();
            if let Ok(count) = stream.write(head) {
                waiting.drain(..count);
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
}

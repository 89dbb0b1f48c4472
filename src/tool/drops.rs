//! `weft drops`: which packets the workers drop, as they do it, with the reason and where to look.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::control::clock::format_rfc3339;
use crate::packet::echo::Quoted;
use crate::packet::header::protocol::{ICMP, ICMPV6, TCP, UDP};
use crate::stats::{DropReason, SAMPLE_BYTES_MAX};
use crate::status::{Drops, SCHEMA, Sample, Way};
use crate::tool::arguments::{DropsArguments, Output};
use crate::tool::ask::ask;
use crate::tool::pcapng;
use crate::tool::style::print;

/// Between two looks. A worker keeps the last 64 packets of each direction.
const PAUSE: Duration = Duration::from_millis(200);

/// Between two tries to reach a weftd that is started again.
const RETRY: Duration = Duration::from_secs(2);

/// A dropped packet, as far as this tool knows its reason.
#[derive(Debug)]
struct Dropped<'a> {
    sample: &'a Sample,
    reason: DropReason,
    bytes: Vec<u8>,
}

/// Shows what is dropped until the time is over; returns the sum of it.
pub(super) fn run(arguments: &DropsArguments) -> anyhow::Result<String> {
    let (socket, output) = (&arguments.answered.daemon.socket, arguments.answered.output);
    let mut looks = Looks::default();
    looks.next(socket)?;
    // What was dropped before the first look does not count.
    looks.dropped = 0;
    let mut file = arguments.write.as_deref().map(open).transpose()?;
    let (time, started) = (Duration::from_secs(arguments.seconds), Instant::now());
    let (mut shown, mut explained) = (0_u64, BTreeSet::new());
    loop {
        std::thread::sleep(PAUSE);
        let is_last = !arguments.follow && started.elapsed() >= time;
        let samples = match looks.next(socket) {
            Err(error) if arguments.follow => {
                writeln!(io::stderr(), "weft: {error:#}; waiting for weftd").ok();
                std::thread::sleep(RETRY);
                continue;
            }
            samples => samples?,
        };
        for dropped in samples.iter().filter_map(Dropped::parse) {
            if let Some(file) = &mut file {
                file.write_all(&dropped.to_pcapng()).context("cannot write the packets")?;
            }
            let line = match output {
                Some(Output::Json) => dropped.json()?,
                None => dropped.line(explained.insert(dropped.reason)),
            };
            if !print(&line)? {
                return Ok(String::new());
            }
            shown += 1;
        }
        if is_last {
            let sum = output.is_none().then(|| looks.sum(shown, arguments.seconds));
            return Ok(sum.unwrap_or_default());
        }
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    let failed = || format!("cannot write {}", path.display());
    let mut file = File::create(path).with_context(failed)?;
    file.write_all(&pcapng::beginning(SAMPLE_BYTES_MAX as u32)).with_context(failed)?;
    Ok(file)
}

/// What weftd says at one look after the other.
#[derive(Default)]
struct Looks {
    /// Which samples were seen, in weftd's words.
    seen: String,
    /// All that this weftd had dropped at the last look.
    total: u64,
    /// Dropped since the first look.
    dropped: u64,
}

impl Looks {
    fn next(&mut self, socket: &Path) -> anyhow::Result<Vec<Sample>> {
        let answer = ask(socket, &format!("/drops/{}", self.seen));
        let (_, Drops { error, next, dropped, samples, .. }) =
            answer.inspect_err(|_| self.seen.clear())?;
        if let Some(error) = error {
            bail!("{error}");
        }
        // A weftd that was started meanwhile counts from nothing.
        self.dropped += dropped.checked_sub(self.total).unwrap_or(dropped);
        (self.seen, self.total) = (next, dropped);
        Ok(samples)
    }

    fn sum(&self, shown: u64, seconds: u64) -> String {
        match self.dropped {
            0 => format!(
                "weftd dropped no packet in {seconds} s. What devices drop is in `weft status`; \
                 `weft check` looks for rules and routes that drop\n"
            ),
            dropped => {
                format!("weftd dropped {dropped} packets in {seconds} s; shown: {shown} samples\n")
            }
        }
    }
}

impl<'a> Dropped<'a> {
    fn parse(sample: &'a Sample) -> Option<Self> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        Some(Self {
            sample,
            reason: *DropReason::ALL.iter().find(|reason| reason.id() == sample.reason)?,
            bytes: sample.bytes.as_bytes().chunks(2).map(byte).collect::<Option<_>>()?,
        })
    }

    fn json(&self) -> anyhow::Result<String> {
        let mut line = serde_json::to_value(self.sample)?;
        line["schema"] = SCHEMA.into();
        Ok(format!("{line}\n"))
    }

    /// What the reason means, and where to look.
    fn meaning(&self) -> String {
        format!("{} Look at: {}", self.reason.describe(), self.reason.advice())
    }

    /// A line, and below it what the reason means, if it `is_new`.
    fn line(&self, is_new: bool) -> String {
        let Sample { direction, packets, peer, length_bytes, .. } = self.sample;
        let at = Duration::from_nanos(self.sample.at_unix_nanoseconds);
        let time = format_rfc3339(at.as_secs());
        let mut line = format!(
            "{}.{:03} {:7} {:19} {}",
            time.get(11..19).unwrap_or_default(),
            at.subsec_millis(),
            direction.name(),
            self.reason.id(),
            described(&self.bytes, *length_bytes),
        );
        // Writing to a string cannot fail.
        if *packets > 1 {
            write!(line, ", {packets} packets in one").ok();
        }
        if let Some(peer) = peer {
            let word = if *direction == Way::Egress { "to" } else { "from" };
            write!(line, ", {word} {peer}").ok();
        }
        if is_new {
            write!(line, "\n             {}", self.meaning()).ok();
        }
        line + "\n"
    }

    fn to_pcapng(&self) -> Vec<u8> {
        let peer = self.sample.peer.map(|peer| format!(" ({peer})")).unwrap_or_default();
        let comment = format!("{}{peer}: {}", self.reason.id(), self.meaning());
        pcapng::packet(self.sample, &self.bytes, &comment)
    }
}

/// `10.5.1.2:53 > 10.5.2.3:4000 UDP, 84 bytes`, from what may be cut or no packet at all.
fn described(bytes: &[u8], length_bytes: u32) -> String {
    let Some(Quoted { source, destination, protocol, payload, .. }) = Quoted::read(bytes) else {
        let hex: String = bytes.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        return format!("no IP packet, {length_bytes} bytes: {hex}");
    };
    let is_fragment = matches!(bytes, [0x40..=0x4f, _, _, _, _, _, high, low, ..]
        if (high & 0x1f, *low) != (0, 0));
    // A header that is too short has its ports nowhere.
    let is_short = matches!(bytes, [0x40..=0x44, ..]);
    let has_ports = matches!(protocol, TCP | UDP) && !is_fragment && !is_short;
    let ports = payload.first_chunk().filter(|_| has_ports);
    let [from, to] = match ports {
        None => [source, destination].map(|address| address.to_string()),
        Some(&[a, b, c, d]) => {
            let [from, to] = [[a, b], [c, d]].map(u16::from_be_bytes);
            [(source, from), (destination, to)].map(|end| SocketAddr::from(end).to_string())
        }
    };
    let protocol = match protocol {
        ICMP => "ICMP".to_owned(),
        ICMPV6 => "ICMPv6".to_owned(),
        TCP => "TCP".to_owned(),
        UDP => "UDP".to_owned(),
        other => format!("protocol {other}"),
    };
    let fragment = if is_fragment { " fragment" } else { "" };
    format!("{from} > {to} {protocol}{fragment}, {length_bytes} bytes")
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn packets_are_described_however_broken() {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, UDP, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3];
        packet.extend([0, 53, 0x10, 0, 0, 8, 0, 0]);
        let described = |bytes: &[u8]| described(bytes, bytes.len() as u32);
        assert_eq!(described(&packet), "10.5.1.2:53 > 10.5.2.3:4096 UDP, 28 bytes");
        assert_eq!(described(&packet[..21]), "10.5.1.2 > 10.5.2.3 UDP, 21 bytes");
        packet[6..8].copy_from_slice(&[0x20, 1]);
        assert_eq!(described(&packet), "10.5.1.2 > 10.5.2.3 UDP fragment, 28 bytes");
        (packet[0], packet[6], packet[7]) = (0x41, 0, 0);
        assert_eq!(described(&packet), "10.5.1.2 > 10.5.2.3 UDP, 28 bytes");
        assert_eq!(
            described(&packet[..19]),
            format!("no IP packet, 19 bytes: {}", {
                packet[..19].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
            })
        );
        assert_eq!(described(&[]), "no IP packet, 0 bytes: ");

        let mut packet = vec![0x60, 0, 0, 0, 0, 8, UDP, 64];
        packet.extend("fd00:5::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend("fd00:6::3".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend([0, 53, 0x10, 0, 0, 8, 0, 0]);
        assert_eq!(described(&packet), "[fd00:5::2]:53 > [fd00:6::3]:4096 UDP, 48 bytes");
        assert_eq!(described(&packet[..43]), "fd00:5::2 > fd00:6::3 UDP, 43 bytes");
        packet[6] = ICMPV6;
        assert_eq!(described(&packet), "fd00:5::2 > fd00:6::3 ICMPv6, 48 bytes");
        assert!(described(&packet[..39]).starts_with("no IP packet, 39 bytes: 60"));
    }

    #[test]
    fn a_reason_is_explained_once() {
        let sample = Sample {
            at_unix_nanoseconds: 1_795_225_924_123_456_789,
            direction: Way::Egress,
            worker: 0,
            reason: "no-route".to_owned(),
            packets: 3,
            peer: None,
            length_bytes: 4000,
            bytes: "60".to_owned(),
        };
        let dropped = Dropped::parse(&sample).unwrap();
        let line = dropped.line(false);
        for part in ["egress  no-route ", " 4000 bytes: 60,", " 3 packets"] {
            assert!(line.contains(part), "{part:?} is not in {line}");
        }
        assert!(line.ends_with('\n') && line[8..].starts_with(".123 "), "{line}");
        assert!(dropped.line(true).contains(DropReason::NoRoute.advice()));
        assert!(!line.contains(DropReason::NoRoute.advice()), "{line}");
        for broken in [
            Sample { reason: "zz".to_owned(), ..sample.clone() },
            Sample { bytes: "zz".to_owned(), ..sample },
        ] {
            assert!(Dropped::parse(&broken).is_none(), "{broken:?}");
        }
    }
}

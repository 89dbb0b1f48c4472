//! `weft drops`: which packets the workers drop, as they do it, with the reason and where to look.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::control::clock::format_rfc3339;
use crate::daemon::status::SCHEMA;
use crate::stats::{DropReason, SAMPLE_BYTES_MAX};
use crate::tool::arguments::{DropsArguments, Output};
use crate::tool::pcapng::{self, Way};
use crate::tool::{advice, ask};

/// Between two looks. A worker keeps the last 64 packets of each direction.
const PAUSE: Duration = Duration::from_millis(200);

const TCP: u8 = 6;
const UDP: u8 = 17;

/// A dropped packet, as weftd tells of it.
#[derive(Debug)]
struct Dropped {
    at: Duration,
    is_egress: bool,
    reason: DropReason,
    packets: u64,
    peer: Option<String>,
    length_bytes: u32,
    bytes: Vec<u8>,
}

/// Shows what is dropped until the time is over; returns the sum of it.
pub(super) fn run(arguments: &DropsArguments) -> anyhow::Result<String> {
    let mut file = arguments.write.as_deref().map(open).transpose()?;
    let started = Instant::now();
    let (mut seen, mut first_total, mut shown) = (String::new(), None, 0);
    let mut explained = BTreeSet::new();
    loop {
        let answer = ask(&arguments.answered.daemon.socket, &format!("/drops/{seen}"))?;
        if let Some(error) = answer["error"].as_str() {
            bail!("{error}");
        }
        let total = answer["dropped"].as_u64().unwrap_or(0);
        let is_first = first_total.is_none();
        let before = *first_total.get_or_insert(total);
        answer["next"].as_str().unwrap_or_default().clone_into(&mut seen);
        // What a reader before us has wanted is old.
        let samples = answer["samples"].as_array().filter(|_| !is_first);
        for sample in samples.into_iter().flatten() {
            let Some(dropped) = Dropped::parse(sample) else { continue };
            if let Some(file) = &mut file {
                file.write_all(&dropped.to_pcapng()).context("cannot write the packets")?;
            }
            let line = match arguments.answered.output {
                Some(Output::Json) => {
                    let mut line = sample.clone();
                    line["schema"] = SCHEMA.into();
                    format!("{line}\n")
                }
                None => dropped.line(explained.insert(dropped.reason)),
            };
            if io::stdout().write_all(line.as_bytes()).is_err() {
                // A reader that went away, such as `head`, has what it wanted.
                return Ok(String::new());
            }
            shown += 1;
        }
        if !arguments.follow && started.elapsed() >= Duration::from_secs(arguments.seconds) {
            return Ok(match arguments.answered.output {
                Some(Output::Json) => String::new(),
                None => sum(total.saturating_sub(before), shown, arguments.seconds),
            });
        }
        std::thread::sleep(PAUSE);
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    let failed = || format!("cannot write {}", path.display());
    let mut file = File::create(path).with_context(failed)?;
    file.write_all(&pcapng::beginning(SAMPLE_BYTES_MAX as u32)).with_context(failed)?;
    Ok(file)
}

fn sum(dropped: u64, shown: u64, seconds: u64) -> String {
    match dropped {
        0 => format!(
            "weftd dropped no packet in {seconds} s. What the kernel drops before or after it is \
             in `weft status`, line `devices`\n"
        ),
        _ => format!("weftd dropped {dropped} packets in {seconds} s; shown: {shown} samples\n"),
    }
}

impl Dropped {
    fn parse(sample: &Value) -> Option<Self> {
        let id = sample["reason"].as_str()?;
        let hex = sample["bytes"].as_str()?.as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        Some(Self {
            at: Duration::from_nanos(sample["at_unix_nanoseconds"].as_u64()?),
            is_egress: sample["direction"].as_str()? == "egress",
            reason: *DropReason::ALL.iter().find(|reason| reason.id() == id)?,
            packets: sample["packets"].as_u64()?,
            peer: sample["peer"].as_str().map(str::to_owned),
            length_bytes: u32::try_from(sample["length_bytes"].as_u64()?).ok()?,
            bytes: hex.chunks(2).map(byte).collect::<Option<_>>()?,
        })
    }

    /// A line, and below it what the reason means, if it `is_new`.
    fn line(&self, is_new: bool) -> String {
        let time = format_rfc3339(self.at.as_secs());
        let direction = if self.is_egress { "egress" } else { "ingress" };
        let mut line = format!(
            "{}.{:03} {direction:7} {:19} {}",
            time.get(11..19).unwrap_or_default(),
            self.at.subsec_millis(),
            self.reason.id(),
            described(&self.bytes, self.length_bytes),
        );
        // Writing to a string cannot fail.
        if self.packets > 1 {
            write!(line, ", {} packets in one", self.packets).ok();
        }
        if let Some(peer) = &self.peer {
            write!(line, ", {} {peer}", if self.is_egress { "to" } else { "from" }).ok();
        }
        if is_new {
            let (meaning, look) = (self.reason.describe(), advice::of(self.reason));
            write!(line, "\n             {meaning} Look at: {look}").ok();
        }
        line + "\n"
    }

    fn to_pcapng(&self) -> Vec<u8> {
        let peer = self.peer.as_ref().map(|peer| format!(" ({peer})"));
        let comment = format!(
            "{}{}: {} Look at: {}",
            self.reason.id(),
            peer.unwrap_or_default(),
            self.reason.describe(),
            advice::of(self.reason)
        );
        pcapng::packet(&pcapng::Packet {
            at: self.at,
            way: if self.is_egress { Way::Outbound } else { Way::Inbound },
            length_bytes: self.length_bytes,
            bytes: &self.bytes,
            comment: &comment,
        })
    }
}

/// `10.5.1.2:53 > 10.5.2.3:4000 UDP, 84 bytes`, from what may be cut or no packet at all.
fn described(bytes: &[u8], length_bytes: u32) -> String {
    let address = |at: usize| {
        let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets))
    };
    let is_ipv4 = bytes.first().is_some_and(|first| first >> 4 == 4);
    let (Some(source), Some(destination), Some(protocol), true) =
        (address(12), address(16), bytes.get(9), is_ipv4)
    else {
        let hex: String = bytes.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        return format!("no IPv4 packet, {length_bytes} bytes: {hex}");
    };
    let header_bytes = usize::from(bytes[0] & 0xf) * 4;
    let is_first = bytes[6] & 0x1f == 0 && bytes[7] == 0;
    let port = |at: usize| {
        let has_ports = is_first && matches!(*protocol, TCP | UDP) && header_bytes >= 20;
        let at = header_bytes + at;
        let two: [u8; 2] = bytes.get(at..at + 2).filter(|_| has_ports)?.try_into().ok()?;
        Some(format!(":{}", u16::from_be_bytes(two)))
    };
    let protocol = match *protocol {
        1 => "ICMP".to_owned(),
        TCP => "TCP".to_owned(),
        UDP => "UDP".to_owned(),
        other => format!("protocol {other}"),
    };
    let fragment = if is_first { "" } else { " fragment" };
    let (from, to) = (port(0).unwrap_or_default(), port(2).unwrap_or_default());
    format!("{source}{from} > {destination}{to} {protocol}{fragment}, {length_bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            format!("no IPv4 packet, 19 bytes: {}", {
                packet[..19].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
            })
        );
        assert_eq!(described(&[]), "no IPv4 packet, 0 bytes: ");
    }

    #[test]
    fn a_reason_is_explained_once() {
        let sample = json!({
            "at_unix_nanoseconds": 1_795_225_924_123_456_789_u64, "direction": "egress",
            "reason": "no-route", "packets": 3, "peer": null, "length_bytes": 4000, "worker": 0,
            "bytes": "60",
        });
        let dropped = Dropped::parse(&sample).unwrap();
        let line = dropped.line(false);
        let expected =
            "egress  no-route            no IPv4 packet, 4000 bytes: 60, 3 packets in one\n";
        assert!(line.ends_with(expected) && line[8..].starts_with(".123 "), "{line}");
        assert!(dropped.line(true).contains("No lease covers the destination. Look at: the dest"));
        for broken in ["reason", "bytes", "direction"] {
            let mut sample = sample.clone();
            sample[broken] = json!("zz");
            let dropped = Dropped::parse(&sample);
            assert!(dropped.is_none_or(|dropped| !dropped.is_egress), "{broken}");
        }
    }
}

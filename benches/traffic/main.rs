//! Traffic of the benchmark that the usual tools don't make: a ping-pong whose lost packets count,
//! datagrams at a set rate with sequence numbers, and a search for the rate without loss.
//!
//! Owns the command line; results are JSON on stdout. Shares no code with the dataplane but the
//! batched system calls.

mod load;
mod pace;
mod ping;
mod scatter;
mod search;
mod server;
mod wire;

use std::io::Write;
use std::net::Ipv4Addr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::load::{Load, Mix, Sender};

const USAGE: &str = "\
usage: traffic serve  --bind ADDRESS
       traffic ping   --to ADDRESS --seconds S [--bytes N]
       traffic flood  --to ADDRESS --seconds S [--pps R] [--flows N] (--bytes N | --imix MTU)
       traffic search --to ADDRESS --seconds S (--bytes N | --imix MTU)
       traffic scatter --to NETWORK --subnets N --bits LENGTH --seconds S [--bytes N]
serve   answers the others: UDP 11200 echoes, UDP 11201 counts; runs until it is ended
ping    one datagram and its echo after the other; half the round trip, in microseconds
flood   datagrams at R a second for S seconds, or as fast as they go; what of it arrived
search  the highest rates without loss and with at most 0.5 %, in trials of S seconds
scatter datagrams as fast as they go to the first N subnets of NETWORK at random; what was sent
--bytes is UDP payload; --imix MTU mixes IPv4 packets of 64, 594 and MTU bytes 7:4:1.
";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let mut out = std::io::stdout();
    if matches!(command.as_str(), "" | "-h" | "--help" | "help") {
        return Ok(out.write_all(USAGE.as_bytes())?);
    }
    let flags = Flags::parse(arguments)?;
    let result = match command.as_str() {
        "serve" => return server::run(flags.needed("--bind")?),
        "ping" => ping::run(flags.needed("--to")?, flags.seconds()?, flags.bytes_or(64)?)?,
        "flood" => {
            let load = Load { rate_pps: flags.optional("--pps")?, duration: flags.seconds()? };
            let flows = flags.optional("--flows")?.unwrap_or(1);
            Sender::new(flags.needed("--to")?, flows, flags.mix()?)?.run(load)?.to_json()
        }
        "search" => {
            let sender = Sender::new(flags.needed("--to")?, 1, flags.mix()?)?;
            search::run(sender, flags.seconds()?)?
        }
        "scatter" => scatter::run(
            flags.needed("--to")?,
            flags.needed("--bits")?,
            flags.needed("--subnets")?,
            flags.bytes_or(64)?,
            flags.seconds()?,
        )?,
        other => bail!("unknown command {other}; see --help"),
    };
    writeln!(out, "{result}")?;
    Ok(())
}

/// Flags and their values, as they were given.
struct Flags(Vec<(String, String)>);

impl Flags {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        const KNOWN: [&str; 9] = [
            "--bind",
            "--to",
            "--seconds",
            "--bytes",
            "--imix",
            "--pps",
            "--flows",
            "--subnets",
            "--bits",
        ];
        let mut flags = Vec::new();
        while let Some(name) = arguments.next() {
            ensure!(KNOWN.contains(&name.as_str()), "unknown flag {name}; see --help");
            let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
            flags.push((name, value));
        }
        Ok(Self(flags))
    }

    fn optional<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some((_, value)) = self.0.iter().find(|(given, _)| given == name) else {
            return Ok(None);
        };
        let parsed = value.parse().ok();
        Ok(Some(parsed.with_context(|| format!("{name} {value}: not understood; see --help"))?))
    }

    fn needed<T: FromStr>(&self, name: &str) -> Result<T> {
        self.optional(name)?.with_context(|| format!("{name} is missing; see --help"))
    }

    fn seconds(&self) -> Result<Duration> {
        let seconds = self.needed("--seconds")?;
        Duration::try_from_secs_f64(seconds)
            .with_context(|| format!("--seconds {seconds}: expected a positive number"))
    }

    /// UDP payload of each datagram.
    fn bytes_or(&self, default: usize) -> Result<usize> {
        let bytes = self.optional("--bytes")?.unwrap_or(default);
        ensure!(
            (wire::HEADER_BYTES..=wire::DATAGRAM_BYTES_MAX).contains(&bytes),
            "--bytes {bytes}: expected {} to {}",
            wire::HEADER_BYTES,
            wire::DATAGRAM_BYTES_MAX
        );
        Ok(bytes)
    }

    fn mix(&self) -> Result<Mix> {
        match self.optional("--imix")? {
            None => Ok(Mix::one_size(self.bytes_or(64)?)),
            Some(mtu) => Mix::imix(mtu)
                .with_context(|| format!("--imix {mtu}: expected an MTU of 594 to 1500 bytes")),
        }
    }
}

/// Where the server of `traffic serve` on `address` answers pings.
fn echo_of(address: Ipv4Addr) -> std::net::SocketAddrV4 {
    std::net::SocketAddrV4::new(address, 11_200)
}

/// Where it counts.
fn sink_of(address: Ipv4Addr) -> std::net::SocketAddrV4 {
    std::net::SocketAddrV4::new(address, 11_201)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(line: &str) -> Result<Flags> {
        Flags::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn command_line_parses_or_names_its_fault() {
        let given = flags("--to 10.5.2.2 --seconds 0.5 --pps 1000").unwrap();
        assert_eq!(given.needed::<Ipv4Addr>("--to").unwrap(), Ipv4Addr::new(10, 5, 2, 2));
        assert_eq!(given.seconds().unwrap(), Duration::from_millis(500));
        assert_eq!(given.optional::<u64>("--pps").unwrap(), Some(1000));
        assert_eq!(given.optional::<usize>("--flows").unwrap(), None);
        for (line, word) in [("--up 1", "--up"), ("--pps", "--pps")] {
            assert!(flags(line).err().unwrap().to_string().contains(word), "{line}");
        }
        let wrong = flags("--seconds -1 --bytes 2").unwrap();
        assert!(wrong.seconds().unwrap_err().to_string().contains("--seconds -1"));
        assert!(wrong.mix().err().unwrap().to_string().contains("--bytes 2"));
    }
}

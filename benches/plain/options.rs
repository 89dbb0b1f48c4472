//! The command line that the programs of the plain protocol share.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context, Result, bail};

/// Destinations inside `network/mask` go to `peer`.
pub(crate) struct Route {
    pub(crate) network: u32,
    pub(crate) mask: u32,
    pub(crate) peer: SocketAddrV4,
}

/// What the command line said.
pub(crate) struct Options {
    /// The TUN device to create.
    pub(crate) tun_name: String,
    /// The address and port to receive on.
    pub(crate) bind: SocketAddrV4,
    pub(crate) routes: Vec<Route>,
    /// `--ports`, understood by the test peer only.
    pub(crate) ports: Option<usize>,
}

impl Options {
    /// Reads the process's arguments; `None` when help was asked for.
    pub(crate) fn from_args() -> Result<Option<Self>> {
        let (mut tun_name, mut bind, mut routes, mut ports) = (None, None, Vec::new(), None);
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            if flag == "--help" || flag == "-h" {
                return Ok(None);
            }
            let value = args.next().with_context(|| format!("{flag} needs a value"))?;
            match flag.as_str() {
                "--tun" => tun_name = Some(value),
                "--bind" => {
                    bind = Some(value.parse().with_context(|| {
                        format!("--bind {value}: expected ADDRESS:PORT, such as 192.0.2.1:8285")
                    })?);
                }
                "--route" => routes.push(parse_route(&value)?),
                "--ports" => {
                    ports = Some(value.parse().with_context(|| {
                        format!("--ports {value}: expected a number, 0 for a new port per packet")
                    })?);
                }
                _ => bail!("unknown flag {flag}; see --help"),
            }
        }
        Ok(Some(Self {
            tun_name: tun_name.context("--tun NAME is missing")?,
            bind: bind.context("--bind ADDRESS:PORT is missing")?,
            routes,
            ports,
        }))
    }
}

pub(crate) fn parse_route(text: &str) -> Result<Route> {
    let parse = || {
        let (prefix, peer) = text.split_once('=')?;
        let (address, length) = prefix.split_once('/')?;
        let address: Ipv4Addr = address.parse().ok()?;
        let length: u32 = length.parse().ok().filter(|length| *length <= 32)?;
        let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
        Some(Route { network: address.to_bits() & mask, mask, peer: peer.parse().ok()? })
    };
    parse().with_context(|| {
        format!("--route {text}: expected SUBNET=ADDRESS:PORT, such as 10.5.2.0/24=192.0.2.2:8285")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_route_names_itself() {
        for text in ["", "10.5.2.0/24", "10.5.2.0/33=192.0.2.2:1", "10.5.2/24=192.0.2.2:1"] {
            let error = parse_route(text).err().unwrap().to_string();
            assert!(error.contains(&format!("--route {text}:")), "{error}");
        }
    }
}

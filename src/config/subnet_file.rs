//! `subnet.env`: the four lines, or six with IPv6, that container runtimes and root's scripts
//! source, and what the last run left in them.

use std::path::Path;

use rustix::fs::Mode;

use crate::config::whole_file::{self, FileError};
use crate::route::{IpAddress, Prefix, Prefixes};

const NETWORK_KEY: &str = "FLANNEL_NETWORK";
const SUBNET_KEY: &str = "FLANNEL_SUBNET";
const NETWORK_V6_KEY: &str = "FLANNEL_IPV6_NETWORK";
const SUBNET_V6_KEY: &str = "FLANNEL_IPV6_SUBNET";
const MTU_KEY: &str = "FLANNEL_MTU";
const MASQUERADE_KEY: &str = "FLANNEL_IPMASQ";

/// Largest file that is read back; ours has about 100 bytes, others may have added their own.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// Mode of the file, whatever the umask: everybody may read it.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// What containers on this host need to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubnetFile {
    /// The overlay's networks.
    pub networks: Prefixes,
    /// This host's subnets.
    pub subnets: Prefixes,
    /// MTU of the overlay.
    pub mtu_bytes: u32,
    /// Whether masquerading is done here, so that container runtimes leave it alone.
    pub masquerade: bool,
}

/// What the last run left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Previous {
    /// The overlay's networks then.
    pub networks: Option<Prefixes>,
    /// The subnets that this host had.
    pub subnets: Option<Prefixes>,
    /// MTU of the overlay then.
    pub mtu_bytes: Option<u32>,
    /// Whether masquerading was done here.
    pub masquerade: bool,
    /// For the log: what in the file could not be used.
    pub complaints: Vec<String>,
}

impl SubnetFile {
    /// The text, byte for byte as flanneld writes it.
    pub fn render(&self) -> String {
        let Self { networks, subnets, mtu_bytes, masquerade } = self;
        let v4 = family([NETWORK_KEY, SUBNET_KEY], networks.v4().zip(subnets.v4()));
        let v6 = family([NETWORK_V6_KEY, SUBNET_V6_KEY], networks.v6().zip(subnets.v6()));
        format!("{v4}{v6}{MTU_KEY}={mtu_bytes}\n{MASQUERADE_KEY}={masquerade}\n")
    }

    /// Writes the file at `path`, and makes its directory if it is missing.
    ///
    /// On an error the old file, if any, is as it was.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        whole_file::write(path, self.render().as_bytes(), FILE_MODE)
    }
}

impl Previous {
    /// Reads `path`; a missing file is a first start.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let bytes = whole_file::read(path, FILE_BYTES_MAX)?;
        Ok(bytes.map(|bytes| Self::parse(&String::from_utf8_lossy(&bytes))).unwrap_or_default())
    }

    /// Reads the text as flanneld's dotenv reader does: comments, `export`, quotes, `KEY: value`.
    /// One line without a key spoils the whole file; a bad prefix only itself.
    pub fn parse(text: &str) -> Self {
        let mut previous = Self::default();
        let (mut network, mut subnet, mut network_v6, mut subnet_v6) = (None, None, None, None);
        for (index, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match assignment(line) {
                Some((NETWORK_KEY, value)) => network = Some(value),
                Some((SUBNET_KEY, value)) => subnet = Some(value),
                Some((NETWORK_V6_KEY, value)) => network_v6 = Some(value),
                Some((SUBNET_V6_KEY, value)) => subnet_v6 = Some(value),
                Some((MTU_KEY, value)) => previous.mtu_bytes = value.parse().ok(),
                Some((MASQUERADE_KEY, value)) => previous.masquerade = value == "true",
                Some(_) => {}
                None => {
                    let complaint = format!("line {} of the subnet file has no key", index + 1);
                    return Self { complaints: vec![complaint], ..Self::default() };
                }
            }
        }
        let network = network.and_then(|text| previous.only_prefix(NETWORK_KEY, text));
        let subnet = subnet.and_then(|text| previous.only_prefix(SUBNET_KEY, text));
        let network_v6 = network_v6.and_then(|text| previous.only_prefix(NETWORK_V6_KEY, text));
        let subnet_v6 = subnet_v6.and_then(|text| previous.only_prefix(SUBNET_V6_KEY, text));
        previous.networks = Prefixes::new(network, network_v6);
        previous.subnets = Prefixes::new(subnet, subnet_v6);
        previous
    }

    /// The IPv4 subnet that this host had.
    pub fn subnet(&self) -> Option<Prefix> {
        self.subnets.and_then(Prefixes::v4)
    }

    /// The one valid prefix in a comma-separated list; more than one is none.
    fn only_prefix<A: IpAddress>(&mut self, key: &str, text: &str) -> Option<Prefix<A>> {
        let mut prefixes = Vec::new();
        for item in text.split(',') {
            match item.parse() {
                Ok(prefix) => prefixes.push(prefix),
                Err(error) => self.complaints.push(format!("{key} in the subnet file: {error}")),
            }
        }
        if prefixes.len() > 1 {
            self.complaints.push(format!("{key} in the subnet file has more than one entry"));
            return None;
        }
        prefixes.pop()
    }
}

/// The lines of a family that there is.
fn family<A: IpAddress>(keys: [&str; 2], of: Option<(Prefix<A>, Prefix<A>)>) -> String {
    let [network_key, subnet_key] = keys;
    of.map_or_else(String::new, |(network, subnet)| {
        let (address, length) = (subnet.first_host(), subnet.length_bits());
        format!("{network_key}={network}\n{subnet_key}={address}/{length}\n")
    })
}

/// Key and value of a line that is not a comment; `None` without a key.
fn assignment(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(['=', ':'])?;
    let key = key.trim();
    let key = key.strip_prefix("export ").map_or(key, str::trim_start);
    (!key.is_empty()).then(|| (key, unquoted(value.trim())))
}

/// The value without its quotes, or without the comment after it.
fn unquoted(value: &str) -> &str {
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote)
            && let Some(end) = rest.find(quote)
        {
            return &rest[..end];
        }
    }
    let end = value.find(" #").unwrap_or(value.len());
    value[..end].trim_end()
}

#[cfg(test)]
#[path = "subnet_file_tests.rs"]
mod tests;

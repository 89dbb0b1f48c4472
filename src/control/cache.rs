//! The cache for an offline start, as a file: the network configuration, the own subnet and the
//! peers. Pure: bytes in, types out.
//!
//! The text is one line with the length and a checksum of the rest, and a JSON object. A cache
//! has to match what this start knows, and its entries are validated like those of the store. One
//! invalid entry makes the whole cache invalid: weft does not write such.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::config::network::NetworkConfig;
use crate::control::lease::{Lease, Lifetime, Peers};
use crate::control::rejected::Rejected;
use crate::control::snapshot::ENTRIES_MAX;
use crate::control::{clock, peers};
use crate::failure::with_causes;
use crate::route::Prefixes;

/// Oldest cache that a start may use: a lease's life. A node that was away for longer has lost its
/// subnet by the rules of the store.
pub const AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// How far ahead of the clock a cache may be: clocks are set by seconds at the start of a host.
const AHEAD_MAX: Duration = Duration::from_secs(5 * 60);
/// Largest cache: 256 bytes for each lease that a store may hold, of which a usual one takes 100.
pub const BYTES_MAX: u64 = 256 * ENTRIES_MAX as u64;

/// First word of the file; the number changes with its form.
const MAGIC: &str = "weft-cache-2";

/// Enough of a text to recognise it in a log line.
const SHOWN_CHARACTERS_MAX: usize = 200;
/// Longest first line: the name, a length and a checksum.
const LINE_BYTES_MAX: usize = 64;

/// What a node knew of its store at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// When the store last confirmed it, in seconds since 1970.
    pub as_of_unix: u64,
    /// The newest revision of the store that was seen.
    pub revision: i64,
    /// Which store it was; 0 if it did not say.
    pub cluster: u64,
    /// The cluster's networks.
    pub networks: Prefixes,
    /// The own entry.
    pub own: Lease,
    /// When its lease ends, in seconds since 1970; `None` for a reservation.
    pub ends_unix: Option<u64>,
    /// The peers.
    pub peers: Arc<Peers>,
}

/// What a cache has to fit.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// Which store is used, in [`crate::config::options::StoreOptions::identity`]'s words.
    pub store: &'a str,
    /// The networks by the subnet file.
    pub networks: Prefixes,
    /// The own subnets by the subnet file.
    pub subnets: Prefixes,
    /// The own address by which the node is known.
    pub address: IpAddr,
    /// Seconds since 1970.
    pub now_unix: u64,
}

/// A cache that fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    /// The network's configuration.
    pub config: NetworkConfig,
    /// The store's content.
    pub known: Known,
}

/// Why bytes are no cache to start from, or cannot be made, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CacheError(String);

impl From<serde_json::Error> for CacheError {
    fn from(error: serde_json::Error) -> Self {
        Self(format!("it is not the JSON of a cache: {error}"))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    as_of_unix: u64,
    store: String,
    revision: i64,
    cluster: u64,
    config: Box<RawValue>,
    own: Entry,
    ends_unix: Option<u64>,
    peers: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    created: i64,
    value: Box<RawValue>,
}

/// The file's bytes.
pub fn render(store: &str, config: &NetworkConfig, known: &Known) -> Result<Vec<u8>, CacheError> {
    let Known { as_of_unix, revision, cluster, networks: _, own, ends_unix, peers } = known;
    let json = serde_json::value::to_raw_value;
    let document = Document {
        as_of_unix: *as_of_unix,
        store: store.to_owned(),
        revision: *revision,
        cluster: *cluster,
        config: json(&config.to_json())?,
        own: Entry::of(own)?,
        ends_unix: *ends_unix,
        // A value that its node filled to the limit may be too long in our spelling: the store
        // brings such a peer, the cache does not.
        peers: peers.values().filter_map(|peer| Entry::of(peer).ok()).collect(),
    };
    let body = serde_json::to_vec(&document)?;
    let sealed = seal(&body);
    if sealed.len() as u64 <= BYTES_MAX {
        return Ok(sealed);
    }
    let bytes = sealed.len();
    Err(CacheError(format!("it would have {bytes} bytes, more than the {BYTES_MAX} allowed")))
}

/// Reads the file's bytes and holds them against what is expected.
pub fn parse(bytes: &[u8], expected: &Expected<'_>) -> Result<Cache, CacheError> {
    let body = unseal(bytes)?;
    let document: Document = serde_json::from_slice(body)?;
    let Document { as_of_unix, store, revision, cluster, config, own, ends_unix, peers } = document;
    check_age(as_of_unix, ends_unix, expected.now_unix)?;
    same("store", store.as_str(), expected.store)?;
    let config = NetworkConfig::parse(config.get().as_bytes()).map_err(|error| {
        let why = with_causes(&error);
        CacheError(format!("the network configuration in it cannot be used: {why}"))
    })?;
    same("network", config.networks(), expected.networks)?;
    let own = own.lease()?;
    same("subnet", own.subnets, expected.subnets)?;
    same("public address", own.attributes.node_address(), expected.address)?;
    if !config.is_leasable(own.subnets) {
        return Err(unusable(
            &own.key,
            "the network configuration in it does not allow this subnet",
        ));
    }
    let networks = config.networks();
    let leases = peers.into_iter().map(|it| it.lease().map(Arc::new));
    let leases = leases.collect::<Result<Vec<_>, _>>()?;
    let (peers, rejected) = peers::select(leases.iter(), &own, networks);
    // Of one whose IPv4 is used, IPv6 may not be.
    let is_used = |entry: &&Rejected| peers.values().any(|peer| peer.key == entry.key);
    if let Some(Rejected { key, detail, .. }) = rejected.iter().find(|it| !is_used(it)) {
        return Err(unusable(key, detail));
    }
    let peers = Arc::new(peers);
    let known = Known { as_of_unix, revision, cluster, networks, own, ends_unix, peers };
    Ok(Cache { config, known })
}

/// The wall clock is all there is to go by after a boot. One that is ahead refuses too much, and
/// the start waits for the store. One that is behind may take a lease for alive that has ended,
/// unless it is before the time of the cache itself; the store has the last word when it answers.
fn check_age(as_of_unix: u64, ends_unix: Option<u64>, now_unix: u64) -> Result<(), CacheError> {
    let as_of = clock::format_rfc3339(as_of_unix);
    let why = if as_of_unix > now_unix.saturating_add(AHEAD_MAX.as_secs()) {
        format!("it is from {as_of}, ahead of this host's clock")
    } else if now_unix.saturating_sub(as_of_unix) > AGE_MAX.as_secs() {
        format!("it is from {as_of}, more than {} ago", clock::format_go_duration(AGE_MAX))
    } else if let Some(ends_unix) = ends_unix.filter(|ends| *ends <= now_unix) {
        format!("the lease in it ended at {}", clock::format_rfc3339(ends_unix))
    } else {
        return Ok(());
    };
    Err(CacheError(why))
}

fn same<T: PartialEq + ToString>(what: &str, found: T, expected: T) -> Result<(), CacheError> {
    if found == expected {
        return Ok(());
    }
    let shown = |it: T| it.to_string().chars().take(SHOWN_CHARACTERS_MAX).collect::<String>();
    let (found, expected) = (shown(found), shown(expected));
    Err(CacheError(format!("its {what} is {found:?}, and this start's is {expected:?}")))
}

fn unusable(key: &str, detail: &str) -> CacheError {
    CacheError(format!("{key:?} in it is not usable as a lease: {detail}"))
}

impl Entry {
    fn of(lease: &Lease) -> Result<Self, CacheError> {
        let key = lease.key.clone();
        let value = lease.attributes.to_json();
        let value = value.map_err(|error| unusable(&key, &with_causes(&error)))?;
        Ok(Self { key, created: lease.created_revision, value: serde_json::from_slice(&value)? })
    }

    /// The entry by the store's own checks. Its version and its life are the store's to say.
    fn lease(self) -> Result<Lease, CacheError> {
        let lease = Lease::decode(self.key.as_bytes(), self.value.get().as_bytes(), 0)
            .map_err(|Rejected { key, detail, .. }| unusable(&key, &detail))?;
        let lifetime = Lifetime::Leased { id: 0, expires_unix: None };
        Ok(Lease { created_revision: self.created, lifetime, ..lease })
    }
}

/// `body` after the line that vouches for it.
pub fn seal(body: &[u8]) -> Vec<u8> {
    [first_line(body).as_bytes(), body].concat()
}

fn first_line(body: &[u8]) -> String {
    format!("{MAGIC} {} {:016x}\n", body.len(), checksum(body))
}

fn unseal(bytes: &[u8]) -> Result<&[u8], CacheError> {
    let end = bytes.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n');
    let Some(end) = end.filter(|_| bytes.starts_with(MAGIC.as_bytes())) else {
        return Err(CacheError("it does not begin like a cache of this weft".to_owned()));
    };
    let (line, body) = bytes.split_at(end + 1);
    if line != first_line(body).as_bytes() {
        return Err(CacheError("its length or checksum is wrong".to_owned()));
    }
    Ok(body)
}

/// FNV-1a over 64 bits (draft-eastlake-fnv): against disk errors, not against attackers.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;

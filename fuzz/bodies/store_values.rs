//! One input of the `store_values` target: what the store and the host's files say to weftd.
//!
//! The first byte chooses the reader: a lease, with its key up to the first zero byte; the
//! network's configuration; `subnet.env`; a key. What is accepted must be read back the same
//! from what is written of it.

use weft::backend::flaws::flaws;
use weft::config::network::{
    ConfigFamily, NetworkConfig, SubnetRange, UdpBackendConfig, VxlanBackendConfig,
    WireguardBackendConfig,
};
use weft::config::subnet_file::{Previous, SubnetFile};
use weft::control::choose::free_subnets;
use weft::control::lease::{Lease, LeaseAttributes};
use weft::route::Prefixes;

/// Subnets of a configuration that are looked at.
const SUBNETS_MAX: usize = 8;

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let [reader, rest @ ..] = data else { return };
    match reader % 4 {
        0 => lease(rest),
        1 => configuration(rest),
        2 => subnet_file(&String::from_utf8_lossy(rest)),
        _ => key(&String::from_utf8_lossy(rest)),
    }
}

fn lease(data: &[u8]) {
    let at = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (key, value) = (&data[..at], data.get(at + 1..).unwrap_or_default());
    if let Ok(lease) = Lease::decode(key, value, 7) {
        assert_eq!(Some(lease.subnets), std::str::from_utf8(key).ok().and_then(Prefixes::from_key));
    }
    let Ok(attributes) = LeaseAttributes::from_json(value) else { return };
    // A value filled to the limit may have no room for our spelling.
    let Ok(written) = attributes.to_json() else { return };
    let again = LeaseAttributes::from_json(&written).expect("what was written can be read");
    // What peers are by their lease's data is read as well.
    flaws(&Lease::reservation(
        Prefixes::from_key("10.5.1.0-24&fd00:5::-64").expect("a key"),
        again.clone(),
    ));
    // What is no address is not written again.
    assert_eq!(again, LeaseAttributes { unreadable_ipv6: None, ..attributes });
}

fn free<A: ConfigFamily>(range: &SubnetRange<A>) {
    for subnet in free_subnets(range, Vec::new(), SUBNETS_MAX) {
        assert!(range.network.covers(subnet) && range.leasable(subnet), "{subnet}");
    }
}

fn configuration(data: &[u8]) {
    let Ok(config) = NetworkConfig::parse(data) else { return };
    let written = serde_json::to_vec(&config.to_json()).expect("a value can be written");
    let again = NetworkConfig::parse(&written).expect("what was written can be read");
    // Numbers of settings that are no integers may come back one bit off.
    let bounds = |config: &NetworkConfig| {
        (config.ranges, config.enable_nftables, config.backend.kind.clone())
    };
    assert_eq!(bounds(&again), bounds(&config));
    config.ranges.map(|range| free(&range), |range| free(&range));
    UdpBackendConfig::parse(&config.backend.settings).ok();
    VxlanBackendConfig::parse(&config.backend.settings).ok();
    WireguardBackendConfig::parse(&config.backend.settings).ok();
}

fn subnet_file(text: &str) {
    let previous = Previous::parse(text);
    let (Some(networks), Some(subnets)) = (previous.networks, previous.subnets) else { return };
    // A smaller subnet has no host to be its gateway, and is never leased.
    if subnets.v4().is_some_and(|it| it.length_bits() > 30)
        || subnets.v6().is_some_and(|it| it.length_bits() > 126)
        || (subnets.v4().is_some(), subnets.v6().is_some())
            != (networks.v4().is_some(), networks.v6().is_some())
    {
        return;
    }
    let file = SubnetFile { networks, subnets, mtu_bytes: 1472, masquerade: true };
    let again = Previous::parse(&file.render());
    assert_eq!((again.networks, again.subnets), (Some(networks), Some(subnets)));
    assert!(again.complaints.is_empty(), "{:?}", again.complaints);
}

fn key(text: &str) {
    let Some(subnets) = Prefixes::from_key(text) else { return };
    assert_eq!(Prefixes::from_key(&subnets.key()), Some(subnets));
    assert_eq!(subnets.to_string().parse::<Prefixes>().ok(), Some(subnets));
}

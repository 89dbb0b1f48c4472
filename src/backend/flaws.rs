//! What makes a lease useless to every node, as far as the lease alone shows it. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::backend::family::CarriedFamily;
use crate::backend::vxlan::owner::without_vtep;
use crate::backend::wireguard::data::without_key;
use crate::backend_kind::{BackendKind, BackendName};
use crate::control::lease::Lease;

/// What of a lease can't be used, and why.
pub fn flaws(lease: &Lease) -> Vec<String> {
    let attributes = &lease.attributes;
    let unreadable = attributes.unreadable_ipv6.as_ref();
    let unreadable = unreadable.map(|text| format!("its PublicIPv6 {text} is no IPv6 address"));
    // udp carries IPv6 over IPv4.
    let has_underlay = match &attributes.backend_type {
        BackendName::Known(kind) => kind.has_ipv6_underlay(),
        BackendName::Other(_) => true,
    };
    let is_needed = attributes.public_ipv6.is_some() || has_underlay;
    let v6 = flaw::<Ipv6Addr>(lease).filter(|_| is_needed);
    flaw::<Ipv4Addr>(lease).into_iter().chain(unreadable.or(v6)).collect()
}

fn flaw<A: CarriedFamily>(lease: &Lease) -> Option<String> {
    let is_vxlan = lease.attributes.backend_type.is(BackendKind::Vxlan);
    let is_wireguard = lease.attributes.backend_type.is(BackendKind::Wireguard);
    let without_key = || A::peer(lease).filter(|_| is_wireguard).and_then(|_| without_key(lease));
    let without_vtep = || without_vtep::<A>(lease).filter(|_| is_vxlan);
    A::without_host(lease).or_else(without_vtep).or_else(without_key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::lease::LeaseAttributes;

    #[test]
    fn what_no_node_can_use_is_known_by_the_lease_alone() {
        let flaws = |key: &str, value: &str| {
            let attributes = LeaseAttributes::from_json(value.as_bytes()).unwrap();
            flaws(&Lease::reservation(key.parse().unwrap(), attributes))
        };
        let (v4, both) = ("10.5.1.0/24", "10.5.1.0/24,fd00:5::/64");
        let vtep = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#;
        let vxlan = |v6: &str, data: &str| {
            format!(r#"{{"PublicIP":"192.0.2.1","PublicIPv6":{v6},"BackendType":"vxlan",{data}}}"#)
        };
        let data = format!(r#""BackendData":{vtep}"#);
        let all = format!(r#"{data},"BackendV6Data":{vtep}"#);
        for (subnets, value, words) in [
            (v4, r#"{"PublicIP":"192.0.2.1"}"#.to_owned(), &[][..]),
            (v4, r#"{"PublicIP":"0.0.0.0"}"#.to_owned(), &["PublicIP of"]),
            (v4, r#"{"PublicIP":"127.0.0.1"}"#.to_owned(), &["PublicIP of"]),
            (both, r#"{"PublicIP":"192.0.2.1"}"#.to_owned(), &[]),
            (both, r#"{"PublicIP":"192.0.2.1","PublicIPv6":"x"}"#.to_owned(), &["\"x\""]),
            (v4, vxlan("null", r#""BackendData":{}"#), &["VtepMAC"]),
            (v4, vxlan("null", &data), &[]),
            (both, vxlan(r#""fd99::1""#, &all), &[]),
            (both, vxlan(r#""ff02::1""#, &all), &["PublicIPv6 of"]),
            (both, vxlan("null", &all), &["PublicIPv6 of"]),
            (both, vxlan(r#""fd99::1""#, &data), &["fd99::1"]),
            (both, vxlan(r#""fd99::1""#, r#""x":1"#), &["192.0.2.1", "fd99::1"]),
        ] {
            let found = flaws(subnets, &value);
            let is_told = found.len() == words.len()
                && found.iter().zip(words).all(|(flaw, words)| flaw.contains(words));
            assert!(is_told, "{subnets} {value}: {found:?}");
        }
    }
}

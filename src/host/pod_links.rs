//! The links of this host's pods that take longer packets than the overlay: pods keep the MTU that
//! they were started with, and what they send then is refused. Pure.

use std::collections::BTreeSet;

use crate::host::listing::Listing;
use crate::host::state::{Address, Link};
use crate::route::{IpAddress, Prefix, Prefixes};

/// More of them are counted.
const NAMED_MAX: usize = 5;

/// The links that have a gateway of `subnets`, as the pods' bridge has.
pub fn gateways(host: &Listing, subnets: Prefixes) -> BTreeSet<u32> {
    let of_v4 = subnets.v4().into_iter().flat_map(|it| of_family(&host.addresses, it));
    let of_v6 = subnets.v6().into_iter().flat_map(|it| of_family(&host.addresses_v6, it));
    of_v4.chain(of_v6).collect()
}

/// The first address is that of the overlay's own device.
fn of_family<A: IpAddress>(all: &[Address<A>], subnet: Prefix<A>) -> impl Iterator<Item = u32> {
    let is_gateway =
        move |it: &&Address<A>| subnet.contains(it.address) && it.address != subnet.network();
    all.iter().filter(is_gateway).map(|it| it.interface_index)
}

/// Which of `bridges` and their ports have an MTU above `mtu_bytes`, in words; nothing if none has.
pub fn wider(links: &[Link], bridges: &BTreeSet<u32>, mtu_bytes: u32) -> Option<String> {
    let is_of_pods = |link: &Link| {
        bridges.contains(&link.id.index) || link.controller.is_some_and(|it| bridges.contains(&it))
    };
    let wide = links.iter().filter(|link| is_of_pods(link) && link.mtu_bytes > mtu_bytes);
    let mut wide = wide.map(|link| (link.id.name.as_str(), link.mtu_bytes));
    let (name, bytes) = wide.next()?;
    let mut text = format!("{name} has MTU {bytes}, the overlay {mtu_bytes}");
    let others: Vec<_> = wide.map(|(name, bytes)| format!("{name} ({bytes})")).collect();
    if !others.is_empty() {
        let shown = &others[..others.len().min(NAMED_MAX)];
        text += &format!("; so have {}", shown.join(", "));
    }
    if others.len() > NAMED_MAX {
        text += &format!(" and {} more", others.len() - NAMED_MAX);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::state::tests::{address, link};

    #[test]
    fn pods_that_keep_a_larger_mtu_are_named() {
        let port = |index, mtu_bytes, controller| Link {
            mtu_bytes,
            controller,
            ..link(index, &format!("veth{index}"))
        };
        let links = [
            Link { mtu_bytes: 1420, ..link(2, "cni0") },
            port(3, 1450, Some(2)),
            port(4, 1420, Some(2)),
            port(5, 9000, Some(9)),
            port(6, 9000, None),
        ];
        let bridges = BTreeSet::from([2]);
        let text = wider(&links, &bridges, 1420).unwrap();
        assert_eq!(text, "veth3 has MTU 1450, the overlay 1420");
        assert_eq!(wider(&links, &bridges, 1450), None);
        let many: Vec<_> = (10..18).map(|index| port(index, 1500, Some(2))).collect();
        let text = wider(&many, &bridges, 1420).unwrap();
        assert!(text.contains("veth15 (1500)") && text.ends_with(" and 2 more"), "{text}");
    }

    #[test]
    fn the_overlays_own_device_is_none_of_the_pods() {
        let [own, gateway] = ["10.5.1.0", "10.5.1.1"].map(|it| it.parse().unwrap());
        let addresses = vec![address(3, own, 32), address(4, gateway, 24)];
        let host = Listing { addresses, ..Listing::default() };
        assert_eq!(gateways(&host, "10.5.1.0/24".parse().unwrap()), BTreeSet::from([4]));
        assert!(gateways(&host, "10.5.2.0/24".parse().unwrap()).is_empty());
    }
}

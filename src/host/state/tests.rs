//! Samples of what the kernel lists, and the format of hardware addresses.

use super::*;

/// An interface that is up, as the kernel would list it.
pub(crate) fn link(index: u32, name: &str) -> Link {
    Link {
        id: LinkId { index, name: name.to_owned() },
        mtu_bytes: 1500,
        is_up: true,
        has_carrier: true,
        carrier_losses: None,
        is_loopback: name == "lo",
        mac: None,
        vxlan: None,
        ipip: None,
        is_wireguard: false,
        veth_peer: None,
        controller: None,
        is_bridge: false,
        has_xdp: false,
        alias: None,
    }
}

/// A permanent address.
pub(crate) fn address(interface_index: u32, address: Ipv4Addr, prefix_length_bits: u8) -> Address {
    Address {
        interface_index,
        address,
        prefix_length_bits,
        is_permanent: true,
        is_deprecated: false,
        is_secondary: false,
        is_in_doubt: false,
    }
}

/// A route to `destination` without routers.
pub(crate) fn route(destination: Prefix, metric: u32, interfaces: &[u32]) -> Route {
    let hop = |index: &u32| NextHop { interface_index: *index, gateway: None };
    Route {
        destination,
        metric,
        kind: RouteKind::UNICAST,
        protocol: RouteProtocol::BOOT,
        type_of_service: 0,
        mtu_bytes: None,
        next_hops: interfaces.iter().map(hop).collect(),
    }
}

#[test]
fn mac_address_round_trips() {
    let mac = MacAddress::parse("82:4b:B6:2f:54:4e").unwrap();
    assert_eq!(mac.to_string(), "82:4b:b6:2f:54:4e");
    assert!(mac.is_host());
    for bad in ["", "82:4b:b6:2f:54", "82:4b:b6:2f:54:4e:00", "+1:4b:b6:2f:54:4e", "824bb62f544e"] {
        assert_eq!(MacAddress::parse(bad), None, "{bad} is taken");
    }
    assert!(!MacAddress([0; 6]).is_host() && !MacAddress([0xff; 6]).is_host());
    let made = MacAddress::locally_administered([0xff; 6]);
    assert!(made.is_host() && made.0[0] & 2 == 2);
}

//! The kernel's WireGuard devices, over generic netlink: what they have, and what they are told.
//! One request per function, but for peers beyond what one message holds.

#![expect(clippy::wildcard_enum_match_arm, reason = "the kernel's attributes, of which few matter")]

use std::collections::BTreeMap;
use std::net::IpAddr;

use netlink_packet_generic::GenlMessage;
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute,
    WireguardCmd, WireguardMessage, WireguardPeer, WireguardPeerAttribute, WireguardPeerFlags,
};
use rtnetlink::packet_core::NLM_F_ACK;
use rtnetlink::sys::protocols::NETLINK_GENERIC;

use super::decode::find;
use super::exchange::{answer, list, socket_of};
use super::{NetlinkError, Result};
use crate::wireguard::difference::{
    AllowedAddress, FoundPeer, PeerChange, PeerEdit, allowed_addresses,
};
use crate::wireguard::keys::{KEY_BYTES, PresharedKey, PrivateKey, PublicKey};
use crate::wireguard::peer::PeerState;

/// Peers in one request: with 64 KiB for an attribute and less than 300 bytes for each, half of
/// what would go in.
const PEERS_PER_REQUEST: usize = 100;

/// A WireGuard device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundDevice {
    /// Of its private key, if it has one.
    pub public_key: Option<PublicKey>,
    /// Where its datagrams arrive; 0 before anybody chose.
    pub listen_port: u16,
    /// Its peers.
    pub peers: Vec<FoundPeer>,
}

/// The device with this name.
pub async fn device(name: &str) -> Result<FoundDevice> {
    let operation = format!("read the wireguard device {name}");
    let request = request(WireguardCmd::GetDevice, name, Vec::new()).await?;
    let socket = || socket_of(NETLINK_GENERIC);
    let answer: Vec<GenlMessage<WireguardMessage>> =
        list(&operation, socket, request, |_| true).await?;
    Ok(found(answer.into_iter().map(|message| message.payload.attributes)))
}

/// Gives the device its key and its port. A peer of the same key goes.
pub async fn configure(name: &str, key: &PrivateKey, listen_port: u16) -> Result {
    let operation = format!("give {name} its key and UDP port {listen_port}");
    let attributes = vec![
        WireguardAttribute::PrivateKey(*key.bytes()),
        WireguardAttribute::ListenPort(listen_port),
    ];
    set(&operation, name, attributes).await
}

/// Makes the edits, and gives those that were refused with the reason.
pub async fn edit_peers<'a>(
    name: &str,
    edits: &'a [PeerEdit],
) -> Vec<(&'a PeerEdit, NetlinkError)> {
    let mut refused = Vec::new();
    for part in edits.chunks(PEERS_PER_REQUEST) {
        let operation = format!("edit {} peers of {name}", part.len());
        let peers = part.iter().map(told).collect();
        if set(&operation, name, vec![WireguardAttribute::Peers(peers)]).await.is_ok() {
            continue;
        }
        // The kernel stops at the first that it refuses: the others must not suffer.
        for edit in part {
            let operation = format!("edit the peer {} of {name}", edit.public_key);
            let peers = WireguardAttribute::Peers(vec![told(edit)]);
            refused.extend(set(&operation, name, vec![peers]).await.err().map(|it| (edit, it)));
        }
    }
    refused
}

async fn set(operation: &str, name: &str, attributes: Vec<WireguardAttribute>) -> Result {
    let request = request(WireguardCmd::SetDevice, name, attributes).await?;
    let socket = socket_of(NETLINK_GENERIC);
    answer(operation, socket, request, NLM_F_ACK, |_| false).await.map(drop)
}

async fn request(
    cmd: WireguardCmd,
    name: &str,
    mut attributes: Vec<WireguardAttribute>,
) -> Result<GenlMessage<WireguardMessage>> {
    attributes.insert(0, WireguardAttribute::IfName(name.to_owned()));
    let mut message = GenlMessage::from_payload(WireguardMessage { cmd, attributes });
    message.set_resolved_family_id(family().await?);
    Ok(message)
}

/// The number under which the kernel knows WireGuard's messages: another one once its module was
/// loaded again.
async fn family() -> Result<u16> {
    let operation = "find the messages of wireguard";
    let nlas = vec![GenlCtrlAttrs::FamilyName("wireguard".to_owned())];
    let request = GenlMessage::from_payload(GenlCtrl { cmd: GenlCtrlCmd::GetFamily, nlas });
    let socket = socket_of(NETLINK_GENERIC);
    let (answer, _) = answer(operation, socket, request, NLM_F_ACK, |_| true).await?;
    let number = answer.iter().find_map(|message: &GenlMessage<GenlCtrl>| {
        find!(message.payload.nlas, GenlCtrlAttrs::FamilyId(number) => *number)
    });
    number.ok_or_else(|| NetlinkError::Incomplete(operation.to_owned(), "their number"))
}

/// The device of an answer's messages. What a peer is allowed may go on in the next message, under
/// the same key.
fn found(messages: impl Iterator<Item = Vec<WireguardAttribute>>) -> FoundDevice {
    let mut device = FoundDevice::default();
    let mut peers: BTreeMap<PublicKey, FoundPeer> = BTreeMap::new();
    for attribute in messages.flatten() {
        match attribute {
            WireguardAttribute::PublicKey(key) => device.public_key = Some(PublicKey(key)),
            WireguardAttribute::ListenPort(port) => device.listen_port = port,
            WireguardAttribute::Peers(listed) => {
                for peer in listed.iter().filter_map(|peer| found_peer(&peer.0)) {
                    match peers.get_mut(&peer.state.public_key) {
                        Some(begun) => begun.allowed.extend(peer.allowed),
                        None => {
                            peers.insert(peer.state.public_key, peer);
                        }
                    }
                }
            }
            _ => {}
        }
    }
    device.peers = peers.into_values().collect();
    device
}

fn found_peer(attributes: &[WireguardPeerAttribute]) -> Option<FoundPeer> {
    use WireguardPeerAttribute as It;
    let allowed = find!(attributes, It::AllowedIps(all) => all.as_slice()).unwrap_or_default();
    let handshake = find!(attributes, It::LastHandshake(at) => at.seconds);
    Some(FoundPeer {
        state: PeerState {
            public_key: PublicKey(find!(attributes, It::PublicKey(key) => *key)?),
            endpoint: find!(attributes, It::Endpoint(at) => *at),
            last_handshake_unix: handshake.and_then(|at| at.try_into().ok()).filter(|at| *at > 0),
            received_bytes: find!(attributes, It::RxBytes(bytes) => *bytes).unwrap_or(0),
            sent_bytes: find!(attributes, It::TxBytes(bytes) => *bytes).unwrap_or(0),
            packets: None,
        },
        preshared_key: find!(attributes, It::PresharedKey(key) => *key)
            .filter(|key| *key != [0; KEY_BYTES])
            .map(PresharedKey::from),
        allowed: allowed.iter().filter_map(|it| allowed_address(&it.0)).collect(),
        keepalive_seconds: find!(attributes, It::PersistentKeepalive(it) => *it).unwrap_or(0),
    })
}

fn allowed_address(attributes: &[WireguardAllowedIpAttr]) -> Option<AllowedAddress> {
    let address = find!(attributes, WireguardAllowedIpAttr::IpAddr(address) => *address)?;
    Some((address, find!(attributes, WireguardAllowedIpAttr::Cidr(bits) => *bits)?))
}

/// A peer's part of a request.
fn told(edit: &PeerEdit) -> WireguardPeer {
    use WireguardPeerAttribute as It;
    let mut attributes = vec![It::PublicKey(edit.public_key.0)];
    match &edit.change {
        PeerChange::Remove => attributes.push(It::Flags(WireguardPeerFlags::RemoveMe)),
        PeerChange::Set { preshared_key, endpoint, allowed, keepalive_seconds } => {
            if allowed.is_some() {
                attributes.push(It::Flags(WireguardPeerFlags::ReplaceAllowedIps));
            }
            let key =
                |key: &Option<PresharedKey>| key.as_ref().map_or([0; KEY_BYTES], |it| *it.bytes());
            attributes.extend(preshared_key.as_ref().map(key).map(It::PresharedKey));
            attributes.extend(endpoint.map(It::Endpoint));
            attributes.extend(keepalive_seconds.map(It::PersistentKeepalive));
            let subnets = allowed.map(allowed_addresses).unwrap_or_default();
            if !subnets.is_empty() {
                attributes.push(It::AllowedIps(subnets.into_iter().map(allow).collect()));
            }
        }
    }
    WireguardPeer(attributes)
}

fn allow((address, length_bits): AllowedAddress) -> WireguardAllowedIp {
    let family = match address {
        IpAddr::V4(_) => WireguardAddressFamily::Ipv4,
        IpAddr::V6(_) => WireguardAddressFamily::Ipv6,
    };
    WireguardAllowedIp(vec![
        WireguardAllowedIpAttr::Family(family),
        WireguardAllowedIpAttr::IpAddr(address),
        WireguardAllowedIpAttr::Cidr(length_bits),
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use netlink_packet_wireguard::WireguardTimeSpec;

    use super::*;
    use crate::wireguard::difference::PeerChange::{Remove, Set};

    fn listed(key: u8, attributes: Vec<WireguardPeerAttribute>) -> WireguardPeer {
        let key = WireguardPeerAttribute::PublicKey([key; KEY_BYTES]);
        WireguardPeer([vec![key], attributes].concat())
    }

    fn allowed(texts: &[&str]) -> BTreeSet<AllowedAddress> {
        let each = texts.iter().map(|text| text.split_once('/').unwrap());
        each.map(|(address, bits)| (address.parse().unwrap(), bits.parse().unwrap())).collect()
    }

    #[test]
    fn a_peer_goes_on_in_the_next_message() {
        use WireguardPeerAttribute as It;
        let [v4, v6] = [("10.5.1.0", 24), ("fd00:5:1::", 64)]
            .map(|(address, bits)| It::AllowedIps(vec![allow((address.parse().unwrap(), bits))]));
        let endpoint = "[2001:db8::1]:51820".parse().unwrap();
        let handshake = WireguardTimeSpec { seconds: 1_800_000_000, nano_seconds: 7 };
        let first = vec![
            It::PresharedKey([0; KEY_BYTES]),
            It::Endpoint(endpoint),
            It::LastHandshake(handshake),
            It::RxBytes(5),
            It::TxBytes(6),
            It::PersistentKeepalive(25),
            v4,
        ];
        let never = vec![It::LastHandshake(WireguardTimeSpec::default())];
        let device = found(
            [
                vec![
                    WireguardAttribute::ListenPort(51820),
                    WireguardAttribute::PublicKey([9; KEY_BYTES]),
                    WireguardAttribute::Peers(vec![listed(1, first)]),
                ],
                vec![WireguardAttribute::Peers(vec![listed(1, vec![v6]), listed(2, never)])],
            ]
            .into_iter(),
        );
        assert_eq!((device.public_key, device.listen_port), (Some(PublicKey([9; 32])), 51820));
        let [one, two] = device.peers.as_slice() else { panic!("{device:?}") };
        assert_eq!(one.allowed, allowed(&["10.5.1.0/24", "fd00:5:1::/64"]));
        assert_eq!((one.preshared_key.clone(), one.keepalive_seconds), (None, 25));
        let state = PeerState {
            public_key: PublicKey([1; KEY_BYTES]),
            endpoint: Some(endpoint),
            last_handshake_unix: Some(1_800_000_000),
            received_bytes: 5,
            sent_bytes: 6,
            packets: None,
        };
        assert_eq!(one.state, state);
        assert_eq!(two.state.last_handshake_unix, None, "a handshake that never was");
    }

    #[test]
    fn what_is_told_is_what_was_meant() {
        let public_key = PublicKey([1; KEY_BYTES]);
        let allowed = "10.5.1.0/24,fd00:5:1::/64".parse().ok();
        let set = Set {
            preshared_key: Some(Some(PresharedKey::from([3; KEY_BYTES]))),
            endpoint: "192.0.2.1:51820".parse().ok(),
            allowed,
            keepalive_seconds: Some(25),
        };
        let told = told(&PeerEdit { public_key, change: set });
        let read = found_peer(&told.0).unwrap();
        assert_eq!(read.allowed, allowed_addresses(allowed.unwrap()));
        assert_eq!(read.preshared_key, Some(PresharedKey::from([3; KEY_BYTES])));
        assert_eq!(
            (read.state.endpoint, read.keepalive_seconds),
            ("192.0.2.1:51820".parse().ok(), 25)
        );
        let flags = |change| {
            let WireguardPeer(all) = super::told(&PeerEdit { public_key, change });
            find!(all, WireguardPeerAttribute::Flags(flags) => *flags)
        };
        assert_eq!(flags(Remove), Some(WireguardPeerFlags::RemoveMe));
        let (preshared_key, endpoint, keepalive_seconds) = (None, None, Some(0));
        let rest = Set { preshared_key, endpoint, allowed: None, keepalive_seconds };
        assert_eq!(flags(rest), None, "what it may send would be lost for a moment");
    }
}

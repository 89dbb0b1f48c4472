//! IPsec policies that have the kernel encrypt what pods send each other, and take nothing of it
//! that was not (net/xfrm/xfrm_user.c, include/uapi/linux/xfrm.h): those of flannel's kind, by the
//! number in them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NlasIterator};
use rtnetlink::sys::protocols::NETLINK_XFRM;
use rustix::io::Errno;

use super::exchange;
use super::policies::{
    DIRECTION_AT, FAMILY_AT, GET_POLICY, INTERFACE_ID, IPV4, LENGTH_AT, MARK, POLICY, POLICY_BYTES,
    SOURCE_AT, SOURCE_LENGTH_AT, TEMPLATE, address, ask, payload, prefix, request,
};
use super::{Result, unless_gone};
use crate::route::Prefix;

/// flannel's number, by which a policy finds the keys that charon has agreed on.
pub const REQUEST_ID: u32 = 11;

/// `XFRM_MSG_UPDPOLICY`, which adds or replaces one, and `XFRM_MSG_DELPOLICY`, with `struct
/// xfrm_userpolicy_id`: a selector, and where the direction is in it.
const UPDATE: u16 = 0x19;
const REMOVE: u16 = 0x14;
const ID_BYTES: usize = 64;
const ID_DIRECTION_AT: usize = 60;
/// Of a policy: `struct xfrm_lifetime_cfg`, which begins with four limits, of which none is meant.
const LIMITS_AT: usize = 56;
const LIMITS_BYTES: usize = 32;
/// `struct xfrm_user_tmpl`: where things are.
const TEMPLATE_BYTES: usize = 64;
const PROTOCOL_AT: usize = 20;
const TEMPLATE_FAMILY_AT: usize = 24;
const FROM_AT: usize = 28;
const REQUEST_ID_AT: usize = 44;
const MODE_AT: usize = 48;
const ALGORITHMS_AT: usize = 52;
const ESP: u8 = 50;
const TUNNEL: u8 = 1;

/// `XFRM_POLICY_IN`, `_OUT` and `_FWD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// What is for this host itself.
    In = 0,
    /// What leaves.
    Out = 1,
    /// What is for its pods.
    Forward = 2,
}

/// What a policy is about: the kernel has one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    /// Which way packets go.
    pub direction: Direction,
    /// What they come from.
    pub source: Prefix,
    /// What they are for.
    pub destination: Prefix,
}

/// A policy: which packets, and from which host to which the tunnel leads that they have to go by.
pub type TunnelPolicy = (Selector, [Ipv4Addr; 2]);

/// The policies of a tunnel between this host's pods and a peer's, with the hosts' addresses.
pub fn of_tunnel(own: (Prefix, Ipv4Addr), peer: (Prefix, Ipv4Addr)) -> [TunnelPolicy; 3] {
    let policy = |direction, from: (Prefix, Ipv4Addr), to: (Prefix, Ipv4Addr)| {
        (Selector { direction, source: from.0, destination: to.0 }, [from.1, to.1])
    };
    [
        policy(Direction::Out, own, peer),
        policy(Direction::In, peer, own),
        policy(Direction::Forward, peer, own),
    ]
}

/// All of them that this network namespace has.
pub async fn list() -> Result<BTreeMap<Selector, [Ipv4Addr; 2]>> {
    let answer = match ask(GET_POLICY, NLM_F_DUMP).await {
        // The kernel was built without IPsec.
        Err(error) if error.errno() == Some(Errno::PROTONOSUPPORT) => return Ok(BTreeMap::new()),
        answer => answer?,
    };
    Ok(answer.iter().filter_map(|message| policy(message)).collect())
}

/// Sets a policy, in place of the one there.
pub async fn set((selector, ends): &TunnelPolicy) -> Result {
    let mut body = [0; POLICY_BYTES];
    write_selector(&mut body, selector);
    body[LIMITS_AT..LIMITS_AT + LIMITS_BYTES].fill(u8::MAX);
    body[DIRECTION_AT] = selector.direction as u8;
    let attribute = [(TEMPLATE_BYTES as u16 + 4).to_ne_bytes(), TEMPLATE.to_ne_bytes()].concat();
    let body = [&body[..], &attribute, &template(*ends)].concat();
    send(&format!("set the IPsec policy of {}", shown(selector)), UPDATE, &body).await
}

/// Removes a policy, if it is there.
pub async fn remove(selector: &Selector) -> Result {
    let mut body = [0; ID_BYTES];
    write_selector(&mut body, selector);
    body[ID_DIRECTION_AT] = selector.direction as u8;
    let operation = format!("remove the IPsec policy of {}", shown(selector));
    unless_gone(send(&operation, REMOVE, &body).await)
}

fn shown(Selector { direction, source, destination }: &Selector) -> String {
    format!("{source} to {destination} ({direction:?})")
}

async fn send(operation: &str, kind: u16, body: &[u8]) -> Result {
    let (socket, request) = (exchange::socket_of(NETLINK_XFRM), request(kind, NLM_F_ACK, body));
    exchange::ask(operation, socket, &request, |_| ()).await
}

/// Both messages begin with it.
fn write_selector(body: &mut [u8], Selector { source, destination, .. }: &Selector) {
    body[..4].copy_from_slice(&destination.network().octets());
    body[SOURCE_AT..SOURCE_AT + 4].copy_from_slice(&source.network().octets());
    body[FAMILY_AT..FAMILY_AT + 2].copy_from_slice(&u16::from(IPV4).to_ne_bytes());
    body[LENGTH_AT] = destination.length_bits();
    body[SOURCE_LENGTH_AT] = source.length_bits();
}

fn template([from, to]: [Ipv4Addr; 2]) -> [u8; TEMPLATE_BYTES] {
    let mut template = [0; TEMPLATE_BYTES];
    template[..4].copy_from_slice(&to.octets());
    template[PROTOCOL_AT] = ESP;
    template[TEMPLATE_FAMILY_AT..TEMPLATE_FAMILY_AT + 2]
        .copy_from_slice(&u16::from(IPV4).to_ne_bytes());
    template[FROM_AT..FROM_AT + 4].copy_from_slice(&from.octets());
    template[REQUEST_ID_AT..REQUEST_ID_AT + 4].copy_from_slice(&REQUEST_ID.to_ne_bytes());
    template[MODE_AT] = TUNNEL;
    // Any that charon agrees on.
    template[ALGORITHMS_AT..].fill(u8::MAX);
    template
}

/// One of this kind, if it is in `message`: of all packets between two subnets, whatever protocol
/// and port, by one tunnel with flannel's number.
fn policy(message: &[u8]) -> Option<TunnelPolicy> {
    let (info, attributes) = payload(message, POLICY)?.split_at_checked(POLICY_BYTES)?;
    let attributes = NlasIterator::new(attributes).map_while(|attribute| attribute.ok());
    let attributes: Vec<_> = attributes.collect();
    if attributes.iter().any(|it| [MARK, INTERFACE_ID].contains(&it.kind())) {
        return None;
    }
    let found = attributes.iter().find(|it| it.kind() == TEMPLATE)?.value();
    let found: &[u8; TEMPLATE_BYTES] = found.try_into().ok()?;
    let directions = [Direction::In, Direction::Out, Direction::Forward];
    let direction = *directions.get(usize::from(info[DIRECTION_AT]))?;
    let source = prefix(info, SOURCE_AT, SOURCE_LENGTH_AT)?;
    let selector = Selector { direction, source, destination: prefix(info, 0, LENGTH_AT)? };
    let ends = [address(found, FROM_AT)?, address(found, 0)?];
    let (mut plain, template) = ([0; POLICY_BYTES], template(ends));
    write_selector(&mut plain, &selector);
    let is_ours = info[..LIMITS_AT] == plain[..LIMITS_AT]
        && found[PROTOCOL_AT] == ESP
        && found[TEMPLATE_FAMILY_AT..=MODE_AT] == template[TEMPLATE_FAMILY_AT..=MODE_AT];
    is_ours.then_some((selector, ends))
}

#[cfg(test)]
mod tests {
    use super::super::exchange::HEADER_BYTES;
    use super::*;

    /// As the kernel lists it: a policy with one template.
    fn listed((selector, ends): &TunnelPolicy) -> Vec<u8> {
        let mut message = vec![0; HEADER_BYTES + POLICY_BYTES];
        message[4..6].copy_from_slice(&POLICY.to_ne_bytes());
        let info = &mut message[HEADER_BYTES..];
        write_selector(info, selector);
        info[DIRECTION_AT] = selector.direction as u8;
        message.extend([68_u16.to_ne_bytes(), TEMPLATE.to_ne_bytes()].concat());
        message.extend(template(*ends));
        message
    }

    #[test]
    fn a_tunnel_has_three_policies_which_are_known_again() {
        let [one, two] = [1, 2].map(|last| Ipv4Addr::new(192, 0, 2, last));
        let own = ("10.5.1.0/24".parse().unwrap(), one);
        let peer = ("10.5.2.0/24".parse().unwrap(), two);
        let all = of_tunnel(own, peer);
        let ways = all.map(|(it, ends)| (it.direction, it.source == own.0, ends));
        let inward = [two, one];
        assert_eq!(
            ways,
            [
                (Direction::Out, true, [one, two]),
                (Direction::In, false, inward),
                (Direction::Forward, false, inward),
            ]
        );
        for it in all {
            assert_eq!(policy(&listed(&it)), Some(it));
        }
    }

    #[test]
    fn policies_of_others_are_none() {
        let ends = [1, 2].map(|last| Ipv4Addr::new(192, 0, 2, last));
        let subnets = ["10.5.1.0/24", "10.5.2.0/24"].map(|it| it.parse().unwrap());
        let [out, ..] = of_tunnel((subnets[0], ends[0]), (subnets[1], ends[1]));
        let at = |at: usize| HEADER_BYTES + at;
        let of_template = |at: usize| HEADER_BYTES + POLICY_BYTES + 4 + at;
        for (byte, what) in [
            (at(32), "of a port"),
            (at(44), "of a protocol"),
            (at(48), "of an interface"),
            (at(DIRECTION_AT) + 1, ""),
            (of_template(PROTOCOL_AT), "another protocol than ESP"),
            (of_template(REQUEST_ID_AT), "with another number"),
            (of_template(MODE_AT), "without a tunnel"),
        ] {
            let mut message = listed(&out);
            message[byte] ^= 0x10;
            let is_ours = what.is_empty();
            assert_eq!(policy(&message).is_some(), is_ours, "{what}, byte {byte}");
        }
        let mut marked = listed(&out);
        marked.extend([4, MARK].map(u16::to_ne_bytes).concat());
        assert_eq!(policy(&marked), None);
        let mut of_two = listed(&out);
        let length = HEADER_BYTES + POLICY_BYTES;
        of_two[length..length + 2].copy_from_slice(&132_u16.to_ne_bytes());
        of_two.extend(template(ends));
        assert_eq!(policy(&of_two), None, "of two tunnels");
    }
}

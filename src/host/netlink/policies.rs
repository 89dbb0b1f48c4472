//! IPsec policies (net/xfrm/xfrm_user.c, include/uapi/linux/xfrm.h): whether there are any. What
//! sends past the IP stack's output must not run where one could match.

use std::net::Ipv4Addr;

use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NlasIterator};
use rtnetlink::sys::protocols::NETLINK_XFRM;
use rustix::io::Errno;

use super::exchange::{self, HEADER_BYTES};
use super::{NetlinkError, Result, UDP};
use crate::route::Prefix;

/// `XFRM_MSG_GETSPDINFO`, `XFRM_MSG_NEWSPDINFO`: numbers of policies.
const GET_NUMBERS: u16 = 0x25;
const NUMBERS: u16 = 0x24;
/// `XFRMA_SPD_INFO`: `struct xfrmu_spdinfo`, which begins with the numbers of policies for what
/// arrives, what leaves and what is forwarded; those of single sockets follow.
const NUMBERS_ATTRIBUTE: u16 = 1;
const DIRECTIONS: usize = 3;
/// `XFRM_MSG_GETDEFAULT`, question and answer: what happens to packets without a policy.
const DEFAULTS: u16 = 0x28;
/// `XFRM_USERPOLICY_BLOCK`, in a byte for each direction (`struct xfrm_userpolicy_default`).
const BLOCK: u8 = 1;

/// `XFRM_MSG_GETPOLICY` and `XFRM_MSG_NEWPOLICY`: `struct xfrm_userpolicy_info`, which begins with
/// `struct xfrm_selector`; where in it things are.
pub(super) const GET_POLICY: u16 = 0x15;
pub(super) const POLICY: u16 = 0x13;
pub(super) const POLICY_BYTES: usize = 168;
pub(super) const SOURCE_AT: usize = 16;
const PORT_AT: usize = 32;
const PORT_MASK_AT: usize = 34;
pub(super) const FAMILY_AT: usize = 40;
pub(super) const LENGTH_AT: usize = 42;
pub(super) const SOURCE_LENGTH_AT: usize = 43;
const PROTOCOL_AT: usize = 44;
const INTERFACE_AT: usize = 48;
const PRIORITY_AT: usize = 152;
pub(super) const DIRECTION_AT: usize = 160;
const ACTION_AT: usize = 161;
const OUT: u8 = 1;
pub(super) const IPV4: u8 = 2;
/// `XFRMA_TMPL`, which asks for IPsec; `XFRMA_MARK`; `XFRMA_IF_ID`.
pub(super) const TEMPLATE: u16 = 5;
pub(super) const MARK: u16 = 21;
pub(super) const INTERFACE_ID: u16 = 31;

/// What a question has behind its header: the flags that precede the attributes of an answer, or
/// room for defaults.
const FLAG_BYTES: usize = 4;

const OPERATION: &str = "tell its IPsec policies";

/// A policy for what this host sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// What is sent from there.
    pub source: Prefix,
    /// And there.
    pub destination: Prefix,
    /// To this port of UDP only, if there is one.
    pub port: Option<u16>,
    /// Of several that fit, the one with the lowest number counts.
    pub priority: u32,
    /// What becomes of it.
    pub decision: Decision,
}

/// What a policy wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// That the packet leaves as it is.
    Passes,
    /// That it leaves encrypted or authenticated.
    WantsIpsec,
    /// That it does not leave.
    Blocks,
}

/// Whether this network namespace has a policy that is not one socket's own, or blocks packets that
/// have none.
pub async fn has_policies() -> Result<bool> {
    let answer = match ask(GET_NUMBERS, NLM_F_ACK).await {
        // The kernel was built without IPsec.
        Err(error) if error.errno() == Some(Errno::PROTONOSUPPORT) => return Ok(false),
        answer => answer?,
    };
    let missing = "the numbers of policies";
    let numbers = answer.iter().find_map(|message| numbers(message));
    let numbers = numbers.ok_or_else(|| NetlinkError::Incomplete(OPERATION.to_owned(), missing))?;
    if numbers.iter().any(|number| *number > 0) {
        return Ok(true);
    }
    match ask(DEFAULTS, NLM_F_ACK).await {
        // A kernel before 5.14 has no defaults.
        Err(error) if error.errno() == Some(Errno::INVAL) => Ok(false),
        answer => Ok(answer?.iter().any(|message| blocks(message))),
    }
}

/// Those for UDP that this host sends by IPv4. Those of an interface or a mark are none: the
/// datagrams of weftd and of the kernel have no mark.
pub async fn for_sent() -> Result<Vec<Policy>> {
    let answer = ask(GET_POLICY, NLM_F_DUMP).await?;
    Ok(answer.iter().filter_map(|message| policy(message)).collect())
}

fn policy(message: &[u8]) -> Option<Policy> {
    let info = message.get(HEADER_BYTES..HEADER_BYTES + POLICY_BYTES)?;
    let attributes = message.get(HEADER_BYTES + POLICY_BYTES..)?;
    let number = |at: usize| u16::from_be_bytes([info[at], info[at + 1]]);
    let word = |at: usize| info[at..].first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let attributes = NlasIterator::new(attributes).map_while(|attribute| attribute.ok());
    let kinds: Vec<_> = attributes.map(|attribute| attribute.kind()).collect();
    let is_meant = payload(message, POLICY).is_some()
        && info[DIRECTION_AT] == OUT
        && info[FAMILY_AT..].first_chunk() == Some(&u16::from(IPV4).to_ne_bytes())
        && [0, UDP].contains(&info[PROTOCOL_AT])
        && word(INTERFACE_AT) == Some(0)
        && !kinds.iter().any(|kind| [MARK, INTERFACE_ID].contains(kind));
    let decision = match info[ACTION_AT] {
        BLOCK => Decision::Blocks,
        _ if kinds.contains(&TEMPLATE) => Decision::WantsIpsec,
        _ => Decision::Passes,
    };
    is_meant.then_some(Policy {
        source: prefix(info, SOURCE_AT, SOURCE_LENGTH_AT)?,
        destination: prefix(info, 0, LENGTH_AT)?,
        port: Some(number(PORT_AT)).filter(|_| number(PORT_MASK_AT) != 0),
        priority: word(PRIORITY_AT)?,
        decision,
    })
}

/// What a policy's packets come from, or what they are for.
pub(super) fn prefix(info: &[u8], address_at: usize, length_at: usize) -> Option<Prefix> {
    Prefix::new(address(info, address_at)?, *info.get(length_at)?)
}

pub(super) fn address(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    Some(Ipv4Addr::from(*bytes.get(at..)?.first_chunk::<4>()?))
}

/// A message of this kind.
pub(super) fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut header = [0; HEADER_BYTES];
    let mut buffer = NetlinkBuffer::new(&mut header);
    buffer.set_length((HEADER_BYTES + body.len()) as u32);
    buffer.set_message_type(kind);
    buffer.set_flags(NLM_F_REQUEST | flags);
    [&header[..], body].concat()
}

/// The messages of the answer.
pub(super) async fn ask(question: u16, flags: u16) -> Result<Vec<Vec<u8>>> {
    let mut answer = Vec::new();
    let take = |message: &[u8]| answer.push(message.to_vec());
    let socket = exchange::socket_of(NETLINK_XFRM);
    exchange::ask(OPERATION, socket, &request(question, flags, &[0; FLAG_BYTES]), take).await?;
    Ok(answer)
}

/// What is behind the header of an answer of this kind.
pub(super) fn payload(answer: &[u8], kind: u16) -> Option<&[u8]> {
    answer.get(HEADER_BYTES..).filter(|_| exchange::kind(answer) == Some(kind))
}

fn numbers(answer: &[u8]) -> Option<[u32; DIRECTIONS]> {
    let attributes = payload(answer, NUMBERS)?.get(FLAG_BYTES..)?;
    let mut attributes = NlasIterator::new(attributes).map_while(|attribute| attribute.ok());
    let counted = attributes.find(|attribute| attribute.kind() == NUMBERS_ATTRIBUTE)?;
    let (words, _) = counted.value().as_chunks();
    let words: &[[u8; 4]; DIRECTIONS] = words.first_chunk()?;
    Some(words.map(u32::from_ne_bytes))
}

fn blocks(answer: &[u8]) -> bool {
    let defaults = payload(answer, DEFAULTS).and_then(|defaults| defaults.get(..DIRECTIONS));
    defaults.is_some_and(|all| all.contains(&BLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_directions() {
        let mut answer = vec![0; HEADER_BYTES + FLAG_BYTES];
        answer[4..6].copy_from_slice(&NUMBERS.to_ne_bytes());
        // An attribute of another kind, five bytes long, first.
        answer.extend([5_u16.to_ne_bytes(), 9_u16.to_ne_bytes()].concat());
        answer.extend([0; 4]);
        answer.extend([28_u16.to_ne_bytes(), NUMBERS_ATTRIBUTE.to_ne_bytes()].concat());
        for number in [1_u32, 2, 3, 4, 5, 6] {
            answer.extend(number.to_ne_bytes());
        }
        assert_eq!(numbers(&answer), Some([1, 2, 3]));
        assert_eq!(numbers(&answer[..answer.len() - 16]), None);
        answer[4] = 2; // NLMSG_ERROR
        assert_eq!(numbers(&answer), None);
    }

    #[test]
    fn a_policy_is_read_as_far_as_it_takes_what_is_sent() {
        let read = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut message = vec![0; HEADER_BYTES + POLICY_BYTES];
            message[4..6].copy_from_slice(&POLICY.to_ne_bytes());
            let info = &mut message[HEADER_BYTES..];
            info[..4].copy_from_slice(&[192, 0, 2, 2]);
            info[FAMILY_AT..FAMILY_AT + 2].copy_from_slice(&u16::from(IPV4).to_ne_bytes());
            (info[LENGTH_AT], info[DIRECTION_AT], info[ACTION_AT]) = (32, OUT, BLOCK);
            change(&mut message);
            policy(&message)
        };
        let at = |at: usize| HEADER_BYTES + at;
        let destination = "192.0.2.2/32".parse().unwrap();
        let source = "0.0.0.0/0".parse().unwrap();
        let decision = Decision::Blocks;
        let blocking = Policy { source, destination, port: None, priority: 0, decision };
        assert_eq!(read(&|_| {}), Some(blocking.clone()));
        let of_port =
            read(&|it| it[at(PORT_AT)..at(PORT_AT) + 4].copy_from_slice(&[32, 93, 255, 255]));
        assert_eq!(of_port, Some(Policy { port: Some(8285), ..blocking.clone() }));
        assert_eq!(read(&|it| it[at(DIRECTION_AT)] = 0), None, "for what arrives");
        assert_eq!(read(&|it| it[at(PROTOCOL_AT)] = 6), None, "for TCP");
        let passes = read(&|it| it[at(ACTION_AT)] = 0);
        assert_eq!(passes, Some(Policy { decision: Decision::Passes, ..blocking.clone() }));
        let later = read(&|it| it[at(PRIORITY_AT)..][..4].copy_from_slice(&7_u32.to_ne_bytes()));
        assert_eq!(later, Some(Policy { priority: 7, ..blocking.clone() }));
        let of_net = read(&|it| {
            it[at(SOURCE_AT)..][..4].copy_from_slice(&[192, 168, 9, 0]);
            it[at(SOURCE_LENGTH_AT)] = 24;
        });
        let source = "192.168.9.0/24".parse().unwrap();
        assert_eq!(of_net, Some(Policy { source, ..blocking.clone() }));
        assert_eq!(read(&|it| it[at(INTERFACE_AT)] = 3), None, "of an interface");
        for kind in [MARK, INTERFACE_ID] {
            let of_a_tunnel =
                |it: &mut Vec<u8>| it.extend([4, kind].map(u16::to_ne_bytes).concat());
            assert_eq!(read(&of_a_tunnel), None, "of a VPN with an interface of its own");
        }
        let wants_ipsec = read(&|it| {
            it[at(ACTION_AT)] = 0;
            it.extend([4_u16.to_ne_bytes(), TEMPLATE.to_ne_bytes()].concat());
        });
        assert_eq!(wants_ipsec, Some(Policy { decision: Decision::WantsIpsec, ..blocking }));
    }

    #[test]
    fn one_blocked_direction_blocks() {
        let answer = |kind: u16, defaults: &[u8]| {
            let mut answer = vec![0; HEADER_BYTES];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            answer.extend(defaults);
            blocks(&answer)
        };
        // Accepted is 2, never set 0.
        assert!(!answer(DEFAULTS, &[2, 2, 0]) && !answer(DEFAULTS, &[]));
        assert!(answer(DEFAULTS, &[2, 2, 1]) && answer(DEFAULTS, &[1, 2, 2, 0]));
        assert!(!answer(2, &[1, 1, 1]), "an error, from a kernel that knows no defaults");
    }
}

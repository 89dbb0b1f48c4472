//! IPsec policies (net/xfrm/xfrm_user.c, include/uapi/linux/xfrm.h): whether there are any, and an
//! event when one was added, changed or removed, defaults included. What sends past the IP stack's
//! output must not run where one could match.

use std::io;

use rtnetlink::packet_core::{NLM_F_REQUEST, NlasIterator};
use rtnetlink::sys::protocols::NETLINK_XFRM;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use rustix::io::Errno;
use tokio::time::timeout;

use super::{NetlinkError, REQUEST_TIMEOUT};

/// `XFRMNLGRP_POLICY`.
const POLICY_GROUP: u32 = 4;
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

/// `struct nlmsghdr`, and what a question has behind it: the flags that precede the attributes of
/// an answer, or room for defaults.
const HEADER_BYTES: usize = 16;
const FLAG_BYTES: usize = 4;
const ANSWER_BYTES_MAX: usize = 1024;

const OPERATION: &str = "tell its IPsec policies";

/// A subscription to changes of policies. A kernel that knows none never reports one.
pub struct PolicyEvents(Option<TokioSocket>);

impl PolicyEvents {
    /// Subscribes in the network namespace of the calling thread.
    pub fn subscribe() -> Result<Self, NetlinkError> {
        match open(1 << (POLICY_GROUP - 1)) {
            Ok(socket) => Ok(Self(Some(socket))),
            Err(error) if is_unknown(&error) => Ok(Self(None)),
            Err(source) => Err(NetlinkError::Open { purpose: "changes of IPsec policies", source }),
        }
    }

    /// Waits until something changed. Cancel-safe.
    pub async fn changed(&mut self) -> Result<(), NetlinkError> {
        let Some(socket) = &self.0 else { return std::future::pending().await };
        let mut message = Vec::with_capacity(HEADER_BYTES);
        match socket.recv(&mut message).await {
            // Some were lost: a change as well.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => Ok(()),
            Err(source) => {
                let operation = "report changes of IPsec policies".to_owned();
                Err(NetlinkError::Refused { operation, source })
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Whether this network namespace has a policy that is not one socket's own, or blocks packets that
/// have none.
pub async fn has_policies() -> Result<bool, NetlinkError> {
    let socket = match open(0) {
        Ok(socket) => socket,
        Err(error) if is_unknown(&error) => return Ok(false),
        Err(source) => return Err(NetlinkError::Open { purpose: "IPsec policies", source }),
    };
    let missing = "the numbers of policies";
    let numbers = numbers(&ask(&socket, GET_NUMBERS).await?)
        .ok_or_else(|| NetlinkError::Incomplete { operation: OPERATION.to_owned(), missing })?;
    Ok(numbers.iter().any(|number| *number > 0) || blocks(&ask(&socket, DEFAULTS).await?))
}

async fn ask(socket: &TokioSocket, question: u16) -> Result<Vec<u8>, NetlinkError> {
    let exchange = async {
        socket.send_to(&request(question), &SocketAddr::new(0, 0)).await?;
        let mut answer = Vec::with_capacity(ANSWER_BYTES_MAX);
        socket.recv(&mut answer).await?;
        Ok(answer)
    };
    timeout(REQUEST_TIMEOUT, exchange)
        .await
        .map_err(|_elapsed| NetlinkError::TimedOut(OPERATION.to_owned()))?
        .map_err(|source| NetlinkError::Refused { operation: OPERATION.to_owned(), source })
}

fn open(groups: u32) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_XFRM)?;
    socket.socket_mut().bind(&SocketAddr::new(0, groups))?;
    Ok(socket)
}

/// Whether the kernel was built without IPsec.
fn is_unknown(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::PROTONOSUPPORT)
}

fn request(question: u16) -> Vec<u8> {
    let bytes = (HEADER_BYTES + FLAG_BYTES) as u32;
    let mut request = bytes.to_ne_bytes().to_vec();
    request.extend(question.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.resize(HEADER_BYTES + FLAG_BYTES, 0);
    request
}

fn is_answer(message: &[u8], kind: u16) -> bool {
    message.get(4..6) == Some(&kind.to_ne_bytes())
}

fn numbers(answer: &[u8]) -> Option<[u32; DIRECTIONS]> {
    if !is_answer(answer, NUMBERS) {
        return None;
    }
    let attributes = answer.get(HEADER_BYTES + FLAG_BYTES..)?;
    let mut attributes = NlasIterator::new(attributes).map_while(Result::ok);
    let counted = attributes.find(|attribute| attribute.kind() == NUMBERS_ATTRIBUTE)?;
    let bytes = counted.value().first_chunk::<{ 4 * DIRECTIONS }>()?;
    let (words, _) = bytes.as_chunks();
    let words: &[[u8; 4]; DIRECTIONS] = words.first_chunk()?;
    Some(words.map(u32::from_ne_bytes))
}

/// A kernel before 5.14 has no defaults, and answers with an error.
fn blocks(answer: &[u8]) -> bool {
    let defaults = answer.get(HEADER_BYTES..HEADER_BYTES + DIRECTIONS);
    is_answer(answer, DEFAULTS) && defaults.is_some_and(|all| all.contains(&BLOCK))
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

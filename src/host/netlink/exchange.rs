//! One request to the kernel and all of its answer, over a socket of their own: answers of others
//! cannot come in between, and there is no connection that could break.

use std::io;
use std::time::Duration;

use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkDeserializable,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, Socket, SocketAddr, TokioSocket};
use rustix::io::Errno;
use tokio::time::timeout;
use zeroize::Zeroizing;

/// The kernel answers a request inside the send call unless another process holds the routing
/// lock; the longest holders seen in practice (mass deletion of links) stay below a few seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A listing that the kernel marks as interrupted by a change is asked for again. Each attempt
/// takes well below a millisecond, so five in a row interrupted means constant change.
pub(super) const LISTING_ATTEMPTS_MAX: u32 = 5;

/// The kernel fills at most so much in one go (`netlink_dump`, net/netlink/af_netlink.c).
const PART_BYTES: usize = 32 * 1024;

/// Of a message (linux/netlink.h): where things are.
const TYPE_AT: usize = 4;
const FLAGS_AT: usize = 6;
pub(super) const HEADER_BYTES: usize = 16;

/// What comes of a request to the kernel.
pub type Result<T = ()> = std::result::Result<T, NetlinkError>;

/// Why the kernel's network state could not be read or edited.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket could be opened.
    #[error("cannot open a netlink socket")]
    Open(#[source] io::Error),
    /// The kernel said no to what was asked for, object included.
    #[error("the kernel refused to {0}")]
    Refused(String, #[source] io::Error),
    /// No answer in time.
    #[error(
        "no answer from the kernel within {seconds} s to: {0}",
        seconds = REQUEST_TIMEOUT.as_secs()
    )]
    TimedOut(String),
    /// Every listing was interrupted by a change.
    #[error("the kernel's tables changed during each of {LISTING_ATTEMPTS_MAX} attempts to {0}")]
    Unsettled(String),
    /// The answer to what was asked for lacks what it must have.
    #[error("the kernel's answer to a request to {0} lacks {1}")]
    Incomplete(String, &'static str),
}

impl NetlinkError {
    /// Whether the thing to add exists already.
    pub fn is_already_there(&self) -> bool {
        self.errno() == Some(Errno::EXIST)
    }

    /// Whether the interface, address or route to edit is gone.
    pub fn is_already_gone(&self) -> bool {
        let gone = [Errno::NODEV, Errno::NXIO, Errno::SRCH, Errno::ADDRNOTAVAIL, Errno::NOENT];
        self.errno().is_some_and(|errno| gone.contains(&errno))
    }

    /// Whether the kernel has nothing of this kind, as without a module of it.
    pub fn is_unsupported(&self) -> bool {
        self.errno() == Some(Errno::OPNOTSUPP)
    }

    /// Whether another program has the port.
    pub fn is_address_in_use(&self) -> bool {
        self.errno() == Some(Errno::ADDRINUSE)
    }

    /// The kernel said no to `operation`, for the reason that follows.
    pub(super) fn refused(operation: &str) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.to_owned();
        |source| Self::Refused(operation, source)
    }

    pub(super) fn errno(&self) -> Option<Errno> {
        let (Self::Refused(_, source) | Self::Open(source)) = self else { return None };
        Errno::from_io_error(source)
    }
}

/// The outcome of an addition; that the thing is there already is no error.
pub fn unless_there(outcome: Result) -> Result {
    outcome.or_else(|error| if error.is_already_there() { Ok(()) } else { Err(error) })
}

/// The outcome of a removal; that the thing is gone already is no error.
pub fn unless_gone(outcome: Result) -> Result {
    outcome.or_else(|error| if error.is_already_gone() { Ok(()) } else { Err(error) })
}

/// What is asked and answered, of one protocol.
pub(super) trait Message:
    NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<Self>> + Clone
{
}

impl<M> Message for M where
    M: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<Self>> + Clone
{
}

/// A socket for one request.
pub(super) fn socket() -> io::Result<TokioSocket> {
    socket_of(NETLINK_ROUTE)
}

/// The same, for another protocol than rtnetlink.
pub(super) fn socket_of(protocol: isize) -> io::Result<TokioSocket> {
    let socket = TokioSocket::new(protocol)?;
    socket.socket_ref().connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Lists by `request` what is `wanted` by the bytes of its message. Takes no memory for others.
pub(super) async fn list<M: Message>(
    operation: &str,
    socket: impl Fn() -> io::Result<TokioSocket>,
    request: M,
    wanted: impl Fn(&[u8]) -> bool,
) -> Result<Vec<M>> {
    for _ in 0..LISTING_ATTEMPTS_MAX {
        let listing = answer(operation, socket(), request.clone(), NLM_F_DUMP, &wanted);
        let (messages, is_interrupted) = listing.await?;
        if !is_interrupted {
            return Ok(messages);
        }
    }
    Err(NetlinkError::Unsettled(operation.to_owned()))
}

/// Makes a request; gives those messages of the answer that are `wanted`, and whether a change may
/// have hidden some.
pub(super) async fn answer<M: Message>(
    operation: &str,
    socket: io::Result<TokioSocket>,
    request: M,
    flags: u16,
    wanted: impl Fn(&[u8]) -> bool,
) -> Result<(Vec<M>, bool)> {
    let (mut messages, mut is_interrupted) = (Vec::new(), false);
    let take = |message: &[u8]| {
        is_interrupted |= number(message, FLAGS_AT).is_some_and(|it| it & NLM_F_DUMP_INTR != 0);
        if wanted(message)
            && let Ok(NetlinkMessage { payload, .. }) = NetlinkMessage::deserialize(message)
            && let NetlinkPayload::InnerMessage(message) = payload
        {
            messages.push(message);
        }
    };
    ask(operation, socket, &serialized(request, flags), take).await?;
    Ok((messages, is_interrupted))
}

/// Sends `request`, and takes what the kernel answers, message by message, until it says how that
/// ended.
pub(super) async fn ask(
    operation: &str,
    socket: io::Result<TokioSocket>,
    request: &[u8],
    take: impl FnMut(&[u8]),
) -> Result {
    let socket = socket.map_err(NetlinkError::Open)?;
    let exchange = async {
        socket.send(request).await?;
        receive(&socket, take).await
    };
    let late = |_elapsed| NetlinkError::TimedOut(operation.to_owned());
    let ended = timeout(REQUEST_TIMEOUT, exchange).await.map_err(late)?;
    ended.map_err(NetlinkError::refused(operation))
}

async fn receive(socket: &TokioSocket, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut part = Vec::with_capacity(PART_BYTES);
    loop {
        part.clear();
        socket.recv(&mut part).await?;
        let mut rest = part.as_slice();
        while let Some((message, next)) = split(rest) {
            rest = next;
            take(message);
            if matches!(kind(message), Some(NLMSG_DONE | NLMSG_ERROR)) {
                let code = message.get(HEADER_BYTES..).and_then(|code| code.first_chunk());
                return match code.copied().map_or(0, i32::from_ne_bytes) {
                    0.. => Ok(()),
                    code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                };
            }
        }
    }
}

/// Makes a request without hearing the answer: for what is dropped, perhaps after the runtime. The
/// kernel has done it when this returns.
pub(super) fn request_now(request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.send_to(&serialized(request, flags), &SocketAddr::new(0, 0), 0).map(drop)
}

/// `request` as the kernel reads it.
pub(super) fn serialized<M: Message>(request: M, flags: u16) -> Zeroizing<Vec<u8>> {
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST | flags;
    message.finalize();
    // There may be keys in it.
    let mut bytes = Zeroizing::new(vec![0; message.buffer_len()]);
    message.serialize(&mut bytes);
    bytes
}

/// The first message of `bytes`, and what follows.
pub(super) fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
    let message = bytes.get(..length).filter(|message| message.len() >= HEADER_BYTES)?;
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// The type of a message.
pub(super) fn kind(message: &[u8]) -> Option<u16> {
    number(message, TYPE_AT)
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

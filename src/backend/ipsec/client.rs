//! A connection to charon: one request at a time, each within a time limit.

use std::io;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::vici::{MalformedPacket, Message, PACKET_BYTES_MAX, Packet, Request};

/// Where charon listens by default, and flannel looks for it.
pub(super) const SOCKET: &str = "/var/run/charon.vici";
pub(super) const DIRECTORY: &str = "/var/run";

/// charon answers within milliseconds, but has threads of its own that may have to wait.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// charon did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ViciError {
    /// It has no socket there, or does not listen.
    #[error("charon does not listen at {SOCKET}")]
    Absent(#[source] io::Error),
    /// The socket is not for this user.
    #[error("charon's socket {SOCKET} cannot be used; run weftd as the user of charon, or as root")]
    Forbidden(#[source] io::Error),
    /// It ended, or closed the connection.
    #[error("the connection to charon broke at {0}")]
    Broken(&'static str, #[source] io::Error),
    /// It hangs.
    #[error("charon gives no answer to {0} within {seconds} s", seconds = ANSWER_MAX.as_secs())]
    TimedOut(&'static str),
    /// It speaks another protocol.
    #[error("charon's answer to {0} makes no sense")]
    Malformed(&'static str, #[source] MalformedPacket),
    /// It said no.
    #[error("charon refuses {0}: {1:?}")]
    Refused(&'static str, String),
}

pub(super) type Result<T = ()> = std::result::Result<T, ViciError>;

impl ViciError {
    /// What was refused, where the connection is as good as before.
    pub(super) fn unless_refused(self) -> Result<Self> {
        if matches!(self, Self::Refused(..)) { Ok(self) } else { Err(self) }
    }
}

#[derive(Debug)]
pub(super) struct Client(UnixStream);

impl Client {
    pub(super) async fn connect() -> Result<Self> {
        let connected = timeout(ANSWER_MAX, UnixStream::connect(SOCKET)).await;
        let connected = connected.map_err(|_elapsed| ViciError::TimedOut("a connection"))?;
        connected.map(Self).map_err(|error| {
            let is_forbidden = error.kind() == io::ErrorKind::PermissionDenied;
            if is_forbidden { ViciError::Forbidden(error) } else { ViciError::Absent(error) }
        })
    }

    /// Waits for an event that was registered, or the end of the connection, of which the next
    /// request tells. Cancel-safe.
    pub(super) async fn news(&self) {
        let peek = || Ok(recv(&self.0, &mut [0], RecvFlags::PEEK)?.1);
        // What was read last has left nothing behind, of which tokio does not know yet.
        while self.0.readable().await.is_ok()
            && let Err(error) = self.0.try_io(Interest::READABLE, peek)
            && error.kind() == io::ErrorKind::WouldBlock
        {}
    }

    /// Has something done, and gives the answer.
    pub(super) async fn ask(&mut self, request: Request) -> Result<Message> {
        Ok(self.converse(request, None).await?.0)
    }

    /// The same of what is listed by events of this name.
    pub(super) async fn list(
        &mut self,
        command: &'static str,
        event: &'static str,
    ) -> Result<Vec<Message>> {
        self.ask(Request::register(event)).await?;
        Ok(self.converse(Request::command(command), Some(event)).await?.1)
    }

    /// Events that nobody waits for are skipped.
    async fn converse(
        &mut self,
        request: Request,
        listed_by: Option<&str>,
    ) -> Result<(Message, Vec<Message>)> {
        let command = request.command;
        let mut listed = Vec::new();
        let exchange = async {
            let broken = |error| ViciError::Broken(command, error);
            self.send(&request).await.map_err(broken)?;
            loop {
                let bytes = self.receive().await.map_err(broken)?;
                let packet =
                    Packet::parse(&bytes).map_err(|error| ViciError::Malformed(command, error))?;
                match packet {
                    Packet::Event(name, message) if Some(name.as_str()) == listed_by => {
                        listed.push(message);
                    }
                    Packet::Event(..) => {}
                    Packet::Response(message) => return Ok(message),
                    Packet::Registered => return Ok(Message::default()),
                    Packet::UnknownCommand | Packet::UnknownEvent => {
                        let why = "this version has no such thing".to_owned();
                        return Err(ViciError::Refused(command, why));
                    }
                }
            }
        };
        let answer = timeout(ANSWER_MAX, exchange).await;
        let answer = answer.map_err(|_elapsed| ViciError::TimedOut(command))??;
        if answer.text("success") == Some("no") {
            let why = answer.text("errmsg").unwrap_or("it does not say why");
            return Err(ViciError::Refused(command, why.to_owned()));
        }
        Ok((answer, listed))
    }

    async fn send(&mut self, request: &Request) -> io::Result<()> {
        let length = u32::try_from(request.bytes().len()).map_err(io::Error::other)?;
        self.0.write_all(&length.to_be_bytes()).await?;
        self.0.write_all(request.bytes()).await
    }

    async fn receive(&mut self) -> io::Result<Vec<u8>> {
        let length = self.0.read_u32().await?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > PACKET_BYTES_MAX {
            return Err(io::Error::other(format!("a packet of {length} bytes")));
        }
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).await?;
        Ok(bytes)
    }
}

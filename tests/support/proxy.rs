//! A TCP relay on loopback that a test can cut, and mend again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

/// How the relay treats its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Relays.
    Open,
    /// Closes what is open and refuses what is new.
    Cut,
    /// Says nothing on any connection, without closing it: a half-open path.
    Silent,
    /// Relays, but once a client has written a lease on a connection, it hears nothing there.
    LosesAnswers,
    /// Relays, but what a watch brings of the keys of [`LOST_KEYS`] gets lost.
    LosesEvents,
}

/// What only the write of a lease sends to etcd.
const WRITE_MARK: &[u8] = b"\"PublicIP\"";

/// A relay to one address, until dropped. It has a thread of its own, so that it goes on while
/// the test waits for a program.
pub struct Proxy {
    pub port: u16,
    mode: watch::Sender<Mode>,
    lost: Arc<AtomicU64>,
    _stop: oneshot::Sender<()>,
}

impl Proxy {
    pub fn to(target: SocketAddr) -> Self {
        Self::between("127.0.0.1:0".parse().unwrap(), target)
    }

    /// A relay that listens on `address`; both ends are in the caller's network namespace.
    pub fn between(address: SocketAddr, target: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, changes) = watch::channel(Mode::Open);
        let (stop, stopped) = oneshot::channel::<()>();
        let lost = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&lost);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async move {
                tokio::select! {
                    () = accept(listener, target, changes, counter) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { port, mode, lost, _stop: stop }
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Messages that got lost in [`Mode::LosesEvents`].
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

async fn accept(
    listener: std::net::TcpListener,
    target: SocketAddr,
    changes: watch::Receiver<Mode>,
    lost: Arc<AtomicU64>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        tokio::spawn(relay(client, target, changes.clone(), Arc::clone(&lost)));
    }
}

async fn relay(
    mut client: TcpStream,
    target: SocketAddr,
    mut mode: watch::Receiver<Mode>,
    lost: Arc<AtomicU64>,
) {
    let first = *mode.borrow_and_update();
    if first == Mode::Cut {
        return;
    }
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    if first == Mode::Open {
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut server) => return,
            _ = mode.changed() => {}
        }
    }
    if first == Mode::LosesEvents {
        tokio::select! {
            _ = relay_without_events(client, server, &lost) => {}
            _ = mode.wait_for(|mode| *mode == Mode::Cut) => {}
        }
        return;
    }
    if first == Mode::LosesAnswers {
        tokio::select! {
            _ = relay_until_write(&mut client, &mut server) => {}
            _ = mode.changed() => return,
        }
        // What was written arrives, and the connection stays.
        mode.changed().await.ok();
        return;
    }
    // Both ends stay open and hear nothing, until the path is cut; a path that was silent does
    // not come back to life, as with a firewall that forgot it.
    mode.wait_for(|mode| *mode == Mode::Cut).await.ok();
}

async fn relay_until_write(client: &mut TcpStream, server: &mut TcpStream) -> std::io::Result<()> {
    let (mut from_client, mut from_server) = ([0; 16 * 1024], [0; 16 * 1024]);
    loop {
        tokio::select! {
            count = client.read(&mut from_client) => {
                let sent = &from_client[..count?];
                server.write_all(sent).await?;
                let is_write = sent.windows(WRITE_MARK.len()).any(|part| part == WRITE_MARK);
                if sent.is_empty() || is_write {
                    return Ok(());
                }
            }
            count = server.read(&mut from_server) => {
                let sent = &from_server[..count?];
                client.write_all(sent).await?;
                if sent.is_empty() {
                    return Ok(());
                }
            }
        }
    }
}

/// Keys of which no event arrives in [`Mode::LosesEvents`].
const LOST_KEYS: &[u8] = b"/coreos.com/network/subnets/10.5.255.";

/// Whether the message is an answer to a watch with an event of a key that gets lost, and not a
/// listing that has such a key. Before the key are, each with its length, the tags of the key (1 of
/// `mvccpb.KeyValue`), of the entry (2 of `mvccpb.Event`), of the event's type if that is a
/// deletion, and of the event (11 of `WatchResponse`).
fn is_lost_event(message: &[u8]) -> bool {
    const EVENT: u8 = 11 << 3 | 2;
    const ENTRY: u8 = 2 << 3 | 2;
    const TYPE: [u8; 2] = [1 << 3, 1];
    let mut parts = message.windows(LOST_KEYS.len());
    let Some(at) = parts.position(|part| part == LOST_KEYS) else { return false };
    let before = &message[at.saturating_sub(12)..at];
    // A length has one byte or two.
    (2..=3).any(|skipped| {
        before.windows(skipped + 3).any(|part| {
            let rest = &part[skipped..];
            part[0] == EVENT && (rest[0] == ENTRY || rest.starts_with(&TYPE) && rest[2] == ENTRY)
        })
    })
}

/// Frames of HTTP/2: a length of three bytes, a type, five more bytes, and the payload
/// (RFC 9113 4.1). A message of gRPC that is one DATA frame can be taken out whole; what is lost of
/// the flow-control window is a few hundred bytes.
async fn relay_without_events(
    client: TcpStream,
    server: TcpStream,
    lost: &AtomicU64,
) -> std::io::Result<()> {
    const HEADER_BYTES: usize = 9;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let down = async {
        loop {
            let mut frame = vec![0; HEADER_BYTES];
            from_server.read_exact(&mut frame).await?;
            let length = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]) as usize;
            let is_data = frame[3] == 0;
            frame.resize(HEADER_BYTES + length, 0);
            from_server.read_exact(&mut frame[HEADER_BYTES..]).await?;
            if is_data && is_lost_event(&frame[HEADER_BYTES..]) {
                lost.fetch_add(1, Ordering::Relaxed);
            } else {
                to_client.write_all(&frame).await?;
            }
        }
    };
    tokio::select! {
        done = down => done,
        done = tokio::io::copy(&mut from_client, &mut to_server) => done.map(drop),
    }
}

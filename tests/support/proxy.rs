//! A TCP relay on loopback that a test can cut, and mend again.

use std::net::SocketAddr;

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
}

/// What only the write of a lease sends to etcd.
const WRITE_MARK: &[u8] = b"\"PublicIP\"";

/// A relay to one address, until dropped. It has a thread of its own, so that it goes on while
/// the test waits for a program.
pub struct Proxy {
    pub port: u16,
    mode: watch::Sender<Mode>,
    _stop: oneshot::Sender<()>,
}

impl Proxy {
    pub fn to(target: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, changes) = watch::channel(Mode::Open);
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async move {
                tokio::select! {
                    () = accept(listener, target, changes) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { port, mode, _stop: stop }
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

async fn accept(
    listener: std::net::TcpListener,
    target: SocketAddr,
    changes: watch::Receiver<Mode>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        tokio::spawn(relay(client, target, changes.clone()));
    }
}

async fn relay(mut client: TcpStream, target: SocketAddr, mut mode: watch::Receiver<Mode>) {
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

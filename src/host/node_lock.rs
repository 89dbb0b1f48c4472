//! One daemon per node of a store: an abstract unix socket whose name says which node of which
//! store it is. Such names belong to the network namespace, as the ports, routes and devices do
//! that two daemons would fight for, so containers that share it meet here whatever files they
//! see. The kernel gives a name back with its process.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, sleep, timeout};

/// Grace period for a stopping daemon that still has the lock.
const GRACE: Duration = Duration::from_secs(1);
/// Pause between two attempts meanwhile.
const RETRY: Duration = Duration::from_millis(20);

/// The unix sockets of this network namespace (proc_net(5)).
const SOCKETS: &str = "/proc/net/unix";

/// A holder's kernel answers at once, unless its queue of connections is full.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// Pause after a connection that could not be taken, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The lock of one node of one store. Released when dropped, or when the process ends.
#[derive(Debug)]
pub struct NodeLock {
    listener: UnixListener,
}

/// Why this process may not be that node.
#[derive(Debug, thiserror::Error)]
pub enum NodeLockError {
    /// Another daemon is that node.
    #[error(
        "{} is already the node {address} of this store in this network namespace; stop it \
         first, or give this one another store, prefix or --public-ip",
        describe(*pid)
    )]
    Taken {
        /// The node's address.
        address: IpAddr,
        /// The other daemon, unless it is in a pid namespace that cannot be seen from here.
        pid: Option<i32>,
    },
    /// A process that is no weftd has the name, of this user, if known; any user may take one.
    #[error("its name is taken by {}, not by a weftd", describe_user(*.0))]
    Squatted(Option<u32>),
    /// The kernel refuses such sockets.
    #[error("cannot bind an abstract unix socket")]
    Unusable(#[source] io::Error),
}

fn describe(pid: Option<i32>) -> String {
    pid.map_or_else(
        || "a weftd in another container".to_owned(),
        |pid| format!("the weftd with pid {pid}"),
    )
}

fn describe_user(user: Option<u32>) -> String {
    user.map_or_else(|| "a process that does not answer".to_owned(), |user| format!("user {user}"))
}

impl NodeLock {
    /// Takes the lock of `address` in `store`, which is any text that names the store.
    pub async fn acquire(store: &str, address: IpAddr) -> Result<Self, NodeLockError> {
        let name = name(store, address);
        let give_up = Instant::now() + GRACE;
        loop {
            match UnixListener::bind(&name) {
                Ok(listener) => return Ok(Self { listener }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(NodeLockError::Unusable(error)),
            }
            let error = holder(&name, address).await;
            if Instant::now() >= give_up {
                return Err(error);
            }
            sleep(RETRY).await;
        }
    }

    /// The nodes that other daemons are in this network namespace, whatever their stores.
    pub async fn held_by_others() -> io::Result<Vec<NodeLockError>> {
        let mut held = Vec::new();
        for line in std::fs::read_to_string(SOCKETS)?.lines() {
            if let Some((name, address)) = read_name(line)
                && let taken @ NodeLockError::Taken { .. } = holder(&name, address).await
            {
                held.push(taken);
            }
        }
        Ok(held)
    }

    /// Whether no other process has such a lock here.
    pub async fn is_alone() -> io::Result<bool> {
        let own = i32::try_from(std::process::id()).ok();
        let is_own =
            |held: &NodeLockError| matches!(held, NodeLockError::Taken { pid, .. } if *pid == own);
        Ok(Self::held_by_others().await?.iter().all(is_own))
    }

    /// Accepts connections, so that other daemons can always ask the kernel who has the lock.
    pub async fn answer(&self) -> Infallible {
        loop {
            if self.listener.accept().await.is_err() {
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The name, of a length that fits, which all versions must compute alike.
fn name(store: &str, address: IpAddr) -> String {
    // FNV-1a, which stays the same where the standard library's hasher may change.
    let hash = store.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("\0weftd/{hash:016x}/{address}")
}

/// The name in a line of [`SOCKETS`], which shows its first byte as `@`, if it is a daemon's.
fn read_name(line: &str) -> Option<(String, IpAddr)> {
    let (_, name) = line.split_once('@')?;
    let (_, address) = name.strip_prefix("weftd/")?.split_once('/')?;
    Some((format!("\0{name}"), address.parse().ok()?))
}

/// Who has `name`. Only a process of root or of this user is taken for a daemon.
async fn holder(name: &str, address: IpAddr) -> NodeLockError {
    let Ok(Ok(stream)) = timeout(ANSWER_TIMEOUT, UnixStream::connect(name)).await else {
        return NodeLockError::Squatted(None);
    };
    let Ok(peer) = stream.peer_cred() else { return NodeLockError::Squatted(None) };
    if peer.uid() != 0 && peer.uid() != rustix::process::geteuid().as_raw() {
        return NodeLockError::Squatted(Some(peer.uid()));
    }
    NodeLockError::Taken { address, pid: peer.pid().filter(|pid| *pid > 0) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::Ipv4Addr;
    use std::process::{Command, Stdio};

    use super::*;

    const NODE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

    /// Of a store that no other test has.
    fn store() -> String {
        format!("test {:016x}", fastrand::u64(..))
    }

    #[tokio::test]
    async fn second_daemon_learns_the_first_ones_pid() {
        let store = store();
        let first = NodeLock::acquire(&store, NODE).await.unwrap();
        let error = NodeLock::acquire(&store, NODE).await.unwrap_err();
        assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
        NodeLock::acquire(&store, Ipv4Addr::LOCALHOST.into())
            .await
            .expect("another address is free");
        NodeLock::acquire("another store", NODE).await.expect("another store is free");
        let held = NodeLock::held_by_others().await.unwrap();
        assert!(!held.is_empty(), "a daemon that runs is not seen");
        drop(first);
        NodeLock::acquire(&store, NODE).await.expect("the name is kept");
    }

    #[tokio::test]
    async fn acquire_waits_for_a_stopping_daemon() {
        let store = store();
        let first = NodeLock::acquire(&store, NODE).await.unwrap();
        let (second, ()) = tokio::join!(NodeLock::acquire(&store, NODE), async {
            sleep(RETRY * 3).await;
            drop(first);
        });
        second.expect("the successor did not wait");
    }

    #[tokio::test]
    async fn ten_thousand_connections_are_answered() {
        let store = store();
        let lock = NodeLock::acquire(&store, NODE).await.unwrap();
        let name = name(&store, NODE);
        let crowd = async {
            // More than any queue of connections holds.
            for _ in 0..10_000 {
                UnixStream::connect(&name).await.unwrap();
            }
        };
        tokio::select! {
            never = lock.answer() => match never {},
            () = crowd => {}
        }
        assert!(matches!(holder(&name, NODE).await, NodeLockError::Taken { pid: Some(_), .. }));
    }

    #[tokio::test]
    async fn name_of_another_user_is_squatted() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let store = store();
        let name = name(&store, NODE);
        // It changes its user itself: nobody may be forbidden to search `/`.
        let script = "import os, socket, sys, time
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.bind(chr(0) + sys.argv[1])
s.listen()
print('taken', flush=True)
time.sleep(60)";
        let mut nobody = Command::new("python3")
            .args(["-c", script])
            .arg(&name[1..])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 6];
        nobody.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        let error = NodeLock::acquire(&store, NODE).await.unwrap_err();
        nobody.kill().unwrap();
        nobody.wait().unwrap();
        assert!(matches!(error, NodeLockError::Squatted(Some(65_534))), "{error}");
    }
}

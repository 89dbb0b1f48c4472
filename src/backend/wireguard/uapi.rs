//! The socket by which `wg show` reads a device that runs in a process (section "Cross-platform
//! Userspace Implementation" of wireguard.com/xplatform). Peers are what leases say, so nothing can
//! be set by it; and secrets stay here.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream as Probe;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::host::netlink::wireguard::FoundDevice;
use crate::wireguard::keys::PublicKey;

/// Where `wg` looks.
const DIRECTORY: &str = "/var/run/wireguard";

/// How long one client may take: they are served one after the other.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of a request; `get=1` has six.
const REQUEST_BYTES_MAX: u64 = 4096;

/// What a client that wants to change something is told: EOPNOTSUPP.
const NOT_SUPPORTED: i32 = 95;

/// The socket of one device.
#[derive(Debug)]
pub(super) struct Uapi(UnixListener);

impl Uapi {
    /// Opens that of the device with this name. Without it nothing is lost but `wg show`.
    pub(super) fn open(name: &str) -> Option<Self> {
        let path = Path::new(DIRECTORY).join(format!("{name}.sock"));
        match bind(&path) {
            Ok(listener) => Some(Self(listener)),
            Err(error) => {
                warn!("`wg show` does not show {name}: no socket at {}: {error}", path.display());
                None
            }
        }
    }

    /// Answers clients by what `read` says. Cancel-safe.
    pub(super) async fn serve(&self, read: impl Fn() -> FoundDevice) -> Infallible {
        let Self(listener) = self;
        loop {
            match listener.accept().await {
                // A client that goes away is none of ours.
                Ok((client, _)) => drop(timeout(PATIENCE, answer(client, &read)).await),
                // No descriptors are left.
                Err(_) => sleep(PATIENCE).await,
            }
        }
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    let directory = path.parent().unwrap_or(path);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    if Probe::connect(path).is_ok() {
        return Err(io::Error::other("another process answers there"));
    }
    if path.symlink_metadata().is_ok() {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn answer(client: UnixStream, read: &impl Fn() -> FoundDevice) -> io::Result<()> {
    let mut client = BufReader::new(client);
    let mut line = String::new();
    (&mut client).take(REQUEST_BYTES_MAX).read_line(&mut line).await?;
    let text = match line.trim_end() {
        "get=1" => described(&read()),
        _ => format!("errno={NOT_SUPPORTED}\n\n"),
    };
    client.write_all(text.as_bytes()).await
}

/// A device, in the words of that protocol.
fn described(device: &FoundDevice) -> String {
    let mut text = format!("listen_port={}\n", device.listen_port);
    for peer in &device.peers {
        let state = &peer.state;
        let mut line = |name: &str, value: &dyn std::fmt::Display| {
            // Into a String nothing fails.
            writeln!(text, "{name}={value}").unwrap_or_default();
        };
        line("public_key", &hex(state.public_key));
        line("protocol_version", &1);
        if let Some(endpoint) = state.endpoint {
            line("endpoint", &endpoint);
        }
        line("last_handshake_time_sec", &state.last_handshake_unix.unwrap_or(0));
        line("last_handshake_time_nsec", &0);
        line("tx_bytes", &state.sent_bytes);
        line("rx_bytes", &state.received_bytes);
        line("persistent_keepalive_interval", &peer.keepalive_seconds);
        for (address, bits) in &peer.allowed {
            line("allowed_ip", &format_args!("{address}/{bits}"));
        }
    }
    text + "errno=0\n\n"
}

fn hex(PublicKey(bytes): PublicKey) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wireguard::difference::FoundPeer;
    use crate::wireguard::peer::PeerState;

    #[test]
    fn a_device_is_told_in_wgs_words_and_without_secrets() {
        let state = PeerState {
            public_key: PublicKey([0xab; 32]),
            endpoint: "192.0.2.2:51820".parse().ok(),
            last_handshake_unix: Some(7),
            received_bytes: 8,
            sent_bytes: 9,
            packets: None,
        };
        let allowed = [("10.5.2.0".parse().unwrap(), 24)].into();
        let preshared_key = Some([7; 32].into());
        let peer = FoundPeer { state, preshared_key, allowed, keepalive_seconds: 25 };
        let device = FoundDevice { public_key: None, listen_port: 51_820, peers: vec![peer] };
        let key = "ab".repeat(32);
        assert_eq!(
            described(&device),
            format!(
                "listen_port=51820\npublic_key={key}\nprotocol_version=1\n\
                 endpoint=192.0.2.2:51820\nlast_handshake_time_sec=7\n\
                 last_handshake_time_nsec=0\ntx_bytes=9\nrx_bytes=8\n\
                 persistent_keepalive_interval=25\nallowed_ip=10.5.2.0/24\nerrno=0\n\n"
            )
        );
    }
}

//! Tests with the tool's client against the daemon's server, over real sockets.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::thread;

use serde_json::{Value, json};

use super::*;

/// Serves `path` while `client` runs in another thread.
fn while_serving<T: Send + 'static>(path: &Path, client: impl FnOnce() -> T + Send + 'static) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = PrivateSocket::bind(path).unwrap();
        let serving = server.serve(|path| match path {
            "/status" => {
                let peers = vec!["10.5.1.0/24"; 5000];
                Some(http::json(&json!({"version": 1, "peers": peers})))
            }
            "/metrics" => Some(http::metrics("weft_packets_total 7\n".to_owned())),
            _ => None,
        });
        let (done, finished) = tokio::sync::oneshot::channel();
        let client = thread::spawn(move || done.send(client()).ok());
        let outcome = tokio::select! {
            never = serving => match never {},
            outcome = finished => outcome,
        };
        client.join().unwrap();
        outcome.unwrap()
    })
}

#[test]
fn status_and_metrics_come_back_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run/weft.sock");
    let socket = path.clone();
    let (status, metrics, other) = while_serving(&path, move || {
        (
            fetch_unix(&socket, "/status"),
            fetch_unix(&socket, "/metrics"),
            fetch_unix(&socket, "/healthz"),
        )
    });
    let status: Value = serde_json::from_slice(&status.unwrap()).unwrap();
    assert_eq!(status["version"], 1);
    assert_eq!(status["peers"].as_array().unwrap().len(), 5000);
    assert_eq!(metrics.unwrap(), b"weft_packets_total 7\n");
    assert_eq!(other.unwrap_err().to_string(), "weftd answered 404 to /healthz");
    assert!(!path.exists(), "the socket's file is left");
}

#[test]
fn only_get_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let socket = path.clone();
    let reply = while_serving(&path, move || {
        let mut stream = StdStream::connect(socket).unwrap();
        stream.write_all(b"POST /status HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    });
    assert!(reply.starts_with("HTTP/1.1 405 "), "{reply}");
}

#[test]
fn socket_is_private_to_its_user() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let socket = path.clone();
    let mode = while_serving(&path, move || fs::metadata(socket).unwrap().permissions().mode());
    assert_eq!(mode & 0o7777, 0o600);
}

#[test]
fn stale_socket_is_replaced_served_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    drop(StdListener::bind(&path).unwrap());
    assert!(path.exists());
    let socket = path.clone();
    let second = while_serving(&path, move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let second = PrivateSocket::bind(&socket).map(drop);
        fetch_unix(&socket, "/status").unwrap();
        second
    });
    let error = second.unwrap_err().to_string();
    assert!(error.contains("weft.sock"), "{error}");
}

#[test]
fn non_socket_file_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    fs::write(&path, "precious").unwrap();
    let error = PrivateSocket::bind(&path).unwrap_err().to_string();
    assert!(error.contains("weft.sock"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    let long = directory.path().join("s".repeat(120));
    let error = PrivateSocket::bind(&long).unwrap_err();
    assert!(error.to_string().contains("--status-socket"), "{error}");
}

#[test]
fn a_replaced_file_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let entered = runtime.enter();
    let first = PrivateSocket::bind(&path).unwrap();
    // Both exist at once, so that the second cannot get the first one's inode.
    let other = directory.path().join("other.sock");
    let _second = StdListener::bind(&other).unwrap();
    fs::rename(&other, &path).unwrap();
    drop(first);
    drop(entered);
    assert!(path.exists());
}

#[test]
fn missing_or_dead_socket_says_not_running() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let error = fetch_unix(&path, "/status").unwrap_err();
    assert!(error.to_string().contains("weft.sock"), "{error}");
    drop(StdListener::bind(&path).unwrap());
    let error = fetch_unix(&path, "/status").unwrap_err();
    assert!(error.to_string().contains("weft.sock"), "{error}");
}

/// What the tool makes of a server that answers `reply` and closes.
fn fetched(reply: &'static [u8]) -> anyhow::Result<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let listener = StdListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 16];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(reply).unwrap();
    });
    let fetched = fetch_unix(&path, "/status");
    server.join().unwrap();
    fetched
}

#[test]
fn half_a_reply_is_an_error() {
    let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(fetched(whole).unwrap(), b"abc");
    for length in 0..whole.len() {
        assert!(fetched(&whole[..length]).is_err(), "{length} bytes were enough");
    }
    for bad in [
        &b"HTTP/1.1 2\r\nContent-Length: 0\r\n\r\n"[..],
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 \xff\r\nContent-Length: x\r\n\r\n",
    ] {
        assert!(fetched(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
    }
}

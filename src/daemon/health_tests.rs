//! Tests over real connections: answers, and what hostile clients cannot do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::daemon::http::CONNECTIONS_MAX;

const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `test` against a server, in one thread as in the daemon.
fn with_server<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Readiness) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Readiness::default();
        let test = test(address, readiness.clone());
        tokio::select! {
            never = serve(address, Some(listener), readiness) => match never {},
            outcome = tokio::time::timeout(PATIENCE, test) => outcome.unwrap(),
        }
    });
}

async fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).await.unwrap();
    String::from_utf8(reply).unwrap()
}

async fn ask(address: SocketAddr, method: &str, path: &str) -> (String, String) {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let reply = exchange(address, &request).await;
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().to_owned(), body.to_owned())
}

#[test]
fn healthz_is_green_for_any_method() {
    with_server(|address, _| async move {
        for method in ["GET", "POST", "DELETE", "OPTIONS", "BREW"] {
            let (status, body) = ask(address, method, "/healthz").await;
            assert_eq!(
                (status.as_str(), body.as_str()),
                ("200", "flanneld is running"),
                "{method}"
            );
        }
        let (status, body) = ask(address, "HEAD", "/healthz").await;
        assert_eq!((status.as_str(), body.as_str()), ("200", ""));
        let (status, _) = ask(address, "GET", "/healthz?verbose=1").await;
        assert_eq!(status, "200");
        let reply = exchange(address, "GET /healthz HTTP/1.0\r\n\r\n").await;
        assert!(reply.contains(" 200 ") && reply.ends_with("flanneld is running"), "{reply}");
    });
}

#[test]
fn readyz_follows_readiness() {
    with_server(|address, readiness| async move {
        assert_eq!(ask(address, "GET", "/readyz").await.0, "503");
        readiness.set(true);
        assert_eq!(ask(address, "GET", "/readyz").await.0, "200");
        readiness.set(false);
        assert_eq!(ask(address, "GET", "/readyz").await.0, "503");
    });
}

#[test]
fn other_paths_do_not_exist() {
    with_server(|address, _| async move {
        for path in ["/", "/healthz/", "/metrics", "/status", "//healthz", "*"] {
            assert_eq!(ask(address, "OPTIONS", path).await.0, "404", "{path}");
        }
    });
}

#[test]
fn address_in_use_is_named_in_error() {
    with_server(|address, _| async move {
        let error = listen(address).await.unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert!(error.source().is_some());
    });
}

#[test]
fn long_headers_are_refused() {
    with_server(|address, _| async move {
        let padding = "a".repeat(9000);
        let request = format!("GET /healthz HTTP/1.1\r\nHost: x\r\nX: {padding}\r\n\r\n");
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        // The connection may be reset, because not everything sent was read.
        let outcome = stream.read_to_end(&mut reply).await;
        let reply = String::from_utf8(reply).unwrap();
        assert!(reply.contains(" 431 ") || outcome.is_err(), "{reply}");
        assert!(!reply.contains(" 200 "), "{reply}");
        assert_eq!(ask(address, "GET", "/healthz").await.0, "200");
    });
}

#[test]
fn silent_clients_do_not_keep_a_probe_out() {
    with_server(|address, _| async move {
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS_MAX * 3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /healthz HTTP/1.1\r\nX: ").await.unwrap();
            silent.push(stream);
        }
        let start = Instant::now();
        assert_eq!(ask(address, "GET", "/healthz").await.0, "200");
        assert!(start.elapsed() < Duration::from_secs(8), "the probe had to wait");
        let mut first = silent.swap_remove(0);
        let mut rest = Vec::new();
        let over = tokio::time::timeout(Duration::from_secs(8), first.read_to_end(&mut rest));
        // Closed or reset, but in any case over, before its own time limit.
        over.await.expect("the oldest connection did not give way").ok();
        assert!(rest.is_empty());
    });
}

#[test]
fn silent_client_is_dropped_in_time() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, server) = tokio::io::duplex(64);
        let page = Arc::new(|_: &Method, path: &str| answer(path, true));
        let start = Instant::now();
        http::serve_connection(server, page, Duration::from_millis(100)).await;
        let elapsed = start.elapsed();
        assert!(elapsed >= Duration::from_millis(100) && elapsed < PATIENCE / 5, "{elapsed:?}");
        drop(client);
    });
}

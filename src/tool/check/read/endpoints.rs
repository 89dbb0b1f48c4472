//! Whether endpoints of etcd answer: a connection, and over plain HTTP the version.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures_util::future::join_all;
use hyper::{StatusCode, Uri};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::config::options::without_secrets;
use crate::daemon::status::exchange;

/// For the name, the connection and the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// All at once.
pub(super) async fn ask_all(urls: &[String]) -> Vec<Result<String, String>> {
    let asked = urls.iter().map(async |url| {
        let started = Instant::now();
        // Evidence goes to reports, and passwords do not.
        let shown = without_secrets(url);
        match timeout(PATIENCE, ask(url)).await {
            Ok(Ok(says)) => Ok(format!("{shown}: {says}, {} ms", started.elapsed().as_millis())),
            Ok(Err(error)) => Err(format!("{shown}: {error:#}")),
            Err(_elapsed) => Err(format!("{shown}: no answer after {} s", PATIENCE.as_secs())),
        }
    });
    join_all(asked).await
}

async fn ask(url: &str) -> anyhow::Result<String> {
    let whole = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let url: Uri = whole.parse().context("it is no URL")?;
    let port = match url.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        other => bail!("{}:// is neither http nor https", other.unwrap_or_default()),
    };
    let host = url.host().unwrap_or_default();
    // IPv6 has brackets in a URL.
    let address = (host.trim_matches(['[', ']']), url.port_u16().unwrap_or(port));
    let stream = TcpStream::connect(address).await.context("it can't be connected to")?;
    if url.scheme_str() == Some("https") {
        return Ok("connects (TLS not tried)".to_owned());
    }
    let reply = exchange(stream, host, "/version").await.context("it does not answer in HTTP")?;
    if reply.status() != StatusCode::OK {
        bail!("it answers {} to /version", reply.status().as_u16());
    }
    let says: Value = serde_json::from_slice(reply.body()).unwrap_or_default();
    let version = says["etcdserver"].as_str();
    Ok(version.map_or_else(|| "answers".to_owned(), |version| format!("etcd {version}")))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpListener};

    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::tool::ask::wait_for;

    fn answer(url: &str) -> Result<String, String> {
        wait_for(ask_all(&[url.to_owned()])).unwrap().remove(0)
    }

    #[test]
    fn an_endpoint_answers_or_refuses() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for text in ["HTTP/1.1 200 OK\r\n\r\n{\"etcdserver\":\"3.5.21\"}", "220 hello\r\n"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut question = [0; 1024];
                assert!(stream.read(&mut question).unwrap() > 0);
                stream.write_all(text.as_bytes()).unwrap();
            }
        });
        let found = answer(&format!("http://u:p@{address}/x"));
        assert!(found.unwrap().starts_with(&format!("http://{address}/x: etcd 3.5.21, ")));
        assert!(answer(&address.to_string()).unwrap_err().contains("HTTP"));
        server.join().unwrap();
        // One that never listened: a child that another test starts may hold the listener open for
        // a moment longer.
        let closed = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = closed.local_addr().unwrap().as_socket().unwrap();
        assert!(answer(&address.to_string()).unwrap_err().contains("refused"));
        assert!(answer("unix://x").unwrap_err().contains("unix:// is neither"));
    }

    #[test]
    fn secrets_are_left_out() {
        assert_eq!(without_secrets("http://u:p@a:1"), "http://a:1");
        assert_eq!(without_secrets("http://a:1/?token=x@y"), "http://a:1/?***");
        assert_eq!(without_secrets("u:p@a:1"), "a:1");
    }
}

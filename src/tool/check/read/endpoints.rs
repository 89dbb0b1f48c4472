//! Whether endpoints of etcd answer: a connection, and over plain HTTP the version.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::config::options::without_secrets;
use crate::tool::check::facts::Endpoint;

/// For each step: the name, the connection, the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// `{"etcdserver":"3.5.21","etcdcluster":"3.5.0"}` and the head in front of it.
const ANSWER_BYTES_MAX: u64 = 4096;

/// All at once.
pub(super) fn ask_all(urls: &[String]) -> Vec<Endpoint> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = urls.iter().map(|url| scope.spawn(|| ask(url))).collect();
        let answers = asked.into_iter().map(|thread| thread.join());
        let lost = || Err("the question was lost".to_owned());
        urls.iter()
            .zip(answers)
            .map(|(url, answer)| Endpoint {
                // Evidence goes to reports, and passwords do not.
                url: without_secrets(url),
                answer: answer.unwrap_or_else(|_| lost()),
            })
            .collect()
    })
}

fn ask(url: &str) -> Result<(u64, String), String> {
    let (is_plain, host) = parts(url)?;
    let address = resolve(host.clone())?;
    let started = Instant::now();
    let connected = TcpStream::connect_timeout(&address, PATIENCE);
    let mut stream = connected.map_err(|error| named("connecting", &error))?;
    let answer = match is_plain {
        true => version(&mut stream, &host).map_err(|error| named("its answer", &error))?,
        false => "connects (TLS not tried)".to_owned(),
    };
    let milliseconds = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok((milliseconds, answer))
}

fn named(what: &str, error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        "connection refused".to_owned()
    } else if [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock].contains(&error.kind()) {
        format!("{what} timed out after {} s", PATIENCE.as_secs())
    } else {
        format!("{what}: {error}")
    }
}

/// Whether it is plain HTTP, and `host:port`.
fn parts(url: &str) -> Result<(bool, String), String> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let is_plain = match scheme {
        "http" => true,
        "https" => false,
        other => return Err(format!("{other}:// is neither http nor https")),
    };
    let host = rest.split(['/', '?']).next().unwrap_or_default();
    let host = host.rsplit('@').next().unwrap_or_default();
    let has_port = host.rsplit(':').next().is_some_and(|port| port.parse::<u16>().is_ok());
    match has_port && host.contains(':') {
        true => Ok((is_plain, host.to_owned())),
        false => Ok((is_plain, format!("{host}:{}", if is_plain { 80 } else { 443 }))),
    }
}

/// The system's resolver takes as long as it likes, so it has a thread of its own.
fn resolve(host: String) -> Result<SocketAddr, String> {
    let (sender, receiver) = mpsc::channel();
    let asked = host.clone();
    std::thread::spawn(move || {
        let answer = asked.to_socket_addrs().map(|mut all| all.next());
        sender.send(answer).ok();
    });
    match receiver.recv_timeout(PATIENCE) {
        Ok(Ok(Some(address))) => Ok(address),
        Ok(Ok(None)) => Err(format!("{host} has no address")),
        Ok(Err(error)) => Err(format!("the name can't be resolved: {error}")),
        Err(_) => Err(format!("resolving the name takes more than {} s", PATIENCE.as_secs())),
    }
}

fn version(stream: &mut TcpStream, host: &str) -> io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let question = format!("GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(question.as_bytes())?;
    let mut bytes = Vec::new();
    // What came before an error is an answer.
    match stream.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes) {
        Err(error) if bytes.is_empty() => return Err(error),
        Ok(_) | Err(_) => {}
    }
    let text = String::from_utf8_lossy(&bytes);
    let Some(status) = text.strip_prefix("HTTP/1.").and_then(|it| it.get(2..5)) else {
        return Err(io::Error::other("it does not speak HTTP"));
    };
    if status != "200" {
        return Err(io::Error::other(format!("it answers {status} to /version")));
    }
    let found = text.split("\"etcdserver\":\"").nth(1).and_then(|it| it.split('"').next());
    Ok(found.map_or_else(|| "answers".to_owned(), |version| format!("etcd {version}")))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        assert_eq!(parts("http://a:2379/x"), Ok((true, "a:2379".to_owned())));
        assert_eq!(parts("https://u:p@a"), Ok((false, "a:443".to_owned())));
        assert!(parts("unix://x").is_err());
        assert_eq!(without_secrets("http://u:p@a:1"), "http://a:1");
        assert_eq!(without_secrets("http://a:1/?token=x@y"), "http://a:1/?***");
        assert_eq!(without_secrets("u:p@a:1"), "a:1");
    }

    #[test]
    fn an_endpoint_answers_or_refuses() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; 1024];
            assert!(stream.read(&mut question).unwrap() > 0);
            let answer = b"HTTP/1.1 200 OK\r\n\r\n{\"etcdserver\":\"3.5.21\"}";
            stream.write_all(answer).unwrap();
        });
        let found = ask_all(std::slice::from_ref(&url));
        assert_eq!(found[0].answer.as_ref().unwrap().1, "etcd 3.5.21");
        server.join().unwrap();
        let found = ask_all(&[url]);
        assert_eq!(found[0].answer, Err("connection refused".to_owned()));
    }
}

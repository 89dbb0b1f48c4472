//! A network namespace for one test, removed with it. Owns everything that needs root in the tests
//! of `host`; never touches the namespace that the tests were started in.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail as the test does")]

use std::fs::File;
use std::future::Future;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace that exists as long as this value.
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests make network namespaces and must run as root (sudo -E cargo test)"
        );
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let namespace = Self { name: format!("weft-host-{}-{count}", std::process::id()) };
        run("ip", &["netns", "add", &namespace.name]);
        namespace.ip("link set lo up");
        namespace
    }

    /// A namespace with `eth0` and `eth1` up; each is a cable whose far end lies inside as well.
    pub(crate) fn with_links() -> Self {
        let namespace = Self::new();
        for name in ["eth0", "eth1"] {
            namespace.ip(&format!("link add {name} type veth peer name far-{name}"));
            namespace.ip(&format!("link set {name} up"));
            namespace.ip(&format!("link set far-{name} up"));
        }
        namespace
    }

    /// Runs `ip` with these words inside.
    pub(crate) fn ip(&self, words: &str) -> String {
        let mut all = vec!["-n", &self.name];
        all.extend(words.split(' '));
        run("ip", &all)
    }

    /// Runs asynchronous code in a thread inside; gives its result and everything it logged.
    pub(crate) fn enter<T, F>(&self, code: impl FnOnce() -> F + Send) -> (T, String)
    where
        T: Send,
        F: Future<Output = T>,
    {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer({
                let log = log.clone();
                move || log.clone()
            })
            .with_ansi(false)
            .finish();
        // While there is one subscriber only, tracing lets the thread that first reaches a call
        // decide whether anybody wants it, and threads of other tests have none.
        let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
        let path = format!("/run/netns/{}", self.name);
        let inside = move || {
            let file = File::open(path).unwrap();
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(file.as_fd(), kind).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            tracing::subscriber::with_default(subscriber, || runtime.unwrap().block_on(code()))
        };
        let result = std::thread::scope(|scope| scope.spawn(inside).join());
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (result, log.text())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let deleted = Command::new("ip").args(["netns", "del", &self.name]).status();
        // A second panic would abort the other tests.
        if !std::thread::panicking() {
            assert!(deleted.is_ok_and(|status| status.success()), "{} is left over", self.name);
        }
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

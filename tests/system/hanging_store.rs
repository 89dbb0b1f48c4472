//! A local store on another host that does not answer any more: what looks at the directory hangs.

use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::lab::{Process, wait_until};
use crate::support::overlay::{CONFIG, Overlay};
use crate::support::status::Status;

const PATIENCE: Duration = Duration::from_secs(10);
/// Beyond what the daemon waits for the directory, twice over.
const NOTICED: Duration = Duration::from_secs(60);

/// A file system whose server never answers, over the store as `pid` sees it, until it is dropped.
struct Hanging {
    server: Process,
    store: String,
}

impl Hanging {
    fn over_store(overlay: &Overlay, pid: u32) -> Self {
        let store = overlay.files().join("store").display().to_string();
        let script = "exec 3<>/dev/fuse; mount --internal-only -t fuse none \"$0\" \
                      -o fd=3,rootmode=40000,user_id=0,group_id=0; echo mounted; \
                      exec sleep infinity";
        // Each daemon of these tests has a view of all mounts of its own.
        let target = format!("--target={pid}");
        let argv = ["nsenter", &target, "--mount", "sh", "-euc", script, &store];
        let server = overlay.lab.hosts[0].spawn(&argv);
        wait_until(PATIENCE, "it is mounted", || server.output().contains("mounted"));
        Self { server, store }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // What hangs fails then.
        self.server.stop(Signal::KILL, PATIENCE);
        Command::new("umount").args(["--lazy", &self.store]).output().ok();
    }
}

#[test]
fn a_directory_that_hangs_stops_neither_traffic_nor_status_nor_an_end() {
    let mut overlay = Overlay::start_with(CONFIG, [&["--fast-path=off"], &[]]);
    let own = overlay.dir(0);
    wait_until(PATIENCE, "the cache is written", || own.join("subnet.env.cache").exists());
    let daemon = overlay.daemons[0].pid().as_raw_nonzero().get().cast_unsigned();
    let hanging = Hanging::over_store(&overlay, daemon);
    let is_up = || Status::of(&own).0["store"]["up"] == true;
    wait_until(NOTICED, "the status says that the store is away", || !is_up());
    // It looks at the directory again and again meanwhile.
    for _ in 0..10 {
        thread::sleep(Duration::from_secs(1));
        assert!(!is_up(), "who could have answered?");
    }
    overlay.traffic_resumes(PATIENCE, "the directory hangs");
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    drop(hanging);
    // The next one starts from its cache.
    let hanging = Hanging::over_store(&overlay, std::process::id());
    overlay.daemons[0] = overlay.weftd(0, &["--fast-path=off"]);
    overlay.traffic_resumes(NOTICED, "a start without the directory");
    wait_until(PATIENCE, "the status answers", || Status::try_of(&own).is_some());
    overlay.daemons[0].stop(Signal::TERM, PATIENCE);
    drop(hanging);
}

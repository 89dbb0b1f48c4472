//! A worker that hangs: who sees it, and what the service manager is told.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use weft::status::Cause;

use super::support::cost::{ThreadStatus, threads};
use super::support::lab::{Lab, SubnetEnv, WEFTD, wait_until};
use super::support::overlay::{CONFIG, local_store};
use super::support::status::Status;

/// A worker's longest sleep is 5 s, and it hangs after 15.
const KNOWN: Duration = Duration::from_secs(60);

/// Stops one thread of a process, as a debugger does, until it is killed itself.
const STOP_THREAD: &str = "
import ctypes, sys, time
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
SEIZE, INTERRUPT = 0x4206, 0x4207
for request in (SEIZE, INTERRUPT):
    if ptrace(request, int(sys.argv[1]), 0, 0) != 0:
        sys.exit(f'ptrace {request:#x}: errno {ctypes.get_errno()}')
time.sleep(600)
";

#[test]
fn a_hanging_worker_is_seen_and_the_service_manager_not_reassured() {
    let files = tempfile::tempdir().unwrap();
    let lab = Lab::two_hosts();
    let notify = UnixDatagram::bind(files.path().join("notify")).unwrap();
    let file = |name: &str| files.path().join(name).display().to_string();
    let mut daemon = lab.hosts[0].spawn(&[
        "env",
        &format!("NOTIFY_SOCKET={}", file("notify")),
        "WATCHDOG_USEC=3000000",
        WEFTD,
        &local_store(files.path(), CONFIG),
        &format!("--subnet-file={}", file("subnet.env")),
        &format!("--status-socket={}", file("weft.sock")),
        "--iface=172.20.0.1",
        "--iptables-forward-rules=false",
    ]);
    SubnetEnv::wait(&files.path().join("subnet.env"), &mut daemon);
    let causes = || Status::of(files.path()).causes();
    let reassured = || {
        notify.set_nonblocking(true).unwrap();
        let mut buffer = [0; 256];
        let mut count = 0;
        while let Ok(length) = notify.recv(&mut buffer) {
            count += usize::from(&buffer[..length] == b"WATCHDOG=1");
        }
        count
    };
    wait_until(KNOWN, "the service manager hears that weftd is alive", || reassured() > 0);
    assert_eq!(causes(), [], "an idle worker does not hang");

    let worker = threads(&daemon).into_iter().find(ThreadStatus::is_worker).unwrap();
    let thread = worker.field("Pid");
    let debugger = lab.hosts[0].spawn(&["python3", "-c", STOP_THREAD, thread]);
    wait_until(KNOWN, "the status says that a worker hangs", || causes() == [Cause::WorkerStalled]);
    wait_until(KNOWN, "the log says so, once", || daemon.complaints("worker 0") > 0);
    reassured();
    // Two periods of a second each, at least.
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(reassured(), 0, "the service manager is told that all is well");
    assert_eq!(daemon.complaints("worker 0"), 1, "{}", daemon.output());

    drop(debugger);
    wait_until(KNOWN, "a worker that goes on is well again", || causes().is_empty());
    wait_until(KNOWN, "the service manager hears of it", || reassured() > 0);
}

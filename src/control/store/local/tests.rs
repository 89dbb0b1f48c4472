//! The local store on real directories, changed from outside as people and scripts would.

use std::fs;
use std::future::{self, Future};
use std::net::Ipv4Addr;
use std::pin::pin;
use std::task::Poll;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::{sleep, timeout};

use super::*;
use crate::control::error::StoreError;
use crate::control::lease::LeaseAttributes;
use crate::control::rejected::RejectReason;
use crate::route::Prefix;

const TTL: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(20);
const RUNS: Phase = Phase::Runs;

struct Lab {
    directory: tempfile::TempDir,
    store: LocalStore,
}

impl Lab {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path().join("deep/store"));
        store.files.prepare().unwrap();
        Self { directory, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("deep/store").join(name)
    }

    fn write(&self, key: &str, value: &str) {
        fs::write(self.path("subnets").join(key), value).unwrap();
    }

    async fn create(
        &self,
        subnet: Prefix,
        value: &LeaseAttributes,
        ttl: Duration,
    ) -> StoreResult<Granted> {
        let lease = Lease::wanted(subnet.into(), value.clone());
        self.store.write(&lease, ttl, RUNS).await
    }

    fn read(&self, key: &str) -> String {
        fs::read_to_string(self.path("subnets").join(key)).unwrap()
    }
}

fn node(number: u8) -> LeaseAttributes {
    LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, number))
}

fn subnet(text: &str) -> Prefix {
    text.parse().unwrap()
}

#[tokio::test]
async fn the_configuration_is_a_file() {
    let lab = Lab::new();
    let error = lab.store.config().await.unwrap_err().to_string();
    assert!(error.contains("deep/store/config"), "{error}");
    fs::write(lab.path("config"), "{\"Network\":\"10.5.0.0/16\"}").unwrap();
    assert_eq!(lab.store.config().await.unwrap(), b"{\"Network\":\"10.5.0.0/16\"}");
    fs::write(lab.path("config"), vec![b' '; 70_000]).unwrap();
    assert!(matches!(lab.store.config().await, Err(StoreError::File { .. })));
}

#[tokio::test]
async fn lease_is_readable_file_with_expiry() {
    let lab = Lab::new();
    let granted = lab.create(subnet("10.5.34.0/24"), &node(1), TTL).await.unwrap();
    let text = lab.read("10.5.34.0-24");
    let head = r#"{"PublicIP":"192.0.2.1","PublicIPv6":null,"Expires":""#;
    assert!(text.starts_with(head) && text.ends_with("Z\"}"), "{text}");
    let listed = lab.store.list().await.unwrap();
    assert_eq!(listed.leases, [granted.lease.into()]);
    let names: Vec<_> = fs::read_dir(lab.path("subnets")).unwrap().collect();
    assert_eq!(names.len(), 1, "a temporary file stays: {names:?}");
}

#[tokio::test]
async fn file_without_expiry_stays_reservation() {
    let lab = Lab::new();
    lab.write("10.5.34.0-24", r#"{"PublicIP":"192.0.2.1"}"#);
    let held = lab.store.list().await.unwrap().leases.remove(0);
    assert_eq!(held.lifetime, Lifetime::Reservation);
    let granted = lab.store.write(&held, TTL, RUNS).await.unwrap();
    assert_eq!(granted.expires, None);
    assert_eq!(lab.read("10.5.34.0-24"), r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#);
}

#[tokio::test]
async fn every_write_compares_the_revision() {
    let lab = Lab::new();
    let first = lab.create(subnet("10.5.34.0/24"), &node(1), TTL).await.unwrap().lease;
    let conflict = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::Conflict(_))), "{result:?}");
    };
    let again = lab.create(subnet("10.5.34.0/24"), &node(2), TTL).await;
    conflict(again.map(|_| ()));
    let overlapping = lab.create(subnet("10.5.32.0/20"), &node(2), TTL).await;
    conflict(overlapping.map(|_| ()));
    // The caller, who knows the network, saw this one; a key of another network takes nothing.
    lab.create(subnet("10.5.34.0/26"), &node(2), TTL).await.unwrap();
    let longer = TTL + Duration::from_secs(100);
    let second = lab.store.write(&first, longer, RUNS).await.unwrap().lease;
    conflict(lab.store.write(&first, TTL, RUNS).await.map(|_| ()));
    conflict(lab.store.delete(&first).await);
    lab.store.delete(&second).await.unwrap();
    conflict(lab.store.delete(&second).await);
    conflict(lab.store.write(&second, TTL, RUNS).await.map(|_| ()));
}

#[tokio::test]
async fn expired_lease_frees_its_subnet() {
    let lab = Lab::new();
    lab.write("10.5.34.0-24", r#"{"PublicIP":"192.0.2.1","Expires":"2020-01-01T00:00:00Z"}"#);
    lab.write("10.5.35.0-24", r#"{"PublicIP":"192.0.2.3","Expires":1577836800}"#);
    assert!(lab.store.list().await.unwrap().leases.is_empty());
    lab.create(subnet("10.5.34.0/24"), &node(2), TTL).await.unwrap();
    assert!(lab.read("10.5.34.0-24").contains("192.0.2.2"));
    let theirs = lab.read("10.5.35.0-24");
    assert!(theirs.contains("192.0.2.3"), "a writer with another clock removed a lease");
}

#[tokio::test]
async fn junk_files_are_reported_and_harmless() {
    let lab = Lab::new();
    lab.write("10.5.1.0-24", r#"{"PublicIP":"192.0.2.1"}"#);
    lab.write("10.5.1.0-24~", "backup");
    lab.write("README", "hello");
    lab.write("10.5.2.0-24", "{");
    lab.write("10.5.3.0-24", &" ".repeat(1 << 20));
    lab.write("10.5.4.0-24", r#"{"PublicIP":"192.0.2.4","Expires":"soon"}"#);
    lab.write(".hidden", "editors do this");
    fs::create_dir(lab.path("subnets/10.5.5.0-24")).unwrap();
    let fifo = lab.path("subnets/10.5.6.0-24");
    assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
    let snapshot = timeout(TTL, lab.store.list()).await.unwrap().unwrap();
    assert_eq!(snapshot.leases.len(), 1);
    let mut rejected: Vec<_> =
        snapshot.rejected.iter().map(|r| (r.key.as_str(), r.reason)).collect();
    rejected.sort_unstable_by_key(|(key, _)| *key);
    assert_eq!(
        rejected,
        [
            ("10.5.1.0-24~", RejectReason::BadKey),
            ("10.5.2.0-24", RejectReason::BadValue),
            ("10.5.3.0-24", RejectReason::TooLarge),
            ("10.5.4.0-24", RejectReason::BadValue),
            ("10.5.5.0-24", RejectReason::TooLarge),
            ("10.5.6.0-24", RejectReason::TooLarge),
            ("README", RejectReason::BadKey),
        ]
    );
}

async fn next_leases(watch: &mut LocalWatch) -> Vec<String> {
    let events = timeout(SOON, watch.next()).await.expect("no news").unwrap();
    match events.as_slice() {
        [Change::Everything(snapshot)] => {
            snapshot.leases.iter().map(|lease| lease.key.clone()).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_watch_shows_writes_removals_and_ends() {
    let lab = Lab::new();
    let mut watch = lab.store.watch().await.unwrap();
    let first = watch.next().await.unwrap();
    assert!(
        matches!(first.as_slice(), [Change::Everything(_), Change::Live { revision: 0 }]),
        "the watch counts as live before it knows the directory: {first:?}"
    );
    lab.write("10.5.1.0-24", r#"{"PublicIP":"192.0.2.1"}"#);
    assert_eq!(next_leases(&mut watch).await, ["10.5.1.0-24"]);
    fs::remove_file(lab.path("subnets/10.5.1.0-24")).unwrap();
    assert!(next_leases(&mut watch).await.is_empty());
    // Long enough to be read before it ends.
    let short = Duration::from_secs(5);
    lab.create(subnet("10.5.2.0/24"), &node(2), short).await.unwrap();
    assert_eq!(next_leases(&mut watch).await, ["10.5.2.0-24"]);
    assert!(next_leases(&mut watch).await.is_empty(), "the end of a lease is no news");
    // A write that changes nothing is none either.
    lab.write(".10.5.9.0-24.new", "half");
    assert!(timeout(2 * READ_PERIOD, watch.next()).await.is_err());
}

/// Else a node whose address changes twice in a second gives its own subnet up.
#[tokio::test]
async fn the_watch_shows_nothing_older_than_an_answered_write() {
    let lab = Lab::new();
    let mut held = lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap().lease;
    // On a busy machine a reading may be over before its thread is waited for.
    for _ in 0..100 {
        let mut watch = lab.store.watch().await.unwrap();
        let mut next = pin!(watch.next());
        let mut is_reading = true;
        // The first look lets the timer end, the second has the directory read.
        for _ in 0..2 {
            let look =
                future::poll_fn(|context| Poll::Ready(next.as_mut().poll(context).is_pending()));
            is_reading = is_reading && look.await;
            sleep(Duration::from_millis(50)).await;
        }
        if is_reading {
            held.attributes = node(2);
            lab.store.write(&held, TTL, RUNS).await.unwrap();
            let events = next.await.unwrap();
            let [Change::Everything(snapshot), ..] = events.as_slice() else {
                panic!("{events:?}")
            };
            let shown = &snapshot.leases[0].attributes;
            return assert_eq!(*shown, node(2), "an older state than was written");
        }
    }
    panic!("no reading lasts until a write");
}

/// Else a node that took its lapsed lease again and lost it within a second goes on without it.
#[tokio::test]
async fn the_watch_shows_that_our_own_write_is_gone_again() {
    let lab = Lab::new();
    let mut watch = lab.store.watch().await.unwrap();
    assert!(matches!(watch.next().await.unwrap()[0], Change::Everything(_)));
    let held = lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap().lease;
    fs::remove_file(lab.path("subnets").join(&held.key)).unwrap();
    let events = timeout(10 * READ_PERIOD, watch.next()).await.expect("the watch is silent");
    let [Change::Everything(snapshot)] = &events.unwrap()[..] else { panic!("no listing") };
    assert_eq!(snapshot.leases, []);
}

#[tokio::test]
async fn missing_directory_is_outage_and_not_recreated() {
    let lab = Lab::new();
    let held = lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap().lease;
    let mut watch = lab.store.watch().await.unwrap();
    watch.next().await.unwrap();
    fs::remove_dir_all(lab.path("")).unwrap();
    let ended = timeout(SOON, watch.next()).await.expect("no end");
    assert!(ended.is_err(), "{ended:?}");
    assert!(matches!(lab.store.list().await, Err(StoreError::File { .. })));
    assert!(lab.store.watch().await.is_err());
    let created = lab.create(subnet("10.5.2.0/24"), &node(1), TTL).await;
    assert!(matches!(created, Err(StoreError::File { .. })), "{created:?}");
    let updated = lab.store.write(&held, TTL, RUNS).await;
    assert!(matches!(updated, Err(StoreError::File { .. })), "{updated:?}");
    assert!(!lab.path("").exists(), "a new directory hides that the old one is missing");
    fs::create_dir_all(lab.path("subnets")).unwrap();
    let mut watch = lab.store.watch().await.unwrap();
    // The file system may give the new directory the old one's number; else it says so once.
    if watch.next().await.is_err() {
        watch = lab.store.watch().await.unwrap();
        watch.next().await.unwrap();
    }
    lab.write("10.5.1.0-24", r#"{"PublicIP":"192.0.2.1"}"#);
    assert_eq!(next_leases(&mut watch).await, ["10.5.1.0-24"]);
}

#[tokio::test]
async fn a_replaced_directory_is_an_error_once() {
    let lab = Lab::new();
    lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap();
    fs::rename(lab.path("subnets"), lab.path("old")).unwrap();
    fs::create_dir(lab.path("subnets")).unwrap();
    let error = lab.store.list().await.unwrap_err().to_string();
    assert!(error.contains("replaced"), "{error}");
    assert!(lab.store.list().await.unwrap().leases.is_empty());
}

/// Whoever may write there must not have root overwrite other files, or wait for ever.
#[tokio::test]
async fn what_others_plant_is_never_opened_for_writing() {
    let lab = Lab::new();
    let victim = lab.path("victim");
    fs::write(&victim, "precious").unwrap();
    let plant = |name: &str| lab.path("subnets").join(name);
    std::os::unix::fs::symlink(&victim, plant(".10.5.1.0-24.new")).unwrap();
    let fifo = plant(".10.5.2.0-24.new");
    assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
    for number in 1..=2 {
        let subnet = subnet(&format!("10.5.{number}.0/24"));
        let node = node(number);
        let created = timeout(Duration::from_secs(60), lab.create(subnet, &node, TTL)).await;
        let held = created.expect("it waits").unwrap().lease;
        let file = plant(&held.key);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&victim, &file).unwrap();
        let revision = lab.store.list().await.unwrap().rejected.remove(0).revision;
        lab.store.write(&Lease { revision, ..held }, TTL, RUNS).await.ok();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious", "{number}");
    }
}

/// Where the test of a full disk runs itself again, as a process whose files may not grow.
const NO_ROOM: &str = "WEFT_TEST_STORE_WITHOUT_ROOM";

#[tokio::test]
async fn a_full_disk_leaves_the_leases_whole_and_nothing_beside_them() {
    if std::env::var_os(NO_ROOM).is_some() {
        return without_room().await;
    }
    let name = std::thread::current().name().map(str::to_owned);
    // Without the signal, a write beyond the limit is an error as on a full disk.
    let child = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &name.unwrap(), "--nocapture"])
        .env(NO_ROOM, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    let tried = text.contains("all writes failed") && child.status.success();
    assert!(tried, "{text}\n{}", String::from_utf8_lossy(&child.stderr));
}

async fn without_room() {
    let lab = Lab::new();
    let held = lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap();
    let entries = || fs::read_dir(lab.path("subnets")).unwrap().count();
    let (before, count) = (lab.read("10.5.1.0-24"), entries());
    let room = |bytes| {
        let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
        setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum }).unwrap();
    };
    room(Some(8));
    for _ in 0..3 {
        let created = lab.create(subnet("10.5.2.0/24"), &node(2), TTL).await;
        let longer = TTL + Duration::from_secs(100);
        let renewed = lab.store.write(&held.lease, longer, RUNS).await;
        for error in [created.map(drop).unwrap_err(), renewed.map(drop).unwrap_err()] {
            assert!(matches!(error, StoreError::File(_)), "{error}");
        }
        assert_eq!(lab.read("10.5.1.0-24"), before, "a lease lost its end");
        assert_eq!(entries(), count, "each try leaves a file behind");
    }
    room(getrlimit(Resource::Fsize).maximum);
    lab.create(subnet("10.5.2.0/24"), &node(2), TTL).await.unwrap();
    println!("all writes failed");
}

/// Of writers that were killed; all else may be somebody's.
#[tokio::test]
async fn old_temporary_files_are_removed_by_the_next_start() {
    let lab = Lab::new();
    let subnets = lab.path("subnets");
    let make = |name: &str, age: u64| {
        let file = fs::File::create(subnets.join(name)).unwrap();
        let then = std::time::SystemTime::now() - Duration::from_secs(age);
        file.set_modified(then).unwrap();
    };
    let others = [
        ".10.5.1.0-24.0123456789abcde",
        ".10.5.1.0-24.0123456789abcdeg",
        ".10.5.1.0-24.swp",
        ".config.0123456789abcdef",
        "10.5.1.0-24.0123456789abcdef",
    ];
    others.iter().for_each(|name| make(name, 100_000));
    make(".10.5.1.0-24.0123456789abcdef", 601);
    make(".10.5.2.0-24.0123456789abcdef", 300);
    fs::create_dir(subnets.join(".10.5.3.0-24.0123456789abcdef")).unwrap();
    make("target", 100_000);
    std::os::unix::fs::symlink("target", subnets.join(".10.5.4.0-24.0123456789abcdef")).unwrap();
    let locked = fs::File::open(lab.path(".lock")).unwrap();
    locked.lock().unwrap();
    let names = || {
        let entries = fs::read_dir(&subnets).unwrap();
        let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let mut before = names();
    let open = || Files::new(lab.path("")).prepare().unwrap();
    open();
    assert_eq!(names(), before, "somebody writes");
    locked.unlock().unwrap();
    open();
    assert!(before.remove(".10.5.1.0-24.0123456789abcdef"));
    assert_eq!(names(), before);
}

#[tokio::test]
async fn oversized_file_is_replaced_by_owner_only() {
    let lab = Lab::new();
    let held = lab.create(subnet("10.5.1.0/24"), &node(1), TTL).await.unwrap().lease;
    lab.write("10.5.1.0-24", &" ".repeat(1 << 20));
    let rejected = lab.store.list().await.unwrap().rejected.remove(0);
    let created = lab.create(subnet("10.5.1.0/24"), &node(2), TTL).await;
    assert!(matches!(created, Err(StoreError::Conflict(_))), "{created:?}");
    let held = Lease { revision: rejected.revision, ..held };
    lab.store.write(&held, TTL, RUNS).await.unwrap();
    assert!(lab.read("10.5.1.0-24").contains("192.0.2.1"));
}

#[tokio::test]
async fn a_dropped_wait_loses_nothing() {
    let lab = Lab::new();
    let mut watch = lab.store.watch().await.unwrap();
    watch.next().await.unwrap();
    lab.write("10.5.1.0-24", r#"{"PublicIP":"192.0.2.1"}"#);
    for _ in 0..3000 {
        // Dropped in every state: before the reading is due, and while the files are read.
        match timeout(Duration::from_micros(500), watch.next()).await {
            Ok(events) => return assert!(matches!(events.unwrap()[0], Change::Everything(_))),
            Err(_) => continue,
        }
    }
    assert_eq!(next_leases(&mut watch).await, ["10.5.1.0-24"], "the change was lost");
}

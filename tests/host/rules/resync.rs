//! Resyncs by the thousand: nothing is repeated, nothing is missed, nobody's lock is kept long.
//!
//! The loop runs in a process of its own, this test program once more, because the programs are
//! found by its `PATH` and work on its network namespace.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use weft::netfilter::diff::Trigger;
use weft::netfilter::reconciler::{Flavour, RuleReconciler};
use weft::netfilter::rules::Wanted;

use crate::rules::site::Variant;
use crate::support::lab::{Namespace, Process};
use crate::support::pace::Stopwatch;

/// Set for the process of the loop: the variant.
const LOOP: &str = "WEFT_TEST_RESYNC_LOOP";
/// The resyncs of a day, one every 5 seconds.
const A_DAY: u64 = 24 * 3600 / 5;
/// For how long the loop runs, if it does not get through a day earlier.
const LOOP_TIME: Duration = Duration::from_secs(5);
/// And it makes at least so many repairs, however slow the machine is.
const REPAIRS_MIN: usize = 20;
/// A loop that has not made them by then is stuck.
const LOOP_TIME_MAX: Duration = Duration::from_secs(60);
/// One look in so many finds something missing.
const DAMAGE_EVERY: u64 = 20;
/// For how long the lock of iptables may be held by one of our transactions.
const LOCK_HELD_MAX: Duration = Duration::from_millis(50);
/// Of fewer that held it, nine in ten are all or all but one, and the median says more.
const HOLDERS_MIN: usize = 20;

#[test]
fn a_day_of_resyncs_repeats_no_rule() {
    for variant in Variant::ALL {
        let (namespace, files) = (Namespace::new("resync"), tempfile::tempdir().expect("a place"));
        let lock = files.path().join("lock");
        std::fs::write(&lock, "").expect("the test's directory is writable");
        let program = std::env::current_exe().expect("a test knows its program");
        let mut command = namespace.command(&[program.to_str().expect("a readable path")]);
        command.args(["--exact", "rules::resync::the_loop", "--nocapture"]);
        command.env(LOOP, format!("{variant:?}")).env("XTABLES_LOCKFILE", &lock);
        let path = format!("{}:/usr/sbin:/usr/bin", variant.programs(files.path()).display());
        let watch = Stopwatch::start();
        let mut process = Process::start(command.env("PATH", path), "the loop of resyncs");
        let held = watch_lock(&lock, &mut process);
        let output = process.output();
        assert!(process.ended().is_some_and(|status| status.success()), "{variant:?}: {output}");
        let report = output.lines().find(|line| line.contains(" looks")).unwrap_or(&output);
        let longest = held.last().copied().unwrap_or_default();
        let typical = held.get(held.len() / 2).copied().unwrap_or_default();
        println!("{report}; lock seen held {} times, {typical:?}, {longest:?} at most", held.len());
        assert_eq!(held.is_empty(), variant != Variant::IptablesLegacy, "{variant:?}");
        // Nine in ten: a holder that the machine does not let run holds on.
        let most = if held.len() < HOLDERS_MIN { typical } else { held[held.len() * 9 / 10] };
        let most = watch.of(most);
        assert!(most <= LOCK_HELD_MAX, "{variant:?}: the lock is held for {most:?}");
    }
}

/// For how long each process was seen with the lock, sorted, until `process` has ended.
fn watch_lock(lock: &Path, process: &mut Process) -> Vec<Duration> {
    let inode = format!(":{} ", std::fs::metadata(lock).expect("it was made").ino());
    let mut holders: HashMap<String, (Instant, Instant)> = HashMap::new();
    while process.ended().is_none() {
        let locks = std::fs::read_to_string("/proc/locks").expect("the kernel tells its locks");
        for line in locks.lines().filter(|line| line.contains(&inode) && !line.contains("->")) {
            let holder = line.split_whitespace().nth(4).unwrap_or_default().to_owned();
            let now = Instant::now();
            holders.entry(holder).or_insert((now, now)).1 = now;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let mut held: Vec<_> = holders.into_values().map(|(first, last)| last - first).collect();
    held.sort();
    held
}

/// The loop itself; nothing where it was not asked for.
#[test]
fn the_loop() {
    let Ok(name) = std::env::var(LOOP) else { return };
    let variant = Variant::ALL.into_iter().find(|variant| format!("{variant:?}") == name);
    let variant = variant.expect("the name of a variant");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(resync(variant));
}

async fn resync(variant: Variant) {
    let wanted = Wanted {
        networks: "10.5.0.0/16".parse().expect("a prefix"),
        subnets: "10.5.3.0/24".parse().expect("a prefix"),
        masquerade: true,
        forward: true,
        random_ports: true,
    };
    let flavour = if variant == Variant::Nft { Flavour::Nftables } else { Flavour::Iptables };
    let mut reconciler = RuleReconciler::new(flavour, wanted, Duration::from_secs(5));
    assert!(reconciler.reconcile(Trigger::Start).await.expect("the rules can be set"));
    let whole = listing(variant);
    let (started, watch) = (Instant::now(), Stopwatch::start());
    let (mut looks, mut repairs) = (0, Vec::new());
    while looks < A_DAY && (started.elapsed() < LOOP_TIME || repairs.len() < REPAIRS_MIN) {
        assert!(!watch.is_over(LOOP_TIME_MAX), "{looks} looks in {:?}", started.elapsed());
        looks += 1;
        if looks % DAMAGE_EVERY != 0 {
            let is_changed =
                reconciler.reconcile(Trigger::Resync).await.expect("the rules can be read");
            assert!(!is_changed, "look {looks} changed what was right");
            continue;
        }
        damage(variant, looks / DAMAGE_EVERY);
        assert_ne!(listing(variant), whole, "look {looks}: the damage did nothing");
        let before = Instant::now();
        assert!(reconciler.reconcile(Trigger::Resync).await.expect("the rules can be repaired"));
        repairs.push(before.elapsed());
        assert_eq!(listing(variant), whole, "after look {looks}");
    }
    assert_eq!(listing(variant), whole, "after {looks} looks");
    repairs.sort();
    let (typical, longest) = (repairs[repairs.len() / 2], repairs[repairs.len() - 1]);
    println!(
        "{variant:?}: {looks} looks in {:?}, {} repairs of {typical:?}, {longest:?} at most",
        started.elapsed(),
        repairs.len()
    );
}

fn damage(variant: Variant, number: u64) {
    let commands: &[&str] = match variant {
        Variant::Nft => &[
            "nft flush ruleset",
            "nft flush chain ip flannel-ipv4 postrtg",
            "nft delete chain ip flannel-ipv4 forward",
        ],
        Variant::IptablesNft | Variant::IptablesLegacy => &[
            "iptables -t nat -F",
            "iptables -D FLANNEL-FWD 2",
            "iptables -t nat -D FLANNEL-POSTRTG 1",
            "iptables -D FORWARD 1",
            "iptables -F",
        ],
    };
    let at = usize::try_from(number).expect("a small number") % commands.len();
    run(commands[at]);
}

/// Everything that the firewall has, in order, without handles, counters and dates.
fn listing(variant: Variant) -> Vec<String> {
    let text = match variant {
        Variant::Nft => run("nft list ruleset"),
        Variant::IptablesNft | Variant::IptablesLegacy => {
            run("iptables-save -t nat") + &run("iptables-save -t filter")
        }
    };
    let mut lines: Vec<_> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(" [").next().unwrap_or_default().trim().to_owned())
        .collect();
    if variant == Variant::Nft {
        // Chains are listed in the order in which they were made.
        lines.sort();
    }
    lines
}

fn run(words: &str) -> String {
    let mut words = words.split(' ');
    let program = words.next().expect("a command has a program");
    let output = Command::new(program).args(words).output().expect("the program runs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

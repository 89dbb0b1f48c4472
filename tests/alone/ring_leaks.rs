//! What a ring leaves behind: no descriptor, no device, no thread of the kernel's. It
//! counts what the whole process has. Needs root, for it makes network namespaces.

use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::time::Duration;

use weft::device::{Tun, TunError, TunOffload, TunnelSocket};
use weft::engine::RING_ENTRIES;
use weft::sys::ring::Ring;

use crate::alone;
use crate::support::lab::Namespace;
use crate::support::pace::Stopwatch;

const RINGS: usize = 1000;

/// A device that stays longer is in the way of the next one of its name.
const GONE_WITHIN: Duration = Duration::from_millis(100);

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Threads that the kernel made for rings of this process.
fn ring_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs").flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("iou-")).count()
}

fn one_queue(offload: TunOffload) -> Result<Tun, TunError> {
    Tun::open("flannel%d", offload, NonZeroU16::MIN).map(|mut queues| queues.remove(0))
}

#[test]
fn a_thousand_rings_leave_nothing_behind() {
    let _alone = alone();
    let namespace = Namespace::new("host");
    namespace.address("lo", "172.20.0.1/32");
    namespace.enter(|| {
        let address = "172.20.0.1:8285".parse().expect("an address");
        let socket = TunnelSocket::bind(address, false, false).expect("a free port");
        let offload = TunOffload { tso: true, uso: true };
        let open = |tun: &Tun, entries| {
            Ring::open(entries, 16, &[tun.as_fd(), socket.as_fd()]).expect("io_uring")
        };
        let one = || {
            let tun = one_queue(offload).expect("root may make a TUN device");
            assert_eq!(tun.name, "flannel0", "the last device is still there");
            (open(&tun, RING_ENTRIES), tun)
        };
        let before = (descriptors(), ring_threads());
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let (ring, tun) = one();
            let started = Stopwatch::start();
            drop(ring);
            drop(tun);
            while rustix::net::netdevice::name_to_index(&socket, "flannel0").is_ok() {
                assert!(!started.is_over(GONE_WITHIN), "the device stays after its last user");
                std::thread::yield_now();
            }
            slowest = slowest.max(started.elapsed());
        }
        println!("a device is gone {slowest:?} after its ring at most");
        let tun = one_queue(offload).expect("root may make a TUN device");
        (0..RINGS).for_each(|_| drop(open(&tun, 4)));
        drop(tun);
        assert_eq!((descriptors(), ring_threads()), before, "descriptors or threads are left");
    });
}

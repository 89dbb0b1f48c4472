//! Faults that keep weftd from starting, or that its end leaves behind.

use std::net::UdpSocket;
use std::os::unix::net::UnixListener;

use super::super::support::lab::{Lab, UNDERLAY};
use super::{Fault, Screen, assert_named};

const fn at_check(name: &'static str, says: &'static str) -> Fault {
    Fault { name, screen: Screen::Check, says }
}

const PORT_TAKEN: Fault = at_check("another program has the tunnel's port", "tunnel-port");
const NO_INTERFACE: Fault = at_check("--iface names no interface", "external-interface");
const NO_TUN: Fault = at_check("/dev/net/tun is missing", "tun-device");
const NO_RIGHTS: Fault = at_check("weftd lacks CAP_NET_ADMIN", "cap-net-admin");
const NO_STORE: Fault =
    at_check("no etcd endpoint answers", "http://127.0.0.1:9: it can't be connected to");
const LEFT: Fault = at_check("weftd was killed", "daemon-answers");
const NOT_RUNNING: Fault =
    Fault { name: "weftd does not run", screen: Screen::Status, says: "weftd is not running" };

pub(super) fn faults() -> impl Iterator<Item = Fault> {
    [PORT_TAKEN, NO_INTERFACE, NO_TUN, NO_RIGHTS, NO_STORE, LEFT, NOT_RUNNING].into_iter()
}

#[test]
fn what_keeps_weftd_from_starting_is_named() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let (lab, dir) = (Lab::two_hosts(), directory.path());
    let host = &lab.hosts[0];
    let iface = ["--iface", "wire0"];
    let before = Screen::Check.show(host, dir, &iface);
    for fault in faults().filter(|fault| fault.screen == Screen::Check) {
        assert!(!before.contains(fault.says), "{} before it was caused: {before}", fault.name);
    }
    let address = (UNDERLAY[0], 8285);
    let socket = host.enter(|| UdpSocket::bind(address).expect("the port is free"));
    assert_named(PORT_TAKEN, host, dir, &iface);
    drop(socket);
    assert_named(NO_INTERFACE, host, dir, &["--iface", "eth9"]);
    assert_named(NO_STORE, host, dir, &["--iface=wire0", "--etcd-endpoints=http://127.0.0.1:9"]);
    assert_named(NOT_RUNNING, host, dir, &[]);
    drop(UnixListener::bind(dir.join("weft.sock")).expect("a socket to leave"));
    assert_named(LEFT, host, dir, &iface);

    for (fault, words) in [
        (
            NO_TUN,
            ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/net; exec \"$@\"", "sh"],
        ),
        (
            NO_RIGHTS,
            ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-all", "--", "env", "x=y"],
        ),
    ] {
        let weft = [env!("CARGO_BIN_EXE_weft"), "check", "--iface=wire0"];
        let output = host.command(&[&words[..], &weft].concat()).output().expect("weft runs");
        let screen = String::from_utf8_lossy(&output.stdout);
        assert!(screen.contains(fault.says), "{}: {screen}", fault.name);
    }
}

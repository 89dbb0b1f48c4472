//! The honest flows beside the load: numbered datagrams at a low rate, both ways, pod to pod.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::pour::enter;

const PORT: u16 = 7001;
const BYTES: usize = 200;

/// 500 datagrams a second each way: many to lose, and no load.
const PERIOD: Duration = Duration::from_millis(2);

/// For the last datagrams to arrive after the load has ended.
const LAST: Duration = Duration::from_secs(2);

/// One direction.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    pub(crate) sent: AtomicU64,
    pub(crate) arrived: AtomicU64,
    /// Those that a later one has overtaken.
    pub(crate) lost: AtomicU64,
    receiving: AtomicBool,
    ended: AtomicBool,
}

/// A pod: the namespace that it is, and its address.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) namespace: PathBuf,
    pub(crate) address: Ipv4Addr,
}

/// Starts the two threads of a flow, which end after [`Flow::end`].
pub(crate) fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    flow: &'scope Flow,
    from: Pod,
    to: Pod,
) {
    let target = SocketAddrV4::new(to.address, PORT);
    scope.spawn(move || report(receive(flow, &to)));
    scope.spawn(move || report(send(flow, &from, target)));
}

fn report(result: Result<()>) {
    if let Err(error) = result {
        crate::say(&format!("honest flow: {error:#}"));
    }
}

impl Flow {
    /// No more datagrams; those on their way still count.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        thread::sleep(LAST);
        self.receiving.store(false, Ordering::Relaxed);
    }
}

fn send(flow: &Flow, from: &Pod, target: SocketAddrV4) -> Result<()> {
    enter(&from.namespace)?;
    let socket = UdpSocket::bind((from.address, 0)).context("no socket for the honest flow")?;
    while !flow.receiving.load(Ordering::Relaxed) && !flow.ended.load(Ordering::Relaxed) {
        thread::sleep(PERIOD);
    }
    let mut datagram = [0; BYTES];
    let mut number = 0_u64;
    while !flow.ended.load(Ordering::Relaxed) {
        number += 1;
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        if socket.send_to(&datagram, target).is_ok() {
            flow.sent.fetch_add(1, Ordering::Relaxed);
        }
        thread::sleep(PERIOD);
    }
    Ok(())
}

fn receive(flow: &Flow, to: &Pod) -> Result<()> {
    enter(&to.namespace)?;
    let socket = UdpSocket::bind((to.address, PORT)).context("no socket for the honest flow")?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    flow.receiving.store(true, Ordering::Relaxed);
    let mut datagram = [0; 2048];
    let mut last = 0;
    while flow.receiving.load(Ordering::Relaxed) {
        let Ok(bytes) = socket.recv(&mut datagram) else { continue };
        // Evil packets may find this port; none of them has both length and the next number.
        let number = datagram.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        let near = last + 1..=last + 1_000_000;
        if bytes == BYTES && near.contains(&number) {
            flow.lost.fetch_add(number - last - 1, Ordering::Relaxed);
            last = number;
            flow.arrived.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

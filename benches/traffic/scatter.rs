//! Datagrams to addresses at random, spread over as many subnets as asked: what many peers cost.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft::route::Prefix;
use weft::sys::udp::set_fragmenting;

/// The discard service, in whose place nobody answers.
const PORT: u16 = 9;
/// Sends between two looks at the clock.
const BURST: u64 = 256;
/// The same addresses in every run.
const SEED: u64 = 7;

/// Sends `bytes` to the second address of one of the first `subnets` subnets of `bits` in
/// `network`, another at random each time, for as long as `duration`.
///
/// # Errors
/// When the network has fewer subnets, or the system refuses to send.
pub(crate) fn run(
    network: Prefix,
    bits: u8,
    subnets: u32,
    bytes: usize,
    duration: Duration,
) -> Result<Value> {
    let all = 1_u64 << bits.saturating_sub(network.length_bits()).min(32);
    ensure!(
        (2..=30).contains(&bits) && (1..=all).contains(&u64::from(subnets)),
        "{network} does not have {subnets} subnets of length {bits}"
    );
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("bind")?;
    // Else the sender itself pays for each destination with an identification of its own.
    let own = socket.local_addr().context("the own address")?;
    set_fragmenting(socket.as_fd(), own, false).context("switch fragmentation off")?;
    let (first, payload) = (network.network().to_bits(), vec![0; bytes]);
    let mut random = fastrand::Rng::with_seed(SEED);
    let (start, mut offered) = (Instant::now(), 0_u64);
    while start.elapsed() < duration {
        for _ in 0..BURST {
            // The same work for one subnet as for many.
            let address = first + (random.u32(..subnets) << (32 - bits)) + 2;
            let to = SocketAddrV4::new(Ipv4Addr::from_bits(address), PORT);
            match socket.send_to(&payload, to) {
                Ok(_) => offered += 1,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).with_context(|| format!("send to {to}")),
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(json!({ "offered": offered, "offered_kpps": offered as f64 / seconds / 1e3,
        "seconds": seconds }))
}

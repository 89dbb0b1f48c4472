//! The veth pair in which the kernel merges received TCP packets (GRO), and when it is used: while
//! the interface delivers single packets. A super-packet then goes through routes and firewall in
//! place of some forty. What the interface delivers as super-packets is fastest without the pair.

use std::thread::available_parallelism;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::device::features::{Switch, switch};
use crate::fast_path::Program;
use crate::host::netlink::devices::remove_link_now;
use crate::host::netlink::{self, NetlinkError, devices};
use crate::host::state::LinkId;

use super::attachment::{AttachResult, Attacher, Attachment};

/// As many long packets tell what the interface delivers.
const LONG_PACKETS_MIN: u64 = 256;

/// Once it has delivered super-packets, it is trusted to do so for this long: each change of ways
/// may reorder a flow once.
const TRUST: Duration = Duration::from_secs(60);

/// Any packet fits, as the TUN device's MTU has been seen to by then.
const MTU_BYTES: u32 = 65_535;

/// Most queues that the kernel gives a veth device.
const QUEUES_MAX: u32 = 4096;

/// What the interface delivers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Delivery {
    packets: u64,
    buffers: u64,
    trusted_until: Option<Instant>,
    /// Whether it delivers single packets, as far as it was seen.
    pub(super) is_single: bool,
}

impl Delivery {
    /// Takes it, for a while, for one that delivers super-packets.
    pub(super) fn trust(&mut self, now: Instant) {
        self.trusted_until = Some(now + TRUST);
        self.is_single = false;
    }

    /// Takes in so many long packets, delivered in so many buffers.
    pub(super) fn add(&mut self, packets: u64, buffers: u64, now: Instant) {
        (self.packets, self.buffers) = (self.packets + packets, self.buffers + buffers);
        if self.packets < LONG_PACKETS_MIN {
            return;
        }
        if self.packets >= 2 * self.buffers {
            self.trust(now);
        } else if self.trusted_until.is_none_or(|until| until < now) {
            self.is_single = true;
        }
        (self.packets, self.buffers) = (0, 0);
    }
}

/// A pair of this host; removed when it is dropped, unless it is left.
#[derive(Debug)]
pub(super) struct Pair {
    /// Packets go in here.
    pub(super) first: LinkId,
    /// They come out here, merged.
    second: LinkId,
    attachment: Option<Attachment>,
}

impl Pair {
    /// Makes the pair that goes with the TUN device `tun`, or takes the one that an earlier weftd
    /// has left.
    pub(super) async fn make(attacher: Attacher<'_>, tun: &str) -> AttachResult<Self> {
        let names = pair_names(tun);
        if find(tun).await?.is_none() {
            // Refused if a name is taken by somebody else's device.
            devices::add_veth_pair([&names[0], &names[1]], queues(), MTU_BYTES).await?;
        }
        let first = netlink::link_just_made(&names[0]).await?.id;
        let second = netlink::link_just_made(&names[1]).await?.id;
        let mut pair = Self { first, second, attachment: None };
        for end in [&pair.first, &pair.second] {
            // Without IPv6 there is nothing to keep silent.
            devices::keep_silent(end).await.ok();
        }
        // The kernel merges in the pair only what no device before it could have delivered whole.
        switch(&names[0], Switch::TcpSegmentation)?;
        switch(&names[1], Switch::ReceiveMerging)?;
        pair.attachment = Some(attacher.attach(Program::Gro, pair.second.index).await?);
        netlink::set_up(&pair.second).await?;
        netlink::set_up(&pair.first).await?;
        Ok(pair)
    }

    /// Leaves it in place for the next weftd.
    pub(super) fn leave(mut self) {
        self.attachment.take().into_iter().for_each(Attachment::leave);
        std::mem::forget(self);
    }

    /// Whether both ends are still there, and up.
    pub(super) async fn is_whole(&self) -> Result<bool, NetlinkError> {
        for end in [&self.first, &self.second] {
            let link = netlink::link_named(&end.name).await?;
            if !link.is_some_and(|link| link.id == *end && link.is_up) {
                return Ok(false);
            }
        }
        self.is_attached().await
    }

    /// Whether nobody has removed the program behind it.
    pub(super) async fn is_attached(&self) -> Result<bool, NetlinkError> {
        match &self.attachment {
            Some(attachment) => attachment.is_there().await,
            None => Ok(false),
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // The other end goes with it.
        if let Err(error) = remove_link_now(self.first.index) {
            warn!("cannot remove {}: {error}; run `ip link del {}`", self.first, self.first.name);
        }
    }
}

/// The names of the pair that goes with the TUN device `tun`.
pub(crate) fn pair_names(tun: &str) -> [String; 2] {
    [format!("{tun}-gro0"), format!("{tun}-gro1")]
}

/// Removes the pair that an earlier weftd has left, if there is one.
pub(crate) async fn clear_pair(tun: &str) -> Result<(), NetlinkError> {
    match find(tun).await? {
        Some(first) => netlink::remove_link(&first).await,
        None => Ok(()),
    }
}

/// The first end of the pair that goes with `tun`, if both are each other's: not somebody else's
/// devices.
pub(super) async fn find(tun: &str) -> Result<Option<LinkId>, NetlinkError> {
    let [first, second] = pair_names(tun);
    let (Some(first), Some(second)) =
        (netlink::link_named(&first).await?, netlink::link_named(&second).await?)
    else {
        return Ok(None);
    };
    Ok(first.is_paired_with(&second).then_some(first.id))
}

/// One for each processor that there may be: packets of a flow are handed on by the processor that
/// got them, and must not meet those of another one in a queue.
fn queues() -> u32 {
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible");
    let online = || available_parallelism().ok()?.get().try_into().ok();
    possible.ok().and_then(|list| count(&list)).or_else(online).unwrap_or(1).min(QUEUES_MAX)
}

/// The number of processors in a list such as `0-3` or `0-3,8-11`, holes included.
fn count(list: &str) -> Option<u32> {
    let last: u32 = list.trim().rsplit(['-', ',']).next()?.parse().ok()?;
    Some(last.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_packets_are_merged_and_super_packets_are_not() {
        let start = Instant::now();
        let mut delivery = Delivery::default();
        let mut look = |packets, buffers, seconds| {
            delivery.add(packets, buffers, start + Duration::from_secs(seconds));
            delivery.is_single
        };
        assert!(!look(LONG_PACKETS_MIN - 1, LONG_PACKETS_MIN - 1, 0), "a few say nothing");
        assert!(look(1, 1, 1), "many single ones");
        assert!(!look(45_000, 1000, 2), "super-packets");
        assert!(!look(10_000, 10_000, 61), "single ones, such as answers, soon after");
        assert!(look(10_000, 9_000, 63), "single ones for a minute");
    }

    #[test]
    fn processors_are_counted_with_holes() {
        let counts = ["0\n", "0-1\n", "0-3,8-11\n"].map(|list| count(list).unwrap());
        assert_eq!(counts, [1, 2, 12]);
        assert!(count("").is_none());
    }
}

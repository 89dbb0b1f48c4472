//! Packets that the kernel dropped at a device: a full queue of the TUN device, a card that could
//! not keep up, a redirect of the fast path that failed. From /proc/net/dev, which is that of the
//! process's network namespace wherever sysfs is mounted.

use std::io;

/// Of one device, since it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDrops {
    /// The device's name.
    pub device: String,
    /// Packets that it had received.
    pub received: u64,
    /// Packets that it was to send.
    pub sent: u64,
}

const FILE: &str = "/proc/self/net/dev";

/// Columns after the name (`dev_seq_printf_stats`, net/core/net-procfs.c): each direction has
/// eight, and drops in the fourth.
const RECEIVED_AT: usize = 3;
const SENT_AT: usize = 11;

/// Reads those of the devices that are `wanted`.
pub fn read(wanted: impl Fn(&str) -> bool) -> io::Result<Vec<DeviceDrops>> {
    Ok(parse(&std::fs::read_to_string(FILE)?, wanted))
}

/// A line that can't be parsed, such as the two of the heading, is none of a device.
fn parse(text: &str, wanted: impl Fn(&str) -> bool) -> Vec<DeviceDrops> {
    let lines = text.lines().filter_map(|line| {
        // A name has no blank, but may have a colon.
        let (device, rest) = line.trim_start().rsplit_once(':')?;
        let mut numbers = rest.split_ascii_whitespace().map(str::parse);
        let received = numbers.nth(RECEIVED_AT)?.ok()?;
        let sent = numbers.nth(SENT_AT - RECEIVED_AT - 1)?.ok()?;
        wanted(device).then(|| DeviceDrops { device: device.to_owned(), received, sent })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_read_by_direction() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo \
colls carrier compressed
    lo:    0    0  0  0  0   0     0     0    0    0  0  0  0   0    0       0
flannel0: 1 2 3 40 5 6 7 8 9 10 11 120 13 14 15 16
eth0:1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
";
        let drops = |device: &str, received, sent| {
            vec![DeviceDrops { device: device.to_owned(), received, sent }]
        };
        assert_eq!(parse(text, |name| name == "flannel0"), drops("flannel0", 40, 120));
        assert_eq!(parse(text, |name| name == "eth0:1"), drops("eth0:1", 4, 12));
        assert_eq!(parse(text, |_| true).len(), 3);
    }
}

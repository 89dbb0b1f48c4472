//! What the kernel's queues on the way of the honest flows lost: packets that no weftd saw.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use anyhow::{Context, Result};

use crate::pour::{PEER, STRANGER, enter};

/// The tables of one namespace.
struct Tables {
    sockets: File,
    devices: File,
}

/// The queues of all namespaces of the lab.
pub(crate) struct Queues {
    tables: Vec<Tables>,
    backlogs: File,
    text: String,
}

impl Queues {
    /// Leaves the thread in the last of `namespaces`.
    pub(crate) fn open(namespaces: &[impl AsRef<Path>]) -> Result<Self> {
        let open = |path| File::open(path).with_context(|| format!("no {path}"));
        let mut tables = Vec::new();
        for namespace in namespaces {
            enter(namespace.as_ref())?;
            let sockets = open("/proc/thread-self/net/udp")?;
            tables.push(Tables { sockets, devices: open("/proc/thread-self/net/dev")? });
        }
        let backlogs = open("/proc/thread-self/net/softnet_stat")?;
        Ok(Self { tables, backlogs, text: String::new() })
    }

    /// Packets lost so far: by UDP sockets, overlay devices, and the processors' backlogs.
    pub(crate) fn lost(&mut self) -> Result<u64> {
        let Self { tables, backlogs, text } = self;
        let mut lost = backlog_drops(read(backlogs, text)?);
        for Tables { sockets, devices } in tables {
            lost += socket_drops(read(sockets, text)?);
            lost += device_drops(read(devices, text)?);
        }
        Ok(lost)
    }
}

fn read<'a>(table: &mut File, text: &'a mut String) -> Result<&'a str> {
    text.clear();
    table.rewind()?;
    table.read_to_string(text)?;
    Ok(text)
}

/// The last column, without the sockets of the evil senders, which nobody reads.
fn socket_drops(table: &str) -> u64 {
    let senders = [PEER, STRANGER]
        .map(|at| format!("{:08X}:{:04X}", u32::from_ne_bytes(at.ip().octets()), at.port()));
    let others = table.lines().skip(1).filter(|line| {
        line.split_whitespace().nth(1).is_some_and(|at| senders.iter().all(|sender| sender != at))
    });
    others.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok()).sum()
}

/// The second column of each processor's line.
fn backlog_drops(table: &str) -> u64 {
    let columns = table.lines().filter_map(|line| line.split_whitespace().nth(1));
    columns.filter_map(|count| u64::from_str_radix(count, 16).ok()).sum()
}

/// Packets that found the queue of a daemon's device full.
fn device_drops(table: &str) -> u64 {
    let devices = table.lines().filter_map(|line| line.trim_start().split_once(':'));
    let overlay = devices.filter(|(name, _)| name.starts_with("flannel"));
    let dropped = overlay.filter_map(|(_, counts)| counts.split_whitespace().nth(11));
    dropped.filter_map(|count| count.parse::<u64>().ok()).sum()
}

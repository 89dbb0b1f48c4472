//! The daemon itself: whether it answers, what it says, who is in its way, and its store.

use std::time::Duration;

use super::super::facts::{DaemonState, Facts, SubnetFacts, UdpSocket};
use super::super::finding::{Checked, failed, skipped, warning, well};
use crate::control::clock::format_go_duration;
use crate::route::Prefixes;

/// Fewer bytes than any file system's block, for a file of some 100 bytes and its copy.
const FREE_BYTES_MIN: u64 = 64 << 10;
const FREE_FILES_MIN: u64 = 8;

/// It keeps no record of its end but its log; what the store has of the subnet tells one cause.
fn ended(facts: &Facts) -> String {
    let subnet = facts.subnet_file.says.subnet().map(|subnet| {
        format!(
            " `weft lease show {subnet}` (with weftd's flags for its store) says who has this \
             host's subnet: if another node, weftd ended because it lost the lease."
        )
    });
    format!(
        "Start weftd; its log says why it ended, such as a right that its unit or container \
         lacks.{} If it runs, give its --socket.",
        subnet.unwrap_or_default()
    )
}

pub(super) fn answers(facts: &Facts) -> Checked {
    let socket = facts.asked.answered.daemon.socket.display();
    let state = &facts.daemon.state;
    if let (DaemonState::Absent | DaemonState::Stale, Some(it)) = (state, facts.unanswering()) {
        return failed(
            format!("weftd (pid {}) runs, and nobody answers at {socket}", it.pid),
            "Its directory was removed, or it has another --status-socket: name that with \
             --socket, or restart weftd, which makes both anew.",
        );
    }
    match state {
        DaemonState::Absent if is_left(facts) => failed(
            format!(
                "weftd is not running: there is no {socket}, but a subnet file of an earlier run"
            ),
            ended(facts),
        ),
        DaemonState::Absent => Ok(format!("no weftd runs: there is no {socket}")),
        DaemonState::Answered(status) => Ok(format!("weftd {}", status.version)),
        DaemonState::Forbidden(why) => skipped(format!("{socket}: {why}")),
        DaemonState::Elsewhere(pid) => warning(
            format!("the weftd behind {socket} is in another network namespace"),
            format!("nsenter --target {pid} --net weft check"),
        ),
        DaemonState::Stale => {
            failed(format!("nobody serves {socket}: weftd ended without removing it"), ended(facts))
        }
        DaemonState::Mute(why) => failed(
            format!("{socket}: {why}"),
            "Look at weftd's log; if it hangs, restart it and report it.",
        ),
    }
}

/// Whether a weftd ran here that is gone.
fn is_left(facts: &Facts) -> bool {
    let SubnetFacts { is_there, has_lock, .. } = facts.subnet_file;
    is_there && has_lock && facts.rivals().next().is_none()
}

pub(super) fn state(facts: &Facts) -> Checked {
    let verdict = &facts.answered()?.verdict;
    let (state, texts) = (verdict.state, verdict.texts());
    if texts.is_empty() {
        return well(state.name());
    }
    let cure = "See \"What weft status says\" in docs/operations.md; `weft ping NODE` says where \
                the way to a peer breaks.";
    failed(format!("{state}: {}", texts.join("; ")), cure)
}

pub(super) fn others(facts: &Facts) -> Checked {
    if let Some(it) = facts.unanswering() {
        return Ok(format!("none beside weftd (pid {}), which does not answer", it.pid));
    }
    let named: Vec<_> = facts.rivals().map(|it| format!("{} (pid {})", it.name, it.pid)).collect();
    if named.is_empty() {
        let apart = facts.others.first().map(|it| it.subnet_file.display());
        let apart = apart.map(|file| format!("one with another subnet file, {file}"));
        return Ok(apart.unwrap_or_else(|| "none".to_owned()));
    }
    let answers = facts.status().is_some();
    let what = if answers { "also uses" } else { "uses" };
    let cure = match answers || named.len() < 2 {
        true => {
            "Stop it, or give each daemon a --subnet-file of its own; if it is the one to be \
             checked, name its socket with --socket."
        }
        // The younger one may hang before it serves.
        false => {
            "Was one started with --take-over? It takes over from the other, which carries packets \
             until then: see its log, and end it alone if it hangs; the other one goes on. Else \
             give each daemon a --subnet-file of its own, or name its socket with --socket."
        }
    };
    let evidence = format!("{} {what} {}", named.join(", "), facts.asked.subnet_file.display());
    // It may be the very one to be checked, with another socket.
    match answers || facts.others.iter().any(|it| it.name != "weftd") {
        true => failed(evidence, cure),
        false => warning(evidence, cure),
    }
}

pub(super) fn tunnel_port(facts: &Facts) -> Checked {
    if !facts.may_be_udp() {
        return skipped("the kernel or nobody opens a port for this backend");
    }
    let (Some(sockets), Some(port)) = (&facts.udp_sockets, facts.port()) else {
        return skipped("the UDP sockets can't be read");
    };
    let own = facts.tunnel_address();
    let is_in_the_way = |socket: &&UdpSocket| {
        let UdpSocket { address, .. } = *socket;
        let is_of_family = own.is_none_or(|own| own.is_ipv4() == address.is_ipv4());
        let takes_all = address.is_unspecified() && (address.is_ipv6() || is_of_family);
        let conflicts = own.is_none_or(|own| own == *address) && !address.is_loopback();
        socket.port == port && (takes_all || conflicts)
    };
    let is_ours = |socket: &UdpSocket| {
        let is_daemon = |(pid, _): &(u32, String)| {
            Some(*pid) == facts.daemon.pid || facts.unanswering().is_some_and(|it| it.pid == *pid)
        };
        // What systemd keeps for the next weftd.
        let is_systemd = |(pid, name): &(u32, String)| *pid == 1 && name == "systemd";
        match socket.holders.as_slice() {
            [] => facts.status().is_some() || !facts.process.is_root,
            holders => holders.iter().any(is_daemon) || holders.iter().all(is_systemd),
        }
    };
    let mut at_port = sockets.iter().filter(is_in_the_way).peekable();
    let by = if at_port.peek().is_none() { "free" } else { "weftd's" };
    let Some(taken) = at_port.find(|socket| !is_ours(socket)) else {
        return Ok(format!("UDP port {port} is {by}"));
    };
    let by = match taken.holders.first() {
        Some((pid, name)) => format!("{name} (pid {pid})"),
        None => "the kernel, or a program that this user may not look at".to_owned(),
    };
    let evidence = format!("UDP port {port} on {} is taken by {by}", taken.address);
    // It may be the one to be checked, and carry packets.
    if facts.rivals().any(|it| taken.holders.iter().any(|(pid, _)| *pid == it.pid)) {
        return warning(
            evidence,
            "If it is to run here, name its socket with --socket; see \
                                  other-daemon.",
        );
    }
    failed(
        evidence,
        "Stop that program, or choose another Backend.Port for all nodes (then give --port here).",
    )
}

pub(super) fn subnet_file(facts: &Facts) -> Checked {
    let (file, path) = (&facts.subnet_file, facts.asked.subnet_file.display());
    let is_readable = || {
        let Some(error) = &file.error else { return Ok(()) };
        let evidence = format!("{path}: {error}");
        let cure = "Put right what is in its place, and restart weftd, which writes it anew.";
        // What this user may not read may be well.
        let found = if facts.process.is_root { failed(evidence, cure) } else { skipped(evidence) };
        found.map(drop)
    };
    let Some(status) = facts.status() else {
        is_readable()?;
        return well(if file.is_there { "left by an earlier run" } else { "not there yet" });
    };
    let lease = status.lease.as_ref().ok_or("weftd has no lease yet")?;
    let (networks, subnets, mtu_bytes) = (lease.networks(), lease.subnets(), lease.mtu_bytes);
    let given = facts.daemon.given.as_ref();
    if given.is_some_and(|it| it.subnet_file != facts.asked.subnet_file) {
        return skipped("weftd uses another one: give its --subnet-file");
    }
    is_readable()?;
    if !file.is_there {
        let evidence = format!("there is no {path}");
        // It may have another one.
        return match given {
            None => skipped(evidence),
            Some(_) => failed(
                evidence,
                "Give weftd's --subnet-file. If it is that, somebody has removed it: restart \
                 weftd, which writes it anew.",
            ),
        };
    }
    let text = |it: Option<Prefixes>| it.map_or_else(|| "-".to_owned(), |it| it.to_string());
    let cure = "Another program writes this file, it is of another daemon, or weftd could not \
                write it (its log says so): pods get addresses that no node routes. Stop the \
                other program, or mend what hinders weftd, and restart weftd.";
    let says = &file.says;
    if (says.networks, says.subnets) != (networks, subnets) {
        let (theirs, whole) = (text(says.subnets), text(says.networks));
        let evidence = format!(
            "{path} has {theirs} of {whole}, weftd {} of {}",
            text(subnets),
            text(networks)
        );
        return failed(evidence, cure);
    }
    match says.mtu_bytes.filter(|mtu| *mtu != mtu_bytes) {
        Some(mtu) => warning(format!("{path} has MTU {mtu}, weftd {mtu_bytes}"), cure),
        None => Ok(format!("{} of {}", text(subnets), text(networks))),
    }
}

pub(super) fn directory(facts: &Facts) -> Checked {
    let directory = facts.directory.as_ref().ok_or("its file system can't be read")?;
    let (path, bytes) = (directory.path.display(), directory.free_bytes);
    if bytes < FREE_BYTES_MIN {
        let (evidence, cure) = (format!("{bytes} bytes free at {path}"), "Make room there.");
        // What is written already is replaced by as much.
        return if facts.subnet_file.is_there {
            warning(evidence, cure)
        } else {
            failed(evidence, cure)
        };
    }
    if let Some(files) = directory.free_files.filter(|files| *files < FREE_FILES_MIN) {
        let cure = "Remove files there: it has no inodes left.";
        return failed(format!("{files} files free at {path}"), cure);
    }
    match directory.is_writable {
        true => Ok(format!("{path}, {} MiB free", bytes >> 20)),
        false if !facts.process.is_root => skipped(format!("this user may not write to {path}")),
        false => failed(
            format!("{path} can't be written"),
            "Mount it writable, or choose another --subnet-file.",
        ),
    }
}

pub(super) fn etcd(facts: &Facts) -> Checked {
    let good: Vec<_> = facts.etcd.iter().flatten().map(String::as_str).collect();
    let bad = facts.etcd.iter().filter_map(|says| says.as_ref().err());
    let bad: Vec<_> = bad.map(String::as_str).collect();
    let cure = "Is etcd running there, and does a firewall let TCP through to that port?";
    match (good.is_empty(), bad.is_empty()) {
        (true, true) => skipped("no --etcd-endpoints given"),
        (false, true) => Ok(good.join("; ")),
        (true, false) => failed(bad.join("; "), cure),
        (false, false) => warning(bad.join("; "), cure),
    }
}

pub(super) fn lease_time(facts: &Facts) -> Checked {
    let Some(ends) = facts.answered()?.store.lease_expires_unix else {
        return well("the lease has no end");
    };
    let duration = format_go_duration(Duration::from_secs(ends.abs_diff(facts.now_unix)));
    if ends > facts.now_unix {
        return Ok(format!("{duration} left"));
    }
    let cure = "Is the store reachable, and is this host's clock right?";
    failed(format!("the lease ended {duration} ago"), cure)
}

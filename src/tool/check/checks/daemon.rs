//! The daemon itself: whether it answers, what it says, and who is in its way.

use super::super::facts::{DaemonState, Facts, UdpSocket};
use super::super::finding::Finding;
use crate::route::Prefix;
use crate::status::{Lease, Rules, Status, Way};

/// Fewer bytes than any file system's block, for a file of some 100 bytes and its copy.
const FREE_BYTES_MIN: u64 = 64 << 10;
const FREE_FILES_MIN: u64 = 8;

/// Below that many, drops at a device are not worth an alarm.
const DROPS_MIN: u64 = 1000;
/// One in so many packets.
const DROPS_SHARE: u64 = 100;

fn no_daemon() -> Finding {
    Finding::skipped("no weftd answers")
}

pub(super) fn answers(facts: &Facts) -> Finding {
    let socket = facts.asked.socket.display();
    match &facts.daemon.state {
        DaemonState::Absent if is_left(facts) => Finding::warning(
            format!(
                "weftd is not running: there is no {socket}, but a subnet file of an earlier run"
            ),
            "Start weftd; its log says why it ended. If it runs, give its --socket.",
        ),
        DaemonState::Absent => Finding::ok(format!("no weftd runs: there is no {socket}")),
        DaemonState::Answered(status) => Finding::ok(format!("weftd {}", status.version)),
        DaemonState::Forbidden(why) => Finding::skipped(format!("{socket}: {why}; run as root")),
        DaemonState::Elsewhere => Finding::warning(
            format!("the weftd behind {socket} is in another network namespace"),
            match facts.daemon.pid {
                Some(pid) => format!("nsenter --target {pid} --net weft check"),
                None => "Run this in weftd's network namespace.".to_owned(),
            },
        ),
        DaemonState::Stale => Finding::warning(
            format!("nobody serves {socket}: weftd ended without removing it"),
            "Start weftd, which replaces it; its log says why it ended.",
        ),
        DaemonState::Mute(why) => Finding::failed(
            format!("{socket}: {why}"),
            "Look at weftd's log; if it hangs, restart it and report it.",
        ),
    }
}

/// Whether a daemon ran here that is gone.
fn is_left(facts: &Facts) -> bool {
    let subnet_file = &facts.asked.subnet_file;
    facts.subnet_file.is_there && facts.others.iter().all(|it| it.subnet_file != *subnet_file)
}

pub(super) fn state(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    let (state, texts) = (status.verdict.state, status.verdict.texts());
    if texts.is_empty() {
        return Finding::ok(state.name());
    }
    let cure = "See \"What weft status says\" in docs/operations.md.";
    Finding::failed(format!("{state}: {}", texts.join("; ")), cure)
}

pub(super) fn peers(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    let alarming = status.peer_states.iter().filter(|(state, _)| state.is_alarming());
    let texts: Vec<_> = alarming.map(|(state, count)| format!("{count} are {state}")).collect();
    if texts.is_empty() {
        return Finding::ok(format!("{} peers", status.peers));
    }
    let cure = "`weft peers` names them, and `weft ping NODE` says where it breaks.";
    Finding::failed(format!("of {} peers {}", status.peers, texts.join(", ")), cure)
}

pub(super) fn others(facts: &Facts) -> Finding {
    let rivals = facts.others.iter().filter(|it| it.subnet_file == facts.asked.subnet_file);
    let named: Vec<_> = rivals.map(|it| format!("{} (pid {})", it.name, it.pid)).collect();
    if !named.is_empty() {
        let what = if facts.status().is_some() { "also uses" } else { "uses" };
        let file = facts.asked.subnet_file.display();
        let cure = "Stop it, or give each daemon a --subnet-file of its own; if it is the one to \
                    be checked, name its socket with --socket.";
        let evidence = format!("{} {what} {file}", named.join(", "));
        // It may be the very one to be checked, with another socket.
        let is_known = facts.status().is_some() || facts.others.iter().any(|it| it.name != "weftd");
        return match is_known {
            true => Finding::failed(evidence, cure),
            false => Finding::warning(evidence, cure),
        };
    }
    let apart: Vec<_> = facts.others.iter().map(|it| it.subnet_file.display()).collect();
    match apart.as_slice() {
        [] => Finding::ok("none"),
        [first, ..] => Finding::ok(format!("one with another subnet file, {first}")),
    }
}

pub(super) fn tunnel_port(facts: &Facts) -> Finding {
    if !facts.may_be_udp() {
        return Finding::skipped("the kernel or nobody opens a port for this backend");
    }
    let (Some(sockets), Some(port)) = (&facts.udp_sockets, facts.port()) else {
        return Finding::skipped("the UDP sockets can't be read");
    };
    let own = facts.tunnel_address().map(|address| *address.ip());
    let is_in_the_way = |socket: &&UdpSocket| {
        let conflicts = socket.address.is_unspecified()
            || own.is_none_or(|own| own == socket.address) && !socket.address.is_loopback();
        socket.port == port && conflicts
    };
    let at_port: Vec<_> = sockets.iter().filter(is_in_the_way).collect();
    let is_ours = |socket: &&&UdpSocket| {
        let pids = socket.holders.iter().map(|(pid, _)| *pid);
        let daemon = facts.daemon.pid;
        // What systemd keeps for the next weftd.
        let is_systemd = |(pid, name): &(u32, String)| *pid == 1 && name == "systemd";
        let kept = !socket.holders.is_empty() && socket.holders.iter().all(is_systemd);
        let may_be = facts.status().is_some() || !facts.process.is_root;
        let is_unknown = may_be && socket.holders.is_empty();
        pids.into_iter().any(|pid| Some(pid) == daemon) || kept || is_unknown
    };
    let Some(taken) = at_port.iter().find(|socket| !is_ours(socket)) else {
        let by = if at_port.is_empty() { "free" } else { "weftd's" };
        return Finding::ok(format!("UDP port {port} is {by}"));
    };
    let by = match taken.holders.first() {
        Some((pid, name)) => format!("{name} (pid {pid})"),
        None => "the kernel, or a program that this user may not look at".to_owned(),
    };
    Finding::failed(
        format!("UDP port {port} on {} is taken by {by}", taken.address),
        "Stop that program, or choose another Backend.Port for all nodes (then give --port here).",
    )
}

pub(super) fn subnet_file(facts: &Facts) -> Finding {
    let (file, path) = (&facts.subnet_file, facts.asked.subnet_file.display());
    let Some(status) = facts.status() else {
        return Finding::ok(if file.is_there { "left by an earlier run" } else { "not there yet" });
    };
    let Some(Lease { network, subnet, mtu_bytes, .. }) = &status.lease else {
        return Finding::skipped("weftd has no lease yet");
    };
    let settings = facts.daemon.settings.as_ref();
    if settings.is_some_and(|it| it.subnet_file != facts.asked.subnet_file) {
        return Finding::skipped("weftd uses another one: give its --subnet-file");
    }
    if let Some(error) = &file.error {
        return Finding::skipped(format!("{path}: {error}"));
    }
    if !file.is_there {
        let cure = "Give weftd's --subnet-file; if it is that, see weftd's log.";
        // It may have another one.
        return match settings {
            None => Finding::skipped(format!("there is no {path}")),
            Some(_) => Finding::failed(format!("there is no {path}"), cure),
        };
    }
    let text = |it: Option<Prefix>| it.map_or_else(|| "-".to_owned(), |it| it.to_string());
    let cure = "Another program writes this file, or it is of another daemon: pods get addresses \
                that no node routes. Stop the other program and restart weftd.";
    if (file.network, file.subnet) != (Some(*network), Some(*subnet)) {
        let (theirs, whole) = (text(file.subnet), text(file.network));
        let evidence = format!("{path} has {theirs} of {whole}, weftd {subnet} of {network}");
        return Finding::failed(evidence, cure);
    }
    match file.mtu_bytes {
        Some(file) if file != *mtu_bytes => {
            Finding::warning(format!("{path} has MTU {file}, weftd {mtu_bytes}"), cure)
        }
        Some(_) | None => Finding::ok(format!("{subnet} of {network}")),
    }
}

pub(super) fn directory(facts: &Facts) -> Finding {
    let Some(directory) = &facts.directory else {
        return Finding::skipped("its file system can't be read");
    };
    let path = directory.path.display();
    if directory.free_bytes < FREE_BYTES_MIN {
        let evidence = format!("{} bytes free at {path}", directory.free_bytes);
        return Finding::failed(evidence, "Make room there.");
    }
    if directory.counts_files && directory.free_files < FREE_FILES_MIN {
        let evidence = format!("{} files free at {path}", directory.free_files);
        return Finding::failed(evidence, "Remove files there: it has no inodes left.");
    }
    if directory.is_writable {
        return Finding::ok(format!("{path}, {} MiB free", directory.free_bytes >> 20));
    }
    if !facts.process.is_root {
        return Finding::skipped(format!("this user may not write to {path}"));
    }
    Finding::failed(
        format!("{path} can't be written"),
        "Mount it writable, or choose another --subnet-file.",
    )
}

/// What of the lease is as it should be.
fn ours(status: &Status, what: impl Fn(&Lease) -> String) -> Finding {
    Finding::ok(status.lease.as_ref().map_or_else(|| "no lease yet".to_owned(), what))
}

pub(super) fn public_address(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    match &status.store.duplicate_public_ip {
        None => ours(status, |lease| lease.public_ip.to_string()),
        Some(holder) => Finding::failed(
            format!("this node's PublicIP belongs to {holder}"),
            "Find that host and give one of the two another address: docs/node-identity.md.",
        ),
    }
}

pub(super) fn node_subnet(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    if !status.store.subnet_refused {
        return ours(status, |lease| lease.subnet.to_string());
    }
    let other = status.store.refused_subnet.map(|subnet| subnet.to_string());
    let other = other.unwrap_or_else(|| "one that can't be used".to_owned());
    Finding::failed(
        format!("the cluster assigned {other} to this node"),
        "The Node was made again: drain it, restart weftd, and let its pods start anew.",
    )
}

pub(super) fn restart_needed(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    if !status.restart_needed {
        return Finding::ok("no");
    }
    let cure = "Restart weftd, then the pods of this host.";
    Finding::warning("the store has another configuration", cure)
}

pub(super) fn rules(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    let Some(Rules { kept_by, kept }) = &status.rules else {
        return Finding::ok("weftd keeps none");
    };
    match kept.in_place {
        true => Finding::ok(format!("{kept_by}, in place")),
        // The first pass is under way.
        false if kept.checks == 0 && kept.failures == 0 => Finding::skipped("they are being set"),
        false => Finding::failed(
            format!("{kept_by}: not in place, {} failures", kept.failures),
            "weftd's log says why; another program may remove them: docs/firewall.md.",
        ),
    }
}

pub(super) fn device_drops(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else { return no_daemon() };
    if status.lease.is_none() {
        return Finding::skipped("not counted");
    }
    let by_kernel =
        status.fast_path.as_ref().map_or(0, |it| it.taken.packets_sent + it.taken.packets_received);
    let is_many = |(_, way, drops): &(&str, Way, u64)| {
        let by_workers = status.of_way(*way).map_or(0, |counts| counts.packets_received);
        *drops >= DROPS_MIN && *drops > (by_workers + by_kernel) / DROPS_SHARE
    };
    let many = status.own_drops().into_iter().filter(is_many);
    let texts = many
        .map(|(device, way, drops)| format!("{device} dropped {drops} packets on the way {way}"));
    let texts: Vec<_> = texts.collect();
    match texts.is_empty() {
        true => Finding::ok("few or none"),
        false if status.egress.is_none() => Finding::ok(texts.join(", ")),
        false => Finding::warning(
            texts.join(", "),
            "The host is too slow for what pods send, or was for a while: see docs/performance.md.",
        ),
    }
}

pub(super) fn overflows(facts: &Facts) -> Finding {
    let own = facts.status().and_then(|status| status.worker.as_ref());
    let own =
        own.map(|all| format!("{} of weftd's datagrams since its start", all.receive_overflows));
    let all = facts
        .receive_errors
        .map(|count| format!("{count} of all sockets in this network namespace"));
    let texts: Vec<_> = own.into_iter().chain(all).collect();
    match texts.is_empty() {
        true => Finding::skipped("not counted"),
        false => Finding::ok(texts.join(", ")),
    }
}

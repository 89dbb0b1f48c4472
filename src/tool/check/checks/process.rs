//! Rights, limits, and what of the kernel a process may use.

use super::super::facts::Facts;
use super::super::finding::Finding;
use crate::engine::Engine;
use crate::status::{FastPath, Status};

/// Of linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_BPF: u32 = 39;

/// The kernel since which io_uring's memory is the control group's, not the user's.
const KERNEL_WITHOUT_LOCKED: (u32, u32) = (5, 11);

/// A worker has less than ten files open, and the rest of weftd some fifty.
const OPEN_FILES_MIN: u64 = 256;

/// Rings of a few workers.
const LOCKED_BYTES_MIN: u64 = 8 << 20;

fn no_tunnel(facts: &Facts) -> Option<Finding> {
    (!facts.may_be_udp()).then(|| Finding::skipped("only the udp backend needs it"))
}

/// What a user without rights can't know of a daemon that is yet to start.
fn rights(facts: &Facts, capability: u32) -> Result<bool, Finding> {
    let Some(has) = facts.may(capability) else {
        return Err(Finding::skipped("its rights can't be read"));
    };
    if !has && !facts.process.is_daemon && !facts.process.is_root {
        return Err(Finding::skipped("no weftd can be looked at, and this user is not root"));
    }
    Ok(has)
}

fn whose(facts: &Facts) -> &'static str {
    if facts.process.is_daemon { "weftd" } else { "root here" }
}

pub(super) fn tun(facts: &Facts) -> Finding {
    if let Some(skipped) = no_tunnel(facts) {
        return skipped;
    }
    match &facts.tun {
        None => Finding::skipped("not looked at"),
        Some(Ok(())) => Finding::ok("/dev/net/tun can be opened"),
        Some(Err(_)) if !facts.process.is_root => Finding::skipped("this user is not root"),
        Some(Err(_)) if facts.device().is_some() => {
            Finding::skipped("not visible here, but weftd has its device")
        }
        Some(Err(error)) => Finding::failed(
            format!("/dev/net/tun: {error}"),
            "Load the module tun (modprobe tun), or give the container the device.",
        ),
    }
}

pub(super) fn net_admin(facts: &Facts) -> Finding {
    match rights(facts, CAP_NET_ADMIN) {
        Err(skipped) => skipped,
        Ok(true) => Finding::ok(format!("{} has it", whose(facts))),
        Ok(false) => Finding::failed(
            format!("{} has no CAP_NET_ADMIN", whose(facts)),
            "Grant CAP_NET_ADMIN: without it there are no devices, routes or rules.",
        ),
    }
}

pub(super) fn net_raw(facts: &Facts) -> Finding {
    match rights(facts, CAP_NET_RAW) {
        Err(skipped) => skipped,
        Ok(true) => Finding::ok(format!("{} has it", whose(facts))),
        Ok(false) => Finding::warning(
            format!("{} has no CAP_NET_RAW", whose(facts)),
            "Grant CAP_NET_RAW: path MTUs are not measured, and iptables may need it.",
        ),
    }
}

pub(super) fn bpf(facts: &Facts) -> Finding {
    if let Some(skipped) = no_tunnel(facts) {
        return skipped;
    }
    if let Err(skipped) = rights(facts, CAP_BPF) {
        return skipped;
    }
    if facts.may(CAP_BPF) == Some(true) || facts.may(CAP_SYS_ADMIN) == Some(true) {
        return Finding::ok(format!("{} has it", whose(facts)));
    }
    let status = facts.status();
    let is_off = |it: &Status| it.fast_path.as_ref().is_some_and(FastPath::is_switched_off);
    if status.is_some_and(|it| is_off(it) && it.workers.len() == 1) {
        return Finding::ok("missing and not needed: one worker, no fast path");
    }
    Finding::warning(
        format!("{} has no CAP_BPF", whose(facts)),
        "Grant CAP_BPF: without it there is no fast path, and several workers may reorder packets.",
    )
}

pub(super) fn io_uring(facts: &Facts) -> Finding {
    if let Some(skipped) = no_tunnel(facts) {
        return skipped;
    }
    let workers = facts.status().map_or(&[][..], |status| status.workers.as_slice());
    let ring = Engine::IoUring.to_string();
    if !workers.is_empty() && workers.iter().all(|worker| worker.engine == ring) {
        return Finding::ok("weftd's workers use it");
    }
    let disabled = facts.sysctl("kernel/io_uring_disabled");
    match &facts.io_uring {
        None => Finding::skipped("not tried"),
        Some(Ok(())) => Finding::ok("a ring can be made"),
        Some(Err(_)) if disabled == Some(1) && !facts.process.is_root => {
            Finding::skipped("kernel.io_uring_disabled is 1, and this user is not root")
        }
        Some(Err(error)) => {
            let sysctl = disabled.map(|it| format!(", kernel.io_uring_disabled is {it}"));
            Finding::warning(
                format!("{error}{}", sysctl.unwrap_or_default()),
                "The engine is mmsg instead, which works and may be slower; a system call filter \
                 (seccomp) or kernel.io_uring_disabled refuses io_uring.",
            )
        }
    }
}

pub(super) fn open_files(facts: &Facts) -> Finding {
    match facts.process.open_files_max {
        None => Finding::skipped("the limit can't be read"),
        Some(most) if most >= OPEN_FILES_MIN => Finding::ok(format!("up to {most}")),
        Some(most) => Finding::warning(
            format!("{} may open {most} files", whose(facts)),
            format!("Raise the limit to {OPEN_FILES_MIN} (LimitNOFILE=, ulimit -n)."),
        ),
    }
}

pub(super) fn locked_memory(facts: &Facts) -> Finding {
    if let Some(skipped) = no_tunnel(facts) {
        return skipped;
    }
    let Some(kernel) = facts.process.kernel else {
        return Finding::skipped("the kernel's version is unknown");
    };
    if kernel >= KERNEL_WITHOUT_LOCKED {
        return Finding::ok(format!("no limit counts on kernel {}.{}", kernel.0, kernel.1));
    }
    match facts.process.locked_bytes_max {
        None => Finding::skipped("the limit can't be read"),
        Some(most) if most >= LOCKED_BYTES_MIN => Finding::ok(format!("up to {most} bytes")),
        Some(most) => Finding::warning(
            format!("{} may lock {most} bytes", whose(facts)),
            "Set LimitMEMLOCK=infinity (ulimit -l unlimited): io_uring and BPF maps need it.",
        ),
    }
}

pub(super) fn processors(facts: &Facts) -> Finding {
    let workers = facts.status().map(|status| status.workers.len()).filter(|count| *count > 0);
    match (facts.process.processors, workers) {
        (None, _) => Finding::skipped("the allowed processors can't be read"),
        (Some(allowed), Some(workers)) if workers > allowed => Finding::warning(
            format!("workers: {workers}, allowed processors: {allowed}"),
            format!("Choose --workers={allowed}, or allow weftd more processors."),
        ),
        (Some(allowed), Some(workers)) => {
            Finding::ok(format!("workers: {workers}, allowed processors: {allowed}"))
        }
        (Some(allowed), None) => Finding::ok(format!("allowed processors: {allowed}")),
    }
}

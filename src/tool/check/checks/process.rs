//! Rights, limits, and what of the kernel a process may use.

use rustix::thread::CapabilitySet;

use super::super::facts::Facts;
use super::super::finding::{Checked, Finding, failed, skipped, warning, well};
use crate::daemon::limits::OPEN_FILES_ENOUGH;
use crate::engine::Engine;
use crate::status::{FastPath, SWITCHED_OFF, Status};

fn for_tunnel(facts: &Facts) -> Result<(), Finding> {
    facts.may_be_udp().then_some(()).ok_or_else(|| "only the udp backend needs it".into())
}

fn whose(facts: &Facts) -> &'static str {
    if facts.process.is_daemon { "weftd" } else { "root here" }
}

/// Whether one of these rights is there.
fn has(facts: &Facts, rights: CapabilitySet) -> Result<bool, Finding> {
    let process = &facts.process;
    let capabilities = process.capabilities.ok_or("its rights can't be read")?;
    let has = capabilities.intersects(rights);
    // What a user without rights can't know of a daemon that is yet to start.
    if !has && !process.is_daemon && !process.is_root {
        return Err("no weftd can be looked at, and this user is not root".into());
    }
    Ok(has)
}

/// That the right is there, or what is missing and what to do.
fn right(
    facts: &Facts,
    (name, rights): (&str, CapabilitySet),
    missing: impl Fn(String, String) -> Checked,
    without: &str,
) -> Checked {
    match has(facts, rights)? {
        true => Ok(format!("{} has it", whose(facts))),
        false => {
            missing(format!("{} has no {name}", whose(facts)), format!("Grant {name}: {without}."))
        }
    }
}

pub(super) fn net_admin(facts: &Facts) -> Checked {
    let right_of = ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN);
    right(facts, right_of, failed, "without it there are no devices, routes or rules")
}

pub(super) fn net_raw(facts: &Facts) -> Checked {
    let right_of = ("CAP_NET_RAW", CapabilitySet::NET_RAW);
    right(facts, right_of, warning, "path MTUs are not measured, and iptables may need it")
}

pub(super) fn bpf(facts: &Facts) -> Checked {
    for_tunnel(facts)?;
    let is_switched_off = |it: &FastPath| it.why.as_deref() == Some(SWITCHED_OFF);
    let is_off = |status: &Status| {
        status.workers.len() == 1 && status.fast_path.as_ref().is_some_and(is_switched_off)
    };
    let rights = CapabilitySet::BPF | CapabilitySet::SYS_ADMIN;
    if !has(facts, rights)? && facts.status().is_some_and(is_off) {
        return well("missing and not needed: one worker, no fast path");
    }
    let without = "without it there is no fast path, and several workers may reorder packets";
    right(facts, ("CAP_BPF", rights), warning, without)
}

pub(super) fn tun(facts: &Facts) -> Checked {
    for_tunnel(facts)?;
    match &facts.tun_error {
        None => well("/dev/net/tun can be opened"),
        Some(_) if !facts.process.is_root => skipped("this user is not root"),
        Some(_) if facts.device().is_some() => {
            skipped("not visible here, but weftd has its device")
        }
        Some(error) => failed(
            format!("/dev/net/tun: {error}"),
            "Load the module tun (modprobe tun), or give the container the device.",
        ),
    }
}

pub(super) fn io_uring(facts: &Facts) -> Checked {
    for_tunnel(facts)?;
    let workers = facts.status().map_or(&[][..], |status| status.workers.as_slice());
    let ring = Engine::IoUring.to_string();
    if !workers.is_empty() && workers.iter().all(|worker| worker.engine == ring) {
        return well("weftd's workers use it");
    }
    let disabled = facts.sysctl("kernel/io_uring_disabled");
    match &facts.io_uring_error {
        None => well("a ring can be made"),
        Some(_) if disabled == Some(1) && !facts.process.is_root => {
            skipped("kernel.io_uring_disabled is 1, and this user is not root")
        }
        Some(error) => {
            let sysctl = disabled.map(|it| format!(", kernel.io_uring_disabled is {it}"));
            warning(
                format!("{error}{}", sysctl.unwrap_or_default()),
                "The engine is mmsg instead, which works and may be slower. What refuses io_uring \
                 may be a system call filter (seccomp), kernel.io_uring_disabled, or a kernel \
                 without it.",
            )
        }
    }
}

pub(super) fn open_files(facts: &Facts) -> Checked {
    let most = facts.process.open_files_max.ok_or("the limit can't be read")?;
    if most >= OPEN_FILES_ENOUGH {
        return Ok(format!("up to {most}"));
    }
    warning(
        format!("{} may open {most} files", whose(facts)),
        format!("Raise the limit to {OPEN_FILES_ENOUGH} (LimitNOFILE=, ulimit -n)."),
    )
}

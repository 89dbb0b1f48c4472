//! etcd, and time.

use super::super::facts::Facts;
use super::super::finding::Finding;
use crate::control::clock::format_go_duration;
use std::time::Duration;

pub(super) fn etcd(facts: &Facts) -> Finding {
    if facts.etcd.is_empty() {
        return Finding::skipped("no --etcd-endpoints given");
    }
    let texts = |wanted: bool| {
        let each = facts.etcd.iter().filter(move |it| it.answer.is_ok() == wanted);
        let each = each.map(|endpoint| match &endpoint.answer {
            Ok((milliseconds, answer)) => format!("{}: {answer}, {milliseconds} ms", endpoint.url),
            Err(error) => format!("{}: {error}", endpoint.url),
        });
        each.collect::<Vec<_>>()
    };
    let (good, bad) = (texts(true), texts(false));
    let cure = "Is etcd running there, and does a firewall let TCP through to that port?";
    match (good.is_empty(), bad.is_empty()) {
        (_, true) => Finding::ok(good.join("; ")),
        (true, false) => Finding::failed(bad.join("; "), cure),
        (false, false) => Finding::warning(bad.join("; "), cure),
    }
}

pub(super) fn lease_time(facts: &Facts) -> Finding {
    let Some(status) = facts.status() else {
        return Finding::skipped("no weftd answers");
    };
    let Some(ends) = status.store.lease_expires_unix else {
        return Finding::ok("the lease has no end");
    };
    let duration = |seconds: u64| format_go_duration(Duration::from_secs(seconds));
    match ends.checked_sub(facts.now_unix) {
        Some(left) if left > 0 => Finding::ok(format!("{} left", duration(left))),
        _ => Finding::failed(
            format!("the lease ended {} ago", duration(facts.now_unix.saturating_sub(ends))),
            "Is the store reachable, and is this host's clock right?",
        ),
    }
}

pub(super) fn clock(facts: &Facts) -> Finding {
    match facts.clock_is_synchronised {
        Some(true) => Finding::ok("synchronised by systemd-timesyncd"),
        // Another program may well do it.
        Some(false) | None => Finding::skipped("systemd-timesyncd does not say"),
    }
}

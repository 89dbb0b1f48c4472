//! etcd, and how long the lease lasts.

use std::time::Duration;

use super::super::facts::Facts;
use super::super::finding::{Checked, failed, skipped, warning, well};
use crate::control::clock::format_go_duration;

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

//! Which host's commands are due, and what the last ones set up. Pure: the caller runs commands and
//! reads the clock.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::backend::status::PeerHosts;
use crate::route::{Families, Prefix, Prefixes};

/// Pauses before a failed command is retried, doubled each time.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// One other host, as passed to its commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    /// Its subnets, and where it is reached.
    pub(super) addresses: Families<(Prefix, Ipv4Addr), (Prefix<Ipv6Addr>, Ipv6Addr)>,
    pub(super) data: String,
}

/// The commands for one subnet: remove what was set up for `from`, add `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) subnet: Prefixes,
    pub(super) from: Option<Peer>,
    pub(super) to: Option<Peer>,
}

/// All hosts that have something set up, or should have.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    entries: BTreeMap<Prefixes, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    wanted: Option<Peer>,
    applied: Option<Peer>,
    is_running: bool,
    /// When to retry, and the pause after that, if the last attempt failed.
    retry: Option<(Instant, Duration)>,
}

impl Entry {
    fn is_due(&self, now: Instant) -> bool {
        !self.is_running
            && self.wanted != self.applied
            && self.retry.is_none_or(|(at, _)| at <= now)
    }
}

impl Hosts {
    /// Sets the wanted hosts. One whose values changed is tried at once.
    pub(super) fn want(&mut self, mut wanted: BTreeMap<Prefixes, Peer>) {
        for (subnet, entry) in &mut self.entries {
            let next = wanted.remove(subnet);
            if next != entry.wanted {
                (entry.wanted, entry.retry) = (next, None);
            }
        }
        for (subnet, peer) in wanted {
            self.entries.entry(subnet).or_default().wanted = Some(peer);
        }
        self.sweep();
    }

    /// The next task that is due; hosts that have not failed come first.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Task> {
        let due = self.entries.iter_mut().filter(|(_, entry)| entry.is_due(now));
        let (subnet, entry) = due.min_by_key(|(_, entry)| entry.retry)?;
        entry.is_running = true;
        let (from, to) = (entry.applied.clone(), entry.wanted.clone());
        Some(Task { subnet: *subnet, from, to })
    }

    /// Records the result of `task`, which has failed unless what is set up after it is what it was
    /// for. Gives the pause before the next attempt.
    pub(super) fn end(&mut self, task: &Task, applied: Option<Peer>, now: Instant) -> Duration {
        let Some(entry) = self.entries.get_mut(&task.subnet) else { return Duration::ZERO };
        (entry.is_running, entry.applied) = (false, applied);
        let (has_failed, is_outdated) = (entry.applied != task.to, entry.wanted != task.to);
        let pause = entry.retry.map_or(RETRY.0, |(_, pause)| pause);
        entry.retry = (has_failed && !is_outdated).then(|| (now + pause, (pause * 2).min(RETRY.1)));
        let is_tried_again = entry.retry.is_some();
        self.sweep();
        if is_tried_again { pause } else { Duration::ZERO }
    }

    /// When the next host that failed is due.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        let waiting = self.entries.values().filter(|entry| !entry.is_running);
        waiting.filter_map(|entry| Some(entry.retry?.0)).min()
    }

    /// What is set up.
    pub(super) fn applied(&self) -> PeerHosts {
        let applied = self.entries.values().filter_map(|entry| entry.applied.as_ref());
        let hosts = applied.flat_map(|peer| {
            let v4 = peer.addresses.v4().map(|(subnet, host)| (subnet.into(), host.into()));
            let v6 = peer.addresses.v6().map(|(subnet, host)| (subnet.into(), host.into()));
            v4.into_iter().chain(v6)
        });
        hosts.collect()
    }

    /// Hosts that have something set up.
    pub(super) fn done(&self) -> usize {
        self.entries.values().filter(|entry| entry.applied.is_some()).count()
    }

    /// Hosts whose last try failed.
    pub(super) fn failed(&self) -> usize {
        self.entries.values().filter(|entry| entry.retry.is_some()).count()
    }

    fn sweep(&mut self) {
        self.entries.retain(|_, entry| {
            entry.is_running || entry.wanted.is_some() || entry.applied.is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(number: u8) -> Prefixes {
        format!("10.5.{number}.0/24").parse().unwrap()
    }

    fn peer(data: &str) -> Peer {
        let v4 = ("10.5.1.0/24".parse().unwrap(), Ipv4Addr::new(192, 0, 2, 1));
        Peer { addresses: Families::of_v4(v4, None), data: data.to_owned() }
    }

    fn wanted(hosts: &[(u8, &str)]) -> BTreeMap<Prefixes, Peer> {
        hosts.iter().map(|(number, data)| (subnet(*number), peer(data))).collect()
    }

    fn begun(hosts: &mut Hosts, now: Instant) -> Vec<Prefixes> {
        std::iter::from_fn(|| hosts.begin(now)).map(|task| task.subnet).collect()
    }

    #[test]
    fn each_host_has_one_task_at_a_time() {
        let (mut hosts, now) = (Hosts::default(), Instant::now());
        hosts.want(wanted(&[(1, "a"), (2, "a")]));
        let task = hosts.begin(now).unwrap();
        assert_eq!((task.subnet, &task.from, &task.to), (subnet(1), &None, &Some(peer("a"))));
        assert_eq!(begun(&mut hosts, now), [subnet(2)]);
        // Another value while its command still runs: after it, and never beside it.
        hosts.want(wanted(&[(1, "b"), (2, "a")]));
        assert_eq!(begun(&mut hosts, now), []);
        hosts.end(&task, Some(peer("a")), now);
        assert_eq!(hosts.applied().len(), 1);
        let task = hosts.begin(now).unwrap();
        assert_eq!((&task.from, &task.to), (&Some(peer("a")), &Some(peer("b"))));
        hosts.end(&task, Some(peer("b")), now);
        assert_eq!(begun(&mut hosts, now), []);
        hosts.want(wanted(&[(2, "a")]));
        let task = hosts.begin(now).unwrap();
        assert_eq!((&task.from, &task.to), (&Some(peer("b")), &None));
        hosts.end(&task, None, now);
        assert_eq!(hosts.entries.len(), 1, "a host that is gone is kept in memory");
    }

    #[test]
    fn failing_host_backs_off_behind_others() {
        let (mut hosts, mut now) = (Hosts::default(), Instant::now());
        hosts.want(wanted(&[(1, "a")]));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let task = hosts.begin(now).unwrap();
            let pause = Duration::from_secs(seconds);
            assert_eq!(hosts.end(&task, None, now), pause);
            assert_eq!((hosts.failed(), hosts.next_retry()), (1, Some(now + pause)));
            assert_eq!(hosts.begin(now + pause - Duration::from_millis(1)), None, "too early");
            now += pause;
        }
        hosts.want(wanted(&[(1, "a"), (2, "a")]));
        assert_eq!(begun(&mut hosts, now), [subnet(2), subnet(1)], "a new host waits for others");
    }

    #[test]
    fn changed_host_is_tried_at_once() {
        let (mut hosts, now) = (Hosts::default(), Instant::now());
        hosts.want(wanted(&[(1, "wrong")]));
        let task = hosts.begin(now).unwrap();
        hosts.end(&task, None, now);
        hosts.want(wanted(&[(1, "wrong")]));
        assert_eq!(begun(&mut hosts, now), [], "other leases shorten a pause");
        hosts.want(wanted(&[(1, "right")]));
        let task = hosts.begin(now).unwrap();
        assert_eq!(task.to, Some(peer("right")));
        // And if it says so while the old command still fails.
        hosts.want(wanted(&[(1, "better")]));
        assert_eq!(hosts.end(&task, None, now), Duration::ZERO);
        assert_eq!(begun(&mut hosts, now), [subnet(1)]);
    }
}

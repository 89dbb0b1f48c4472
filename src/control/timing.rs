//! The control plane's durations.

use std::time::Duration;

/// `relist_period` where an entry is a whole Node of some 15 KB: in a cluster of 6,000, each of
/// whose nodes lists all of them, three listings in ten seconds. The watch breaks and begins anew
/// every few minutes, and reports by itself if it cannot continue.
pub const RELIST_PERIOD_NODES: Duration = Duration::from_secs(6 * 60 * 60);
/// `publish_window` in a cluster of 6,000 Nodes, where one table takes 5 ms: four of them a second,
/// however many Nodes move, are 2 % of a processor. The API's own way to its watches takes about as
/// long.
pub const PUBLISH_WINDOW_NODES: Duration = Duration::from_millis(250);

/// The control plane's durations. `renew_margin` and `stale_hold` are the operator's; of the
/// others, only tests and simulations use others than the default.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Life of a lease from its last renewal.
    pub lease_ttl: Duration,
    /// How long before its end a lease is renewed.
    pub renew_margin: Duration,
    /// Pause after a failed renewal.
    pub renew_retry: Duration,
    /// Between two listings of everything.
    pub relist_period: Duration,
    /// For which changes are collected.
    pub publish_window: Duration,
    /// Grace period of peers that vanished with most others at once; zero for none.
    pub stale_hold: Duration,
    /// Life of the claim on the PublicIP after its node is gone.
    pub claim_ttl: Duration,
    /// How long a weftd that takes over may start, while nobody renews the lease.
    pub take_over_max: Duration,
    /// Between two looks at a cloud's route tables.
    pub cloud_period: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            // flannel's fixed lease time.
            lease_ttl: Duration::from_secs(24 * 60 * 60),
            // flannel's margin.
            renew_margin: Duration::from_secs(60 * 60),
            // flannel's pause after a failed renewal.
            renew_retry: Duration::from_secs(60),
            // How often everything is listed although the watch seems to work: a change that it
            // lost heals within 6 minutes, and a thousand nodes cost 3 listings a second.
            relist_period: Duration::from_secs(300),
            // How long changes are collected before they are published: a burst costs one route
            // table, and nobody notices a fiftieth of a second.
            publish_window: Duration::from_millis(20),
            // Grace period of peers after most of them vanished at once: time for an operator to
            // see the alarm and to bring the store's data back, and for nodes to register again by
            // themselves.
            stale_hold: Duration::from_secs(15 * 60),
            // Life of a claim after its node is gone without a word. As long as kubelet's leases
            // are trusted, within a factor: another node that wants the address waits no longer
            // than that.
            claim_ttl: Duration::from_secs(30),
            // Each node looks for itself, with one or two requests: a thousand nodes ask six times
            // in a second then, of the twenty that AWS, which has the least, grants one account on
            // average.
            cloud_period: Duration::from_secs(300),
            // As long as flanneld's start in Kubernetes waits for its first listing, and within the
            // usual margin of an hour; with one of less than this the lease may end first.
            take_over_max: Duration::from_secs(10 * 60),
        }
    }
}

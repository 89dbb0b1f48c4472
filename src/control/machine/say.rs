//! The machine's log messages, in flannel's words where flannel has some. Pure text; the driver
//! logs it.

use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::stale::Released;
use crate::control::clock;
use crate::route::Prefix;

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::control) enum Say {
    /// The next renewal is planned.
    RenewalPlanned { wait: Duration },
    /// The lease was extended.
    Renewed { expires_unix: u64 },
    /// The store did not extend the lease.
    RenewalFailed { error: String },
    /// The lease ended by our own clock; the store is read before anything is written.
    ReadFirst { subnet: Prefix },
    /// The own entry, which somebody rewrote, has this node's attributes again.
    Restored { subnet: Prefix },
    /// Somebody else wrote the own entry, with our PublicIP; `alarm` unless that was logged lately.
    WrittenInOurName { subnet: Prefix, public_ip: Ipv4Addr, alarm: bool },
    /// The own entry shows the node's new address.
    Moved { subnet: Prefix, to: Ipv4Addr },
    /// The own entry had become unparsable.
    Repaired { subnet: Prefix },
    /// The own lease was gone, and was taken again.
    Retaken { subnet: Prefix },
    /// The own lease was from the cache, and the store gave it to this node again.
    Confirmed { subnet: Prefix },
    /// An operator fixed the subnet to this node.
    BecameReservation { subnet: Prefix },
    /// Somebody else is in the own entry.
    TakenOver { subnet: Prefix, new_owner: Ipv4Addr },
    /// The own entry was deleted.
    Removed { subnet: Prefix },
    /// The own lease lapsed, and somebody else has what it was.
    Covered { subnet: Prefix, by: Prefix, new_owner: Ipv4Addr },
    /// The watch must begin anew.
    HistoryLost,
    /// The store is away.
    StoreFailed { error: String, seconds: u64, peers: usize },
    /// It is back.
    StoreAnswers { seconds: u64 },
    /// Most peers vanished at once and stay for the grace period.
    Holding { vanished: usize, of: usize, hold: Duration, wiped: bool },
    /// Grace periods ended.
    Released(Released),
}

impl Say {
    /// Whether the operator should look.
    pub(in crate::control) fn is_warning(&self) -> bool {
        if let Self::WrittenInOurName { alarm, .. } = self {
            return *alarm;
        }
        if let Self::Released(released) = self {
            return released.over > 0;
        }
        !matches!(
            self,
            Self::RenewalPlanned { .. }
                | Self::Renewed { .. }
                | Self::Confirmed { .. }
                | Self::Moved { .. }
                | Self::BecameReservation { .. }
                | Self::HistoryLost
                | Self::StoreAnswers { .. }
        )
    }
}

impl fmt::Display for Say {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RenewalPlanned { wait } => {
                write!(f, "Waiting for {} to renew lease", clock::format_go_duration(*wait))
            }
            Self::Renewed { expires_unix } => {
                write!(f, "Lease renewed, new expiration: {}", clock::format_go(*expires_unix))
            }
            Self::RenewalFailed { error } => {
                write!(f, "Error renewing lease (trying again in 1 min): {error}")
            }
            Self::ReadFirst { subnet } => write!(
                f,
                "The lease of {subnet} is past its end, after a pause or an outage; looking \
                 whether it is still ours before renewing it"
            ),
            Self::Restored { subnet } => {
                write!(f, "Somebody rewrote the lease of {subnet}; restored it")
            }
            Self::WrittenInOurName { subnet, public_ip, .. } => twin(f, *subnet, *public_ip),
            Self::Moved { subnet, to } => {
                write!(f, "The lease of {subnet} stays, now with PublicIP {to}")
            }
            Self::Repaired { subnet } => {
                write!(f, "The lease of {subnet} had become unreadable; wrote it again")
            }
            Self::Retaken { subnet } => {
                write!(f, "The lease of {subnet} was gone from the store; took it again")
            }
            Self::Confirmed { subnet } => {
                write!(f, "The store confirmed the lease of {subnet}; the cache is not needed now")
            }
            Self::BecameReservation { subnet } => {
                write!(f, "The lease of {subnet} became a reservation")
            }
            Self::TakenOver { subnet, new_owner } => {
                write!(f, "The lease of {subnet} now belongs to {new_owner}; giving it up")
            }
            Self::Removed { subnet } => {
                write!(f, "The lease of {subnet} was removed from the store; giving it up")
            }
            Self::Covered { subnet, by, new_owner } => {
                write!(
                    f,
                    "The lease of {subnet} lapsed and {by} belongs to {new_owner}; giving it up"
                )
            }
            Self::HistoryLost => f.write_str(
                "Watch of subnet leases failed because etcd index outside history window; \
                 listing all leases",
            ),
            Self::StoreFailed { error, seconds, peers } => write!(
                f,
                "Subnet watch failed: {error}; without the store for {seconds} s, \
                 keeping all {peers} peers and trying again"
            ),
            Self::StoreAnswers { seconds } => {
                write!(f, "The lease store answers again after {seconds} s")
            }
            Self::Holding { vanished, of, hold, wiped } => alarm(f, *vanished, *of, *hold, *wiped),
            Self::Released(released) => released.fmt(f),
        }
    }
}

fn alarm(
    f: &mut fmt::Formatter<'_>,
    vanished: usize,
    of: usize,
    hold: Duration,
    wiped: bool,
) -> fmt::Result {
    let what = if wiped { "the store lost its data: " } else { "" };
    let hold = clock::format_go_duration(hold);
    write!(
        f,
        "ALARM: {what}{vanished} of {of} peers vanished at once; sending to them for another \
         {hold} (--stale-hold). If that was not meant, restore the store's data, the network \
         configuration included; nodes that run register again by themselves. If it was, restart \
         weftd"
    )
}

fn twin(f: &mut fmt::Formatter<'_>, subnet: Prefix, public_ip: Ipv4Addr) -> fmt::Result {
    write!(
        f,
        "ALARM: somebody else wrote the lease of {subnet} with our PublicIP {public_ip}. If that \
         was no operator, another node, such as one that runs flanneld, has the same address, and \
         both give their pods addresses of one subnet: give one of them another address with \
         --public-ip or --iface, and restart it. Keeping the lease, and not writing over it"
    )
}

impl fmt::Display for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { leased, over, left } = self;
        write!(
            f,
            "Of the peers held after they vanished, {leased} have a lease again or were replaced, \
             {over} did not come back in time and are given up, {left} are still held"
        )
    }
}

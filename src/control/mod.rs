//! Leases: acquire, renew, watch.

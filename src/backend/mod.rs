//! What a lease means on this host, per backend kind.

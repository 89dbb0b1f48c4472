//! The host's own network state: interfaces, addresses, routes.

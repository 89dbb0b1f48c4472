//! The forwarding decision: packet and routes in, verdict with its reason out.

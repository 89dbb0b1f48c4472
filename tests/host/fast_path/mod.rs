//! The kernel's programs for the udp backend.

mod filters;
mod programs;

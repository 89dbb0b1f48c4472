//! The kernel's programs for the udp backend.

mod families;
mod filters;
mod programs;

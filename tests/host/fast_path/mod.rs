//! The kernel's programs for the udp backend.

mod programs;

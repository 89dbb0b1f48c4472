//! How the peers are, whatever carries the packets: who is asked, and what follows from all that is
//! known of each.

mod capture;
mod classic_bpf;
pub(super) mod echoes;
pub(super) mod evidence;
pub(super) mod health;
mod machine;
mod one;
pub mod state;
mod words;

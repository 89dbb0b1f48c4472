//! Everything an operator writes, parsed once into types.

pub mod flags;
pub mod kube;
pub mod lock_file;
pub mod network;
pub mod options;
pub mod subnet_file;
pub mod whole_file;

mod build;
mod checked;
mod flag_table;
mod go_flags;
mod value;

//! What several integration tests share. Every test file compiles its own copy.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

pub(crate) mod bpf;
pub(crate) mod change;
pub(crate) mod cloud_site;
pub(crate) mod cluster;
pub(crate) mod confine;
pub mod control;
pub(crate) mod cost;
pub(crate) mod daemonset;
pub mod dataplane;
pub mod etcd;
pub(crate) mod flows;
pub mod kube_api;
pub(crate) mod lab;
pub(crate) mod log_since;
pub(crate) mod machine;
pub(crate) mod members;
pub(crate) mod overlay;
pub(crate) mod pace;
pub(crate) mod packet;
pub(crate) mod probe;
pub mod proxy;
pub(crate) mod seccomp;
pub(crate) mod status;
pub(crate) mod traffic;

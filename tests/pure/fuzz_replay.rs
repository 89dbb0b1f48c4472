//! Replays the committed fuzz corpora through the fuzz bodies, on the stable toolchain.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use crate::{
    cache_parse, coalesce_roundtrip, firewall_listings, forward_walk, ip_parse, lpm_model,
    operator_input, store_values, vici_packets, vnet_split, wireguard_messages,
};

/// Inputs that a corpus must hold at least: a lost corpus must not pass for a clean one.
const INPUTS_MIN: usize = 8;
/// And at most: a fuzzer that was given the committed folder to write in must not pass either.
const INPUTS_MAX: usize = 64;

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut inputs = 0;
    let entries = fs::read_dir(&folder).expect("the corpus is part of the repository");
    for entry in entries {
        let path = entry.expect("the corpus can be listed").path();
        let input = fs::read(&path).expect("the corpus can be read");
        assert!(catch_unwind(|| run(&input)).is_ok(), "{} fails", path.display());
        inputs += 1;
    }
    assert!(inputs >= INPUTS_MIN, "only {inputs} inputs in {}", folder.display());
    assert!(inputs <= INPUTS_MAX, "{inputs} inputs in {}: merge them", folder.display());
}

#[test]
fn cache_parse_corpus() {
    replay("cache_parse", cache_parse::run);
}

#[test]
fn firewall_listings_corpus() {
    replay("firewall_listings", firewall_listings::run);
}

#[test]
fn node_objects_corpus() {
    replay("node_objects", crate::node_objects::run);
}

#[test]
fn operator_input_corpus() {
    replay("operator_input", operator_input::run);
}

#[test]
fn store_values_corpus() {
    replay("store_values", store_values::run);
}

#[test]
fn vici_packets_corpus() {
    replay("vici_packets", vici_packets::run);
}

#[test]
fn ip_parse_corpus() {
    replay("ip_parse", ip_parse::run);
}

#[test]
fn lpm_model_corpus() {
    replay("lpm_model", lpm_model::run);
}

#[test]
fn vnet_split_corpus() {
    replay("vnet_split", vnet_split::run);
}

#[test]
fn coalesce_roundtrip_corpus() {
    replay("coalesce_roundtrip", coalesce_roundtrip::run);
}

#[test]
fn forward_walk_corpus() {
    replay("forward_walk", forward_walk::run);
}

#[test]
fn wireguard_messages_corpus() {
    replay("wireguard_messages", wireguard_messages::run);
}

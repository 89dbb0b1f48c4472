//! What needs neither root nor a network: the oracles of packets, routes and offloads, the fuzz
//! corpora, weft against flannel case by case, the recorded benchmark runs.

mod bench_record;
mod fuzz_replay;
mod golden;
mod instructions;
mod offload_oracle;
mod packet_oracle;

#[path = "../support/bpf.rs"]
mod bpf;

#[path = "../../fuzz/bodies/cache_parse.rs"]
mod cache_parse;
#[path = "../../fuzz/bodies/coalesce_roundtrip.rs"]
mod coalesce_roundtrip;
#[path = "../../fuzz/bodies/firewall_listings.rs"]
mod firewall_listings;
#[path = "../../fuzz/bodies/forward_walk.rs"]
mod forward_walk;
#[path = "../../fuzz/bodies/ip_parse.rs"]
mod ip_parse;
#[path = "../../fuzz/bodies/lpm_model.rs"]
mod lpm_model;
#[path = "../../fuzz/bodies/node_objects.rs"]
mod node_objects;
#[path = "../../fuzz/bodies/operator_input.rs"]
mod operator_input;
#[path = "../../fuzz/bodies/packets.rs"]
mod packets;
#[path = "../../fuzz/bodies/slow_twin.rs"]
mod slow_twin;
#[path = "../../fuzz/bodies/store_values.rs"]
mod store_values;
#[path = "../../fuzz/bodies/vici_packets.rs"]
mod vici_packets;
#[path = "../../fuzz/bodies/vnet_split.rs"]
mod vnet_split;
#[path = "../../fuzz/bodies/wireguard_messages.rs"]
mod wireguard_messages;

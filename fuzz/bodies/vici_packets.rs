//! One input of the `vici_packets` target: a packet that claims to be charon's.

use weft::backend::ipsec::vici::{Message, Packet};

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    let Ok(packet) = Packet::parse(data) else { return };
    if let Packet::Response(message) | Packet::Event(_, message) = &packet {
        assert!(depth(message) <= 8, "as deep as the sender likes");
    }
    // What is read is no more than what came, but for what is no UTF-8.
    let shown = format!("{packet:?}");
    assert!(shown.len() <= 64 + 64 * data.len(), "{} bytes of {}", shown.len(), data.len());
}

fn depth(message: &Message) -> usize {
    message.sections().map(|(_, section)| 1 + depth(section)).max().unwrap_or(0)
}

//! What becomes of a packet that WireGuard carries, in the kernel or in weftd.

use super::{Ends, LastStep, ThisHost, ToldFamily, leased};
use crate::status::{Peer, WireguardPeer};

impl<A: ToldFamily> ThisHost<'_, A> {
    /// Where it goes, sealed `by` whoever has the keys.
    pub(super) fn sealed(&self, by: &str, peer: &Peer, steps: &mut Vec<String>) -> String {
        let Some(WireguardPeer { endpoint, public_key, last_handshake_unix, .. }) = &peer.wireguard
        else {
            return "nothing is known of that peer's keys: see `weft peers`".to_owned();
        };
        if last_handshake_unix.is_none() {
            steps.push(format!(
                "no keys are agreed on with that peer {public_key} yet: the packet has a handshake \
                 begin, and waits for it"
            ));
        }
        match endpoint {
            Some(endpoint) => format!("{by} seals it and sends it to {endpoint} by UDP"),
            None => format!("{by} seals it, and does not know where that peer is until it sends"),
        }
    }

    /// A packet that has come out of a sealed datagram in the kernel, which checks whose it is.
    pub(super) fn opened(&self, ends: Ends<A>, steps: &mut Vec<String>) -> LastStep {
        let Some(owner) = self.owner(ends.source) else {
            return Err(format!(
                "no lease covers {}: WireGuard takes from a peer what its lease allows and nothing \
                 else, and drops it (`ip -s -s link show` counts a `frame` error of the device)",
                ends.source
            ));
        };
        steps.push(leased(ends.source, owner));
        if owner.wireguard.is_none() {
            return Err("that peer is not set up here, so nothing of it is taken".to_owned());
        }
        Ok("sealed by that peer, the kernel's WireGuard opens and delivers it".to_owned())
    }
}

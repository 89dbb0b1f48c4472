//! What becomes of a packet whose source is in no lease.

use super::{Ends, ThisHost, ToldFamily};
use crate::backend_kind::{BackendKind, CarriedBy};
use crate::status::Peer;

impl<A: ToldFamily> ThisHost<'_, A> {
    /// What the peer does with a packet whose source is in no lease, if it is sent there.
    pub(super) fn at_the_peer(&self, Ends { source, destination }: Ends<A>) -> String {
        let takes = |peer: &&Peer| peer.state.is_sent_to() && A::via(peer).is_some();
        let peer = self.owner(destination).filter(takes);
        let is_sent = self.carried_by == CarriedBy::Workers && self.owner(source).is_none();
        let Some(peer) = peer.filter(|_| is_sent) else { return String::new() };
        let unless_loose = match (A::BITS, self.peer_check) {
            _ if self.kind == BackendKind::Wireguard => String::new(),
            (128, _) => String::new(),
            (_, None) => " if it has --peer-check=strict, which is not known here".to_owned(),
            (_, Some(own)) => format!(
                " if it has --peer-check=strict, which is not known here: this weftd has {own}"
            ),
        };
        format!("; through the tunnel, {} drops it as src-not-leased{unless_loose}", peer.via)
    }
}

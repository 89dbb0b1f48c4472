//! `weft cluster`: all nodes in one table, by what they publish and by echoes of this one.

use std::fmt::Write as _;

use anyhow::Context as _;
use serde::Serialize;

use crate::status::{Peer, PeerState, SCHEMA, State, Status, Via};
use crate::tool::echo::{Echoes, Leg};
use crate::tool::peers::{self, EXPLAINED_MAX};
use crate::tool::ping::{self, Report};
use crate::tool::style::Style;
use crate::tool::table;

const HEADINGS: [&str; 9] =
    ["SUBNET", "NODE", "ADDRESS", "BACKEND", "LEASE", "STATE", "HOST", "OVERLAY", "FULL"];

/// Where in a row its state is.
const STATE_AT: usize = 5;

/// What is known of the cluster.
#[derive(Debug, Serialize)]
pub(super) struct Cluster {
    schema: u32,
    nodes: Vec<Node>,
    pub(super) well: bool,
}

/// One node.
#[derive(Debug, Serialize)]
struct Node {
    lease: Peer,
    /// What this node says of itself, for the one that was asked only.
    own_state: Option<State>,
    /// What came of pinging it.
    ping: Option<Report>,
}

impl Node {
    fn is_well(&self) -> bool {
        !self.lease.state.is_alarming()
            && self.own_state.is_none_or(|state| state == State::Ready)
            && self.ping.as_ref().is_none_or(|report| report.well)
    }

    fn row(&self, now_unix: u64) -> Vec<String> {
        let Self { lease, own_state, ping } = self;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let left = lease.lease_expires_unix.map(|ends| match ends.checked_sub(now_unix) {
            Some(seconds) => peers::ago(seconds),
            None => "ended".to_owned(),
        });
        let state = match own_state {
            Some(state) => state.name().to_owned(),
            None => peers::shown(lease.state),
        };
        let leg = |which| ping.as_ref()?.legs.iter().find(|echoes| echoes.leg == which);
        let [host, overlay, full] =
            [Leg::Host, Leg::Tunnel, Leg::TunnelFull].map(|which| or_dash(leg(which).map(shown)));
        vec![
            lease.shown_subnet(),
            or_dash(lease.node.clone()),
            lease.via.host().to_string(),
            or_dash(lease.backend.clone()),
            or_dash(left),
            state,
            host,
            overlay,
            full,
        ]
    }
}

/// The round trip, and how many were answered unless all were.
fn shown(echoes: &Echoes) -> String {
    let Echoes { sent, answered, .. } = echoes;
    match echoes.round_trip_microseconds.map(peers::milliseconds) {
        Some(took) if answered == sent => took,
        Some(took) => format!("{took} {answered}/{sent}"),
        None => format!("0/{sent}"),
    }
}

/// Pings all nodes; `status` and `peers` are what weftd says of itself.
pub(super) fn run(status: &Status, peers: Vec<Peer>) -> anyhow::Result<Cluster> {
    let lease = status.lease.as_ref().context("weftd has no lease yet: see `weft status`")?;
    let mut pinged = match peers.is_empty() {
        false => ping::run(None, None, status, &peers, false)?.peers,
        true => Vec::new(),
    }
    .into_iter();
    let backend = status.backend.as_ref().and_then(|backend| backend.kind);
    let own = lease.subnets().zip(lease.node_address());
    let (subnets, address) = own.context("the lease that weftd tells of has no subnet")?;
    let own = Peer {
        backend: backend.map(|kind| kind.to_string()),
        lease_expires_unix: status.store.lease_expires_unix,
        ..Peer::new(subnets, None, Via::Host(address), PeerState::Ok)
    };
    let own = Node { lease: own, own_state: Some(status.verdict.state), ping: None };
    let others = peers.into_iter();
    let others = others.map(|lease| Node { lease, own_state: None, ping: pinged.next() });
    let nodes: Vec<_> = std::iter::once(own).chain(others).collect();
    let well = nodes.iter().all(Node::is_well);
    Ok(Cluster { schema: SCHEMA, nodes, well })
}

/// What [`run`] gives, for people.
pub(super) fn render(cluster: &Cluster, now_unix: u64, style: Style) -> String {
    let nodes = &cluster.nodes;
    let rows: Vec<_> = nodes.iter().map(|node| node.row(now_unix)).collect();
    let mut screen = table::render(&HEADINGS, &rows, |row, column, shown| match column {
        STATE_AT if nodes[row].is_well() => style.good(shown),
        STATE_AT => style.bad(shown),
        _ => shown.to_owned(),
    });
    let conclusions = nodes.iter().filter_map(|node| Some((node, node.ping.as_ref()?)));
    let broken = conclusions.filter(|(node, _)| !node.is_well());
    for (node, report) in broken.take(EXPLAINED_MAX) {
        writeln!(screen, "{}: {}", node.lease.shown_subnet(), report.conclusion).ok();
    }
    let well = nodes.iter().filter(|node| node.is_well()).count();
    screen += &format!(
        "{well} of {} nodes are well, as the first one sees them: by the leases that it knows and \
         by its own echoes. Whether pods, bridge and firewall of another are, `weft status` and \
         `weft check` there know\n",
        nodes.len()
    );
    screen
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_795_225_924;

    fn peer(state: PeerState) -> Peer {
        let subnets = "10.5.2.0/24".parse().unwrap();
        let via = Via::Host([192, 0, 2, 2].into());
        let peer = Peer::new(subnets, Some("b".to_owned()), via, state);
        let lease_expires_unix = Some(NOW + 7200);
        Peer { backend: Some("udp".to_owned()), lease_expires_unix, ..peer }
    }

    #[test]
    fn a_row_has_lease_and_echoes_and_what_is_wrong_is_not_well() {
        let node = |state, own_state| Node { lease: peer(state), own_state, ping: None };
        let row = node(PeerState::Silent, None).row(NOW).join(" ");
        assert_eq!(row, "10.5.2.0/24 b 192.0.2.2 udp 2h SILENT - - -");
        let ended = node(PeerState::Ok, Some(State::Degraded)).row(NOW + 7201);
        assert_eq!(ended[4..6], ["ended", "degraded"]);
        for (state, own_state, is_well) in [
            (PeerState::Idle, None, true),
            (PeerState::Ok, Some(State::Ready), true),
            (PeerState::OtherBackend, None, false),
            (PeerState::Ok, Some(State::Degraded), false),
        ] {
            assert_eq!(node(state, own_state).is_well(), is_well, "{state} {own_state:?}");
        }
    }

    #[test]
    fn echoes_that_are_not_all_answered_are_counted() {
        let echoes = |answered| Echoes {
            sent: 10,
            answered,
            round_trip_microseconds: (answered > 0).then_some(1234),
            ..Echoes::new(Leg::Host, [192, 0, 2, 2].into(), 84)
        };
        for (answered, text) in [(10, "1.23ms"), (9, "1.23ms 9/10"), (0, "0/10")] {
            assert_eq!(shown(&echoes(answered)), text);
        }
    }
}

//! The UDP ports from which a node sends tunnel datagrams, beside the tunnel's own: one for each
//! worker, so that a peer's workers can share what comes from this node (as RFC 7348, section 5,
//! has it for VXLAN). What is sent there goes to nobody.

/// Ports that a node may use: as many workers as any card of 2026's ordinary hosts needs, twice.
pub const SOURCE_PORTS: u16 = 16;

/// From the tunnel's port to the first of them. From 8285 it leads to 28,445, below the ports that
/// Linux gives to programs which ask for none (`ip_local_port_range`, from 32,768 on).
const DISTANCE: u16 = 20_160;

/// The first of the source ports of tunnels at `port`.
pub fn first_source_port(port: u16) -> u16 {
    if port < u16::MAX - DISTANCE - SOURCE_PORTS { port + DISTANCE } else { port - DISTANCE }
}

/// Whether a node whose tunnel is at `port` sends tunnel datagrams from `source`.
#[inline]
pub fn is_tunnel_source(port: u16, source: u16) -> bool {
    source == port || source.wrapping_sub(first_source_port(port)) < SOURCE_PORTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_its_own_source_ports() {
        assert_eq!(first_source_port(8285), 28_445);
        for port in 1..=u16::MAX {
            let first = first_source_port(port);
            assert!(first > 0 && first.checked_add(SOURCE_PORTS).is_some(), "{port}");
            assert!(!(first..first + SOURCE_PORTS).contains(&port), "{port}");
            let count = [first - 1, first, first + SOURCE_PORTS - 1, first + SOURCE_PORTS];
            let is_source = count.map(|source| source != port && is_tunnel_source(port, source));
            assert_eq!(is_source, [false, true, true, false], "{port}");
            assert!(is_tunnel_source(port, port));
        }
    }
}

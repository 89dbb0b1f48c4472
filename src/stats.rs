//! Counters of the dataplane: what was received, forwarded, and dropped for which reason.
//!
//! Every counter has one writer, the worker that owns it, and any number of readers, so a plain
//! load and store replace a locked add. Totals obey one law, exactly, in each direction:
//! packets received = packets forwarded + packets dropped (all reasons).

mod by_peer;
mod host_key;
mod long_sends;
mod samples;

use std::sync::atomic::{AtomicU64, Ordering};

pub use by_peer::{ByPeer, PACKET_OVERHEAD, PEERS_COUNTED_MAX, PeerTraffic, spread};
pub use host_key::HostKey;
pub use long_sends::LONG_BYTES;
pub use samples::{DroppedPacket, SAMPLE_BYTES_MAX, Sample, Samples};

/// A count written by one thread and read by any.
///
/// INVARIANT: `add` and `set` are called by one thread only, the worker that owns the counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`. Not a locked instruction: see the type's invariant.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Replaces the value, for a number that is no count.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $id:literal,)+) => {
        /// Why a packet went no further. The list is closed and the ids are stable: operators
        /// and alerts name them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl DropReason {
            /// Every reason, in declaration order.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The stable id, as it stands in metrics, logs and documentation.
            pub fn id(self) -> &'static str {
                match self {
                    $(Self::$name => $id,)+
                }
            }

            /// One line for the operator.
            pub fn describe(self) -> &'static str {
                self.texts().0
            }

            /// What to look at first.
            pub fn advice(self) -> &'static str {
                self.texts().1
            }

            /// Both, as the comment has them.
            fn texts(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$name => concat!($($doc,)+).trim_ascii(),)+
                }.split_once(" Look at: ").unwrap_or_default()
            }
        }
    };
}

drop_reasons! {
    /// Shorter than the header of its version of IP.
    /// Look at: which host that is not a peer sends to the tunnel port; with WireGuard it is a peer
    Runt = "runt",
    /// An IPv6 packet, and this node has no IPv6 subnet.
    /// Look at: on egress usually nothing: the kernel sends IPv6 announcements on every new device;
    /// on ingress which host sends them, with WireGuard which peer
    Ipv6 = "ipv6",
    /// An IPv4 packet, and this node has no IPv4 subnet.
    /// Look at: on egress this host's routes, one of which leads into the overlay; on ingress which
    /// host sends them, with WireGuard which peer
    Ipv4 = "ipv4",
    /// An IPv6 packet from this host that concerns nobody beyond the device: neighbour discovery,
    /// router solicitations, listener reports.
    /// Look at: nothing: the kernel sends some on every device
    LinkLocal = "link-local",
    /// The version field is neither 4 nor 6.
    /// Look at: which host that is not a peer sends to the tunnel port; with WireGuard it is a peer
    BadVersion = "bad-version",
    /// The header length field is below 5 words or beyond the packet, or IPv6's extension headers
    /// go on beyond it or are more than eight.
    /// Look at: on the way out the pod that sends it; else which host that is not a peer sends to
    /// the tunnel port; if a peer does, and with WireGuard it does, its memory or network card
    BadHeaderLength = "bad-ihl",
    /// The length field is below that of the header or beyond the packet.
    /// Look at: which host that is not a peer sends to the tunnel port; if a peer does, and with
    /// WireGuard it does, an MTU that truncates datagrams
    BadTotalLength = "bad-totlen",
    /// The IPv4 header checksum is wrong, or an IPv6 datagram has no UDP checksum.
    /// Look at: on egress a pod whose own tunnel sends IPv6 without UDP checksums; on ingress which
    /// host that is not a peer sends to the tunnel port; if a peer does, and with WireGuard it
    /// does, its memory or network card
    BadChecksum = "bad-checksum",
    /// The offload header of a TUN read contradicts the packet behind it.
    /// Look at: the kernel: try `--offload=none` and report it
    BadOffloadHeader = "bad-vnet-hdr",
    /// The time to live ran out at this hop.
    /// Look at: traceroute causes a few; many mean a routing loop in the pods
    TtlExpired = "ttl-expired",
    /// The packet arrived with a time to live of zero.
    /// Look at: a peer that forwards expired packets
    TtlZero = "ttl-zero",
    /// No lease covers the destination.
    /// Look at: the destination pod's host: does `weft peers` list its subnet? Of IPv6: does its
    /// lease have `TakesIPv6`?
    NoRoute = "no-route",
    /// The destination is in this host's subnet, and the host's routes lead it into the overlay.
    /// Look at: this host's bridge for pods: is it there and up, with the subnet's first address?
    OwnSubnet = "own-subnet",
    /// The inner source can't be a host: 0/8, 127/8, 169.254/16, multicast, class E, our own TUN
    /// address; of IPv6 unspecified, loopback, link-local, multicast, an IPv4 address
    /// (::ffff:0:0/96).
    /// Look at: the pod or peer that sends with such an address
    SourceMartian = "src-martian",
    /// The inner source lies in our own subnet, yet came from the network.
    /// Look at: a second host with this subnet, or a forger
    SourceIsLocalSubnet = "src-is-local-subnet",
    /// The inner source is leased to another peer than the one that sent it.
    /// Look at: the peer: address translation, two addresses, or a forger
    SourceNotPeerLease = "src-not-peer-lease",
    /// No lease holds the inner source, which one must of IPv6, with WireGuard, and with
    /// `--peer-check=strict`.
    /// Look at: a node that is new, if it stops within seconds; else who sends from there?
    SourceNotLeased = "src-not-leased",
    /// The datagram came from another port than the tunnel's and those that weft's workers have,
    /// which `--peer-check=strict` asks for.
    /// Look at: a peer behind address translation needs `--peer-check=loose`; else a pod's packets
    /// that a host masquerades
    OuterPort = "outer-port",
    /// The inner destination can't be a host: 0/8, 127/8, class E; of IPv6 as for a source.
    /// Look at: the pod or the peer that sends there
    DestinationMartian = "dst-martian",
    /// The inner destination is multicast or broadcast.
    /// Look at: the application: multicast is not carried, it must use unicast
    DestinationMulticast = "dst-multicast",
    /// The inner destination is not in our own subnet.
    /// Look at: a peer with outdated leases (its clock, its store), or a forger
    DestinationNotLocal = "dst-not-local",
    /// The inner packet asks for a loose or strict source route (RFC 7126, sections 4.3 and 4.4).
    /// Look at: the sender: no ordinary program does this
    SourceRoute = "source-route",
    /// A congested router marked the datagram around a packet that can't carry the mark (RFC 6040,
    /// section 4.2).
    /// Look at: the routers and switches between the hosts: tunnel datagrams say that they are not
    /// ECN-capable, and a congested router should drop such, not mark them
    CongestionMark = "congestion-mark",
    /// A tunnel packet inside a tunnel packet, addressed to our own tunnel socket.
    /// Look at: a forger, or a pod network that runs over the tunnel
    NestedTunnel = "nested-tunnel",
    /// One of our own tunnel packets was routed back into the TUN device, or a datagram came from
    /// the network with this host's address as its sender.
    /// Look at: on egress this host's routes: the route to a peer must not lead into the overlay;
    /// on ingress a forger, or a second host with this one's address
    OwnLoop = "own-loop",
    /// Larger than the overlay MTU, and nobody on this path may fragment it.
    /// Look at: the MTU in the pods; it must be at most `FLANNEL_MTU`
    Oversize = "oversize",
    /// Larger than the overlay MTU with Don't Fragment set; Fragmentation Needed was due.
    /// Look at: the MTU in the pods; it must be at most `FLANNEL_MTU`. A few are normal: path MTU
    /// discovery
    DontFragmentMtu = "df-mtu",
    /// The socket's send buffer or a device queue was full.
    /// Look at: the external interface: slower than the load, or its queue is too short
    SendBufferFull = "tx-enobufs",
    /// Nothing has been heard from the peer since much was sent to it, and the socket's send buffer
    /// was half full, as it is of datagrams that wait for hosts which are down.
    /// Look at: `ip neighbour`: hosts of the same link that are down and still sent to (`FAILED`,
    /// `INCOMPLETE`); else the external interface, which is slower than the load
    SendUnanswered = "tx-unanswered",
    /// The peer's host leaves ARP requests and echoes unanswered: what is sent to it would only
    /// fill the socket's send buffer. It is asked once a second for as long as pods send.
    /// Look at: the peer's host, which is down or off this link: `ip neighbour` has its address as
    /// `FAILED` or `INCOMPLETE`
    SendUnresolved = "tx-unresolved",
    /// The kernel forbade the send: a firewall rule, a route, an IPsec policy, or a full table of
    /// connections.
    /// Look at: `ip route get` the peer's public address, which shows a route of type prohibit; if
    /// that is well, this host's OUTPUT rules for the tunnel's UDP port, `ip xfrm policy`, and
    /// `weft check`, which counts the connections
    SendForbidden = "tx-eperm",
    /// The kernel has no route to the peer's public address.
    /// Look at: this host's route to the peer: `ip route get` its public address
    SendUnreachable = "tx-unreach",
    /// With WireGuard: there is no session with the peer, and too many packets wait for one.
    /// Look at: `weft peers`: when both last agreed on keys; if never, its UDP port, its public key
    /// in the lease, and the preshared key
    NoSession = "no-session",
    /// The send failed with an error that has no reason of its own.
    /// Look at: `ip route get` the peer's public address, which shows a blackhole route; if that is
    /// well, `ip -statistics link` of the external interface; if that counts errors,
    /// `--offload=none`
    SendFailed = "tx-error",
    /// With WireGuard: the datagram is nothing of its protocol.
    /// Look at: which host that is not a peer sends to the tunnel port
    NotWireguard = "not-wireguard",
    /// With WireGuard: the datagram is of a session that this host has not, or not any more.
    /// Look at: nothing, if this weftd or the peer's was started a moment ago; else who sends it
    UnknownSession = "unknown-session",
    /// With WireGuard: the datagram is not what the peer has sealed.
    /// Look at: a forger; if a peer sends many, its memory or network card
    NotAuthentic = "not-authentic",
    /// With WireGuard: the datagram came before, or 8,192 of its session after it.
    /// Look at: a network that doubles packets or holds them back; else somebody who recorded them
    Replayed = "replayed",
    /// More arrived than this host delivers, and the socket's receive buffer was nearly full: what
    /// those send who send much goes first.
    /// Look at: who sends so much: `weft drops`; then CPU: the host cannot take packets as fast as
    /// they arrive. After a moment without a running weftd, it is what had no room meanwhile
    ReceiveOverload = "rx-overload",
    /// The TUN device's queue was full.
    /// Look at: CPU: the host cannot take packets as fast as they arrive
    TunFull = "tun-full",
    /// The TUN device refused the packet; it is down, gone, or rejects the frame.
    /// Look at: `ip link show flannel0`; the log says whether the device is being recreated
    TunWriteFailed = "tun-write",
    /// A bug in weft hit this packet or another of its batch; the log shows the first bytes.
    /// Look at: the log: the line `Internal error in weftd` names the place in the code; report it
    InternalError = "internal-error",
}

/// Number of drop reasons.
pub const DROP_REASONS: usize = DropReason::ALL.len();

/// Counters of one direction of one worker. Super-packets count as the packets they carry.
#[derive(Debug, Default)]
pub struct DirectionStats {
    /// IPv4 packets taken in.
    pub packets_received: Counter,
    /// Their bytes, inner headers included.
    pub bytes_received: Counter,
    /// IPv4 packets handed on to the kernel.
    pub packets_forwarded: Counter,
    /// Their bytes.
    pub bytes_forwarded: Counter,
    /// Reads: packets or super-packets from the TUN, datagrams or GRO batches from the socket.
    pub reads: Counter,
    /// Writes: datagrams or GSO batches to the socket, packets or super-packets to the TUN.
    pub writes: Counter,
    /// ICMP errors made because of packets of this direction; one about a device or peer that is
    /// gone may still be lost on its way.
    pub icmp_sent: Counter,
    /// ICMP errors that the rate limit held back.
    pub icmp_limited: Counter,
    /// Dropped packets, for whoever asks; in no total.
    pub samples: Samples,
    drops: Drops,
}

#[derive(Debug)]
struct Drops([Counter; DROP_REASONS]);

impl Default for Drops {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Counter::default()))
    }
}

impl DirectionStats {
    /// Counts `packets` of `bytes` in all that the kernel took with so many `writes`.
    #[inline]
    pub fn forwarded(&self, writes: u64, packets: u64, bytes: u64) {
        self.packets_forwarded.add(packets);
        self.bytes_forwarded.add(bytes);
        self.writes.add(writes);
    }

    /// Counts `packets` dropped for `reason`.
    #[inline]
    pub fn drop(&self, reason: DropReason, packets: u64) {
        self.drops.0[reason as usize].add(packets);
    }

    /// Counts `packets` dropped for `reason`, of which `dropped` is the first, or all of them in
    /// one super-packet.
    #[inline]
    pub fn drop_packet(&self, reason: DropReason, packets: u64, dropped: DroppedPacket<'_>) {
        self.drop(reason, packets);
        self.samples.offer(reason, packets, dropped);
    }

    /// Packets dropped for `reason` so far.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.0[reason as usize].get()
    }

    /// Packets dropped for any reason so far.
    pub fn drops_total(&self) -> u64 {
        self.drops.0.iter().map(Counter::get).sum()
    }

    /// Packets received that are neither forwarded nor dropped: between two turns of the worker
    /// that counts, those that wait for room in the send buffer. For that worker only; to others
    /// the counters change under their eyes.
    pub fn unaccounted(&self) -> u64 {
        let gone = self.packets_forwarded.get().wrapping_add(self.drops_total());
        self.packets_received.get().saturating_sub(gone)
    }
}

/// Everything one worker counts. Two cache lines, which processors fetch as a pair, are never
/// shared with another worker's.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerStats {
    /// From the TUN device to the network.
    pub egress: DirectionStats,
    /// From the network to the TUN device.
    pub ingress: DirectionStats,
    /// Times the worker slept for lack of work.
    pub sleeps: Counter,
    /// Times the worker let small packets gather for a moment.
    pub naps: Counter,
    /// Sends that the kernel refused as a GSO batch and took one by one.
    pub gso_fallbacks: Counter,
    /// TUN writes that the kernel refused as a super-packet and took one by one.
    pub tun_fallbacks: Counter,
    /// Datagrams that the kernel dropped because the receive buffer was full (SO_RXQ_OVFL).
    pub receive_overflows: Counter,
    /// Messages of WireGuard's handshakes that were received.
    pub handshakes: Counter,
    /// Those of them that were not looked at, because too many others waited.
    pub handshakes_shed: Counter,
    /// Empty datagrams of WireGuard's, which say that a peer is there.
    pub keepalives: Counter,
    /// What went to and came from each peer.
    pub by_peer: ByPeer,
    /// When the worker last began a turn, on the monotonic clock, 0 before the first: others see by
    /// it that it neither hangs nor starves. In no total.
    pub last_turn_ns: Counter,
}

impl WorkerStats {
    /// Counts `packets` to a peer that could not be sent for `reason`. A full buffer is no peer's
    /// own, so the peer's count leaves it out.
    pub fn drop_send(
        &self,
        reason: DropReason,
        packets: u64,
        peer: HostKey,
        dropped: DroppedPacket<'_>,
    ) {
        self.egress.drop_packet(reason, packets, dropped);
        if reason != DropReason::SendBufferFull {
            self.by_peer.failed(peer, packets);
        }
    }

    /// What the `workers` counted for `peer`.
    pub fn traffic<'a>(workers: impl IntoIterator<Item = &'a Self>, peer: HostKey) -> PeerTraffic {
        let mut total = PeerTraffic::default();
        workers.into_iter().for_each(|worker| worker.by_peer.add_to(&mut total, peer));
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_traffic_is_that_of_all_workers() {
        let worker = WorkerStats::default();
        let double = PeerTraffic {
            packets_sent: 2,
            bytes_sent: 4,
            packets_received: 6,
            bytes_received: 8,
            failed_sends: 10,
        };
        let peer = HostKey::of_index(1);
        worker.by_peer.sent(peer, 1, 2, false);
        worker.by_peer.received(peer, 3, 4, || Some(peer));
        worker.by_peer.failed(peer, 5);
        assert_eq!(WorkerStats::traffic([&worker, &worker], peer), double);
    }

    #[test]
    fn a_full_buffer_is_no_peers_own_fault() {
        let (worker, peer) = (WorkerStats::default(), HostKey::of_index(1));
        let dropped = DroppedPacket { now_ns: 1, peer: None, packet: &[] };
        worker.drop_send(DropReason::SendBufferFull, 5, peer, dropped);
        worker.drop_send(DropReason::SendForbidden, 2, peer, dropped);
        assert_eq!(worker.egress.drops_total(), 7);
        assert_eq!(WorkerStats::traffic([&worker], peer).failed_sends, 2);
    }

    #[test]
    fn drop_reasons_share_no_slot_or_id() {
        let stats = DirectionStats::default();
        for (count, reason) in (1..).zip(DropReason::ALL) {
            stats.drop(*reason, count);
        }
        for (count, reason) in (1..).zip(DropReason::ALL) {
            assert_eq!(stats.drops(*reason), count, "{} shares its counter", reason.id());
        }
        let ids: std::collections::BTreeSet<_> = DropReason::ALL.iter().map(|r| r.id()).collect();
        assert_eq!(ids.len(), DROP_REASONS, "two reasons share an id");
    }
}

// SPDX-License-Identifier: Apache-2.0
//
// The udp backend's packets, carried by the kernel in the context of whoever sends them.
//
//   out  tc egress of the TUN device: encapsulates, sends by the underlay device
//   in   tc ingress of the underlay device: decapsulates, delivers on the TUN device
//   gro  tc ingress of the second end of a veth pair, whose GRO has merged the TCP packets that
//        `in` sent into the first end: delivers on the TUN device
//
// A program takes a packet only if the workers would send or deliver it (src/forward/decide.rs)
// with the same bytes. Whatever it leaves alone (TC_ACT_UNSPEC) goes to the TUN queue or to the UDP
// socket, and so to a worker, which decides, answers with ICMP and counts. Nothing is changed before
// the last check that can fail; what fails later is dropped.
//
// Packets are read and written by helpers, not by pointers: kernels without efficient unaligned
// access refuse pointers (user-mode Linux), and no fragment of a packet has to be moved.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <stddef.h>

// Bytes before the IPv4 header where `out` runs: none on a TUN device. BPF_PROG_TEST_RUN knows
// Ethernet frames only, so the tests compile this file for 14 as well.
#ifndef LINK_BYTES
#define LINK_BYTES 0
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define SECTION(name) __attribute__((section(name), used))

static void *(*lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*boot_ns)(void) = (void *)BPF_FUNC_ktime_get_boot_ns;
static __u32 (*processor)(void) = (void *)BPF_FUNC_get_smp_processor_id;
static long (*load)(const struct __sk_buff *, __u32 at, void *to, __u32 bytes) =
    (void *)BPF_FUNC_skb_load_bytes;
static long (*store)(struct __sk_buff *, __u32 at, const void *from, __u32 bytes, __u64 flags) =
    (void *)BPF_FUNC_skb_store_bytes;
static long (*adjust_room)(struct __sk_buff *, __s32 bytes, __u32 mode, __u64 flags) =
    (void *)BPF_FUNC_skb_adjust_room;
static long (*change_head)(struct __sk_buff *, __u32 bytes, __u64 flags) =
    (void *)BPF_FUNC_skb_change_head;
static long (*change_type)(struct __sk_buff *, __u32 type) = (void *)BPF_FUNC_skb_change_type;
static long (*checksum_level)(struct __sk_buff *, __u64 how) = (void *)BPF_FUNC_csum_level;
static long (*redirect)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect;

#define BIG_ENDIAN_16(value) ((__u16)__builtin_bswap16(value))
#define BIG_ENDIAN_32(value) ((__u32)__builtin_bswap32(value))
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the instructions are for little-endian processors"
#endif

#define IPV4 BIG_ENDIAN_16(ETH_P_IP)
#define ICMP 1
#define TCP 6
#define UDP 17
#define IP_BYTES 20
#define UDP_BYTES 8
// Outer IPv4 and UDP.
#define OUTER_BYTES (IP_BYTES + UDP_BYTES)
#define DONT_FRAGMENT BIG_ENDIAN_16(0x4000)
// The reserved bit, More Fragments and the offset.
#define FRAGMENT_BITS BIG_ENDIAN_16(0xbfff)
#define ECN_BITS 3
// Hops that the Linux IP stack gives a packet of its own.
#define OUTER_TTL 64
#define PACKET_FOR_US 0
#define TOTAL_BYTES_MAX 65535

// Lengths of prefix among the leases of one network; nearly always there is one.
#define LENGTHS_MAX 4
#define PEERS_MAX 16384

// What the control plane publishes. Addresses, masks and the port are in network byte order.
// src/fast_path/layout.rs has the same structures.
struct settings {
    __u64 until_ns; // on the boot clock; from then on nothing is taken
    __u64 streams_until_ns; // from then on streams are taken as well: there may be no worker
    __u32 subnet, subnet_mask;
    __u32 tun_address, underlay_address;
    __u32 masks[LENGTHS_MAX]; // of the leases, longest first; 0 ends the list
    __u32 underlay_device, tun_device;
    __u32 gro_device; // 0: `in` delivers directly
    __u16 port, mtu_bytes;
    __u8 hardware_address[ETH_ALEN]; // of the underlay device
    __u16 unused;
};

struct prefix {
    __u32 mask, network;
};

struct peer {
    __u32 address, subnet; // of its tunnel; of its lease, which is its TUN device's address, too
    __u32 number;          // of its counts
    __u16 flags;
    __u8 hardware_address[ETH_ALEN]; // of the next hop
};

#define PEER_SEND 1    // takes UDP checksum 0, and the next hop is known
#define PEER_RECEIVE 2 // may be received from

// Packets and bytes as pods see them: of super-packets, what they stand for. One cache line a
// direction.
struct counts {
    __u64 sent_packets, sent_bytes, sent_long, sent_unused[5];
    // Of long packets: how many, and in how many buffers, to see whether GRO has been at work.
    __u64 received_packets, received_bytes, received_long, received_buffers, received_unused[4];
};

// As in src/stats/long_sends.rs.
#define LONG_BYTES 512

// Small datagrams from one address to another that come faster than so many in so long are a
// stream. Workers send many of them at once, and so at a fraction of what each costs here. By
// addresses, for a fragment has no ports.
#define STREAM_PACKETS 64
#define STREAM_WINDOW_NS 1000000
// The workers carry a stream until it has paused for so long: by then they have sent all of it, and
// what follows here overtakes nothing, unless they wait longer than that for a processor.
#define STREAM_PAUSE_NS 100000000
// Addresses whose hashes agree so far are counted together.
#define STREAMS_MAX 4096

struct stream {
    __u64 at_ns; // when its window began; of a stream, when its last packet came
    __u32 packets, unused;
};

struct map {
    __u32 type, key_bytes, value_bytes, entries, flags;
};

struct map settings_map SECTION("maps") = {
    BPF_MAP_TYPE_ARRAY, sizeof(__u32), sizeof(struct settings), 1, 0,
};
struct map peers_map SECTION("maps") = {
    BPF_MAP_TYPE_HASH, sizeof(struct prefix), sizeof(struct peer), PEERS_MAX, BPF_F_NO_PREALLOC,
};
struct map counts_map SECTION("maps") = {
    BPF_MAP_TYPE_ARRAY, sizeof(__u32), sizeof(struct counts), PEERS_MAX, BPF_F_MMAPABLE,
};

struct map streams_map SECTION("maps") = {
    BPF_MAP_TYPE_ARRAY, sizeof(__u32), sizeof(struct stream), STREAMS_MAX, 0,
};

struct ip {
    __u8 version_and_length, tos;
    __u16 total_bytes, id, fragment;
    __u8 ttl, protocol;
    __u16 checksum;
    __u32 source, destination;
};

struct udp {
    __u16 source, destination, bytes, checksum;
};

struct outer {
    struct ip ip;
    struct udp udp;
};

struct frame {
    __u8 destination[ETH_ALEN], source[ETH_ALEN];
    __u16 protocol;
};

// The ones' complement sum of a header: 0xffff if its checksum is right.
ALWAYS __u32 sum(const struct ip *ip)
{
    const __u16 *halves = (const __u16 *)ip;
    __u32 total = 0;
#pragma unroll
    for (int i = 0; i < IP_BYTES / 2; i++)
        total += halves[i];
    total = (total & 0xffff) + (total >> 16);
    return (total & 0xffff) + (total >> 16);
}

// As `is_ordinary` in src/packet/address.rs.
ALWAYS int is_ordinary(__u32 address)
{
    __u32 first = address & 0xff;
    return first != 0 && first != 127 && first != 169 && first < 224;
}

// Whether a parsed header is one of those that workers send or deliver unless its addresses or its
// length forbid that: no options, no fragment, `hops` left and more.
ALWAYS int is_plain(const struct ip *ip, __u8 hops)
{
    return ip->version_and_length == 0x45 && !(ip->fragment & FRAGMENT_BITS) && ip->ttl > hops &&
           sum(ip) == 0xffff && is_ordinary(ip->source) && is_ordinary(ip->destination);
}

// One hop less (RFC 1624).
ALWAYS void forward(struct ip *ip)
{
    __u32 checksum = ip->checksum + 1; // 0x0100 in network byte order
    ip->ttl--;
    ip->checksum = checksum + (checksum >= 0xffff);
}

ALWAYS const struct settings *settings_now(void)
{
    __u32 only = 0;
    return lookup(&settings_map, &only);
}

// Whether a packet that counts as so many belongs to a stream, which keeps its way whatever the
// length of its packets. Processors may count one flow at once, which costs a count and no more.
ALWAYS int is_of_stream(const struct ip *ip, __u64 now_ns, __u32 packets)
{
    __u32 slot = (ip->source ^ BIG_ENDIAN_32(ip->destination)) * 0x9e3779b1 >> 20;
    struct stream *stream = lookup(&streams_map, &slot);
    if (!stream)
        return 0;
    __s64 since_ns = now_ns - stream->at_ns;
    if (stream->packets > STREAM_PACKETS) {
        stream->at_ns = now_ns;
        if (since_ns < STREAM_PAUSE_NS)
            return 1;
        stream->packets = 0;
    } else if (since_ns > STREAM_WINDOW_NS) {
        stream->at_ns = now_ns;
        stream->packets = 0;
    }
    stream->packets += packets;
    return stream->packets > STREAM_PACKETS;
}

// The peer whose lease holds `address`, by the longest prefix.
ALWAYS const struct peer *peer_of(const struct settings *settings, __u32 address)
{
#pragma unroll
    for (int i = 0; i < LENGTHS_MAX; i++) {
        __u32 mask = settings->masks[i];
        struct prefix prefix = {mask, address & mask};
        if (!mask)
            return NULL;
        const struct peer *peer = lookup(&peers_map, &prefix);
        if (peer)
            return peer;
    }
    return NULL;
}

// Bytes of the headers that each packet of a super-packet repeats: `at` is where its IPv4 header
// begins. 0 if it is not TCP's: a super-packet that has left a tunnel keeps the kernel's mark of it
// (SKB_GSO_UDP_TUNNEL), for which the next device drops datagrams.
ALWAYS __u32 repeated_bytes(const struct __sk_buff *skb, const struct ip *ip, __u32 at)
{
    __u8 offset;
    if (ip->protocol != TCP || load(skb, at + IP_BYTES + 12, &offset, 1))
        return 0;
    return IP_BYTES + (offset >> 4) * 4;
}

// How many packets `total` bytes are.
ALWAYS __u32 packets_of(__u32 total, __u32 repeated, __u32 segment)
{
    return segment ? (total - repeated + segment - 1) / segment : 1;
}

SECTION("tc_out") int weft_out(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    struct ip ip;
    __u32 total = skb->len - LINK_BYTES, segment = skb->gso_size, largest = total, repeated = 0;

    __u64 now_ns = boot_ns();

    if (!settings || now_ns >= settings->until_ns || skb->protocol != IPV4 ||
        load(skb, LINK_BYTES, &ip, sizeof(ip)))
        return TC_ACT_UNSPEC;
    // What only workers send takes along what follows it, or each would overtake the other. TCP is
    // not fragmented. Of the others, only fast datagrams are known to gain from workers.
    if (ip.protocol != TCP && now_ns < settings->streams_until_ns) {
        int is_workers = segment || (ip.fragment & FRAGMENT_BITS) || total > settings->mtu_bytes;
        int is_small = ip.protocol == UDP && total <= LONG_BYTES;
        if (is_of_stream(&ip, now_ns, is_workers ? STREAM_PACKETS + 1 : is_small))
            return TC_ACT_UNSPEC;
    }
    // What is sent, the peer's program must take: a packet whose transport checksum is still left to
    // a device would reach a worker there as it is, where both hosts share a machine.
    if (!is_plain(&ip, 2) || BIG_ENDIAN_16(ip.total_bytes) != total ||
        total > TOTAL_BYTES_MAX - OUTER_BYTES)
        return TC_ACT_UNSPEC;
    // Our own tunnel packet, routed back into the tunnel.
    if (ip.source == settings->underlay_address && ip.protocol == UDP)
        return TC_ACT_UNSPEC;
    if (segment) {
        repeated = repeated_bytes(skb, &ip, LINK_BYTES);
        if (!repeated || repeated >= total)
            return TC_ACT_UNSPEC;
        largest = repeated + segment;
    }
    if (largest > settings->mtu_bytes)
        return TC_ACT_UNSPEC;
    const struct peer *peer = peer_of(settings, ip.destination);
    if (!peer || !(peer->flags & PEER_SEND) || ip.destination == peer->subnet)
        return TC_ACT_UNSPEC;
    __u32 number = peer->number;
    struct counts *counts = lookup(&counts_map, &number);
    if (!counts)
        return TC_ACT_UNSPEC;

    struct outer outer = {
        .ip = {.version_and_length = 0x45,
               .total_bytes = BIG_ENDIAN_16(total + OUTER_BYTES),
               .fragment = DONT_FRAGMENT,
               .ttl = OUTER_TTL,
               .protocol = UDP,
               .source = settings->underlay_address,
               .destination = peer->address},
        .udp = {.source = settings->port,
                .destination = settings->port,
                .bytes = BIG_ENDIAN_16(total + UDP_BYTES)},
    };
    outer.ip.checksum = ~sum(&outer.ip);
    struct frame frame = {.protocol = IPV4};
    __builtin_memcpy(frame.destination, peer->hardware_address, ETH_ALEN);
    __builtin_memcpy(frame.source, settings->hardware_address, ETH_ALEN);
    // Refused for packets that are in a tunnel already, and for super-packets of other kinds.
    if (adjust_room(skb, OUTER_BYTES, BPF_ADJ_ROOM_MAC,
                    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
                        BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET))
        return TC_ACT_UNSPEC;
    forward(&ip);
    __u32 packets = packets_of(total, repeated, segment);
    __sync_fetch_and_add(&counts->sent_packets, packets);
    __sync_fetch_and_add(&counts->sent_bytes, total + (packets - 1) * repeated);
    // But for answers to a prober, as `mark_if_long` in src/engine/egress.rs has it.
    if (largest > LONG_BYTES && (ip.protocol != ICMP || ip.source != settings->tun_address))
        __sync_fetch_and_add(&counts->sent_long, packets);
    if (store(skb, LINK_BYTES, &outer, sizeof(outer), 0) ||
        store(skb, LINK_BYTES + OUTER_BYTES + offsetof(struct ip, ttl), &ip.ttl, 4, 0))
        return TC_ACT_SHOT;
    if ((LINK_BYTES == 0 && change_head(skb, ETH_HLEN, 0)) ||
        store(skb, 0, &frame, sizeof(frame), 0))
        return TC_ACT_SHOT;
    return redirect(settings->underlay_device, 0);
}

SECTION("tc_in") int weft_in(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    struct {
        struct outer outer;
        struct ip inner;
    } packet;
    const struct ip *ip = &packet.outer.ip;
    const struct udp *udp = &packet.outer.udp;
    struct ip *inner = &packet.inner;
    __u32 segment = skb->gso_size, repeated = 0;

    if (!settings || boot_ns() >= settings->until_ns || skb->protocol != IPV4 ||
        skb->pkt_type != PACKET_FOR_US || skb->vlan_present || load(skb, ETH_HLEN, &packet, sizeof(packet)))
        return TC_ACT_UNSPEC;
    // Ours, by senders that leave the checksum out: all others are merged by UDP_GRO and verified
    // by the socket. A marked ECN field is the workers' business, and so is another source port,
    // which a strict check refuses.
    if (ip->destination != settings->underlay_address || ip->protocol != UDP ||
        udp->destination != settings->port || udp->source != settings->port || udp->checksum ||
        (ip->tos & ECN_BITS))
        return TC_ACT_UNSPEC;
    __u32 outer_total = BIG_ENDIAN_16(ip->total_bytes), total = outer_total - OUTER_BYTES;
    if (ip->version_and_length != 0x45 || (ip->fragment & FRAGMENT_BITS) || ip->ttl == 0 ||
        sum(ip) != 0xffff)
        return TC_ACT_UNSPEC;
    if (outer_total + ETH_HLEN != skb->len || BIG_ENDIAN_16(udp->bytes) != total + UDP_BYTES ||
        BIG_ENDIAN_16(inner->total_bytes) != total)
        return TC_ACT_UNSPEC;
    __u32 subnet = settings->subnet, mask = settings->subnet_mask;
    if (!is_plain(inner, 1) || (inner->destination & mask) != subnet ||
        inner->destination == settings->tun_address ||
        inner->destination == settings->underlay_address || (inner->source & mask) == subnet ||
        inner->source == settings->tun_address || inner->source == settings->underlay_address)
        return TC_ACT_UNSPEC;
    if (segment) {
        repeated = repeated_bytes(skb, inner, ETH_HLEN + OUTER_BYTES);
        if (!repeated || repeated >= total)
            return TC_ACT_UNSPEC;
    }
    const struct peer *peer = peer_of(settings, inner->source);
    if (!peer || !(peer->flags & PEER_RECEIVE) || peer->address != ip->source)
        return TC_ACT_UNSPEC;
    __u32 number = peer->number;
    struct counts *counts = lookup(&counts_map, &number);
    if (!counts)
        return TC_ACT_UNSPEC;

    if (adjust_room(skb, -OUTER_BYTES, BPF_ADJ_ROOM_MAC,
                    BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET))
        return TC_ACT_UNSPEC;
    forward(inner);
    __u32 packets = packets_of(total, repeated, segment);
    __sync_fetch_and_add(&counts->received_packets, packets);
    __sync_fetch_and_add(&counts->received_bytes, total + (packets - 1) * repeated);
    if (total > LONG_BYTES) {
        __sync_fetch_and_add(&counts->received_long, packets);
        __sync_fetch_and_add(&counts->received_buffers, 1);
    }
    if (store(skb, ETH_HLEN + offsetof(struct ip, ttl), &inner->ttl, 4, 0))
        return TC_ACT_SHOT;
    checksum_level(skb, BPF_CSUM_LEVEL_DEC);
    // Only TCP is merged, so nothing else has to wait for that.
    if (settings->gro_device && inner->protocol == TCP) {
        // A queue for each processor: a flow's packets must not change queues.
        skb->queue_mapping = processor() + 1;
        return redirect(settings->gro_device, 0);
    }
    return redirect(settings->tun_device, BPF_F_INGRESS);
}

SECTION("tc_gro") int weft_gro(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    // Whatever else the host sends into a device that is up.
    if (!settings || skb->protocol != IPV4)
        return TC_ACT_SHOT;
    // Its link header is still the underlay's.
    change_type(skb, PACKET_FOR_US);
    return redirect(settings->tun_device, BPF_F_INGRESS);
}

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

// Bytes before the IP header where `out` runs: none on a TUN device. BPF_PROG_TEST_RUN knows
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
#define IPV6 BIG_ENDIAN_16(ETH_P_IPV6)
#define ICMP 1
#define TCP 6
#define UDP 17
#define IP_BYTES 20
#define IPV6_BYTES 40
#define IPV6_WORDS 4
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
// What is left behind the outer header is IPv6: since kernel 6.3, refused before.
#define LEAVES_IPV6 (1ULL << 8)
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
    __u32 subnet_v6[IPV6_WORDS], subnet_v6_mask[IPV6_WORDS]; // 0: no packet of IPv6 is taken
    __u32 masks_v6[LENGTHS_MAX][IPV6_WORDS];
};

struct prefix {
    __u32 mask, network;
};

struct prefix_v6 {
    __u32 mask[IPV6_WORDS], network[IPV6_WORDS];
};

struct peer {
    // Of its tunnel; of its IPv4 lease, which is its TUN device's address, too.
    __u32 address, subnet;
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

struct map peers_v6_map SECTION("maps") = {
    BPF_MAP_TYPE_HASH, sizeof(struct prefix_v6), sizeof(struct peer), PEERS_MAX, BPF_F_NO_PREALLOC,
};

struct ip {
    __u8 version_and_length, tos;
    __u16 total_bytes, id, fragment;
    __u8 ttl, protocol;
    __u16 checksum;
    __u32 source, destination;
};

struct ipv6 {
    __u8 version_and_class, class_and_flow;
    __u16 flow, payload_bytes;
    __u8 protocol, ttl; // next header and hop limit
    __u32 source[IPV6_WORDS], destination[IPV6_WORDS];
};

// Of a packet of either family, whose version is told by its first byte.
union inner {
    struct ip v4;
    struct ipv6 v6;
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

ALWAYS int is_ordinary_v6(const __u32 *address)
{
    __u32 first = address[0] & 0xff;
    return (first & 0xe0) == 0x20 || (first & 0xfe) == 0xfc;
}

// Whether another header of IPv6 follows before the transport's.
ALWAYS int is_extension(__u8 protocol)
{
    return protocol == 0 || protocol == 43 || protocol == 44 || protocol == 51 || protocol == 60;
}

// The same of IPv6; a datagram whose checksum is zero has none, and is the workers' to drop.
ALWAYS int is_plain_v6(const struct __sk_buff *skb, const struct ipv6 *ip, __u32 at, __u8 hops)
{
    __u16 checksum = 1;
    if (ip->version_and_class >> 4 != 6 || is_extension(ip->protocol) || ip->ttl <= hops ||
        !is_ordinary_v6(ip->source) || !is_ordinary_v6(ip->destination))
        return 0;
    if (ip->protocol == UDP &&
        load(skb, at + IPV6_BYTES + offsetof(struct udp, checksum), &checksum, sizeof(checksum)))
        return 0;
    return checksum != 0;
}

// One hop less (RFC 1624).
ALWAYS void forward(struct ip *ip)
{
    __u32 checksum = ip->checksum + 1; // 0x0100 in network byte order
    ip->ttl--;
    ip->checksum = checksum + (checksum >= 0xffff);
}

// Writes that of the packet whose IP header begins `at`.
ALWAYS long store_hop(struct __sk_buff *skb, __u32 at, union inner *inner, int is_v6)
{
    if (is_v6) {
        inner->v6.ttl--;
        return store(skb, at + offsetof(struct ipv6, ttl), &inner->v6.ttl, 1, 0);
    }
    forward(&inner->v4);
    return store(skb, at + offsetof(struct ip, ttl), &inner->v4.ttl, 4, 0);
}

ALWAYS const struct settings *settings_now(void)
{
    __u32 only = 0;
    return lookup(&settings_map, &only);
}

// Whether a packet that counts as so many belongs to a stream, which keeps its way whatever the
// length of its packets. Processors may count one flow at once, which costs a count and no more.
ALWAYS int is_of_stream(__u32 source, __u32 destination, __u64 now_ns, __u32 packets)
{
    __u32 slot = (source ^ BIG_ENDIAN_32(destination)) * 0x9e3779b1 >> 20;
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

// The same of IPv6; none where `address` is that of its TUN device, which is its lease's first.
ALWAYS const struct peer *peer_of_v6(const struct settings *settings, const __u32 *address)
{
#pragma unroll
    for (int i = 0; i < LENGTHS_MAX; i++) {
        struct prefix_v6 prefix;
        __u32 host = 0;
#pragma unroll
        for (int word = 0; word < IPV6_WORDS; word++) {
            prefix.mask[word] = settings->masks_v6[i][word];
            prefix.network[word] = address[word] & prefix.mask[word];
            host |= address[word] & ~prefix.mask[word];
        }
        if (!prefix.mask[0])
            return NULL;
        const struct peer *peer = lookup(&peers_v6_map, &prefix);
        if (peer)
            return host ? peer : NULL;
    }
    return NULL;
}

// Whether it is in this host's own lease, and perhaps its first address, the TUN device's.
ALWAYS int is_own_v6(const struct settings *settings, const __u32 *address, int *is_first)
{
    __u32 other = 0, host = 0;
#pragma unroll
    for (int word = 0; word < IPV6_WORDS; word++) {
        other |= (address[word] & settings->subnet_v6_mask[word]) ^ settings->subnet_v6[word];
        host |= address[word] & ~settings->subnet_v6_mask[word];
    }
    *is_first = !host;
    return !other;
}

ALWAYS __u32 folded(const __u32 *address)
{
    return address[0] ^ address[1] ^ address[2] ^ address[3];
}

// Bytes of the headers that each packet of a super-packet repeats: its IP header ends `at`, and has
// so many. 0 if it is not TCP's: a super-packet that has left a tunnel keeps the kernel's mark of it
// (SKB_GSO_UDP_TUNNEL), for which the next device drops datagrams.
ALWAYS __u32 repeated_bytes(const struct __sk_buff *skb, __u8 protocol, __u32 at, __u32 ip_bytes)
{
    __u8 offset;
    if (protocol != TCP || load(skb, at + 12, &offset, 1))
        return 0;
    return ip_bytes + (offset >> 4) * 4;
}

// How many packets `total` bytes are.
ALWAYS __u32 packets_of(__u32 total, __u32 repeated, __u32 segment)
{
    return segment ? (total - repeated + segment - 1) / segment : 1;
}

// What leaves, of a family that is known where this is compiled in.
ALWAYS int out(struct __sk_buff *skb, const struct settings *settings, __u64 now_ns, int is_v6)
{
    union inner inner;
    __u32 ip_bytes = is_v6 ? IPV6_BYTES : IP_BYTES;
    __u32 total = skb->len - LINK_BYTES, segment = skb->gso_size, largest = total, repeated = 0;

    if (load(skb, LINK_BYTES, &inner, ip_bytes))
        return TC_ACT_UNSPEC;
    struct ip *ip = &inner.v4;
    struct ipv6 *ipv6 = &inner.v6;
    __u8 protocol = is_v6 ? ipv6->protocol : ip->protocol;
    // What only workers send takes along what follows it, or each would overtake the other. TCP is
    // not fragmented. Of the others, only fast datagrams are known to gain from workers.
    if (protocol != TCP && now_ns < settings->streams_until_ns) {
        int is_part = is_v6 ? is_extension(protocol) : (ip->fragment & FRAGMENT_BITS) != 0;
        int is_workers = segment || is_part || total > settings->mtu_bytes;
        int is_small = protocol == UDP && total <= LONG_BYTES;
        __u32 source = is_v6 ? folded(ipv6->source) : ip->source;
        __u32 destination = is_v6 ? folded(ipv6->destination) : ip->destination;
        if (is_of_stream(source, destination, now_ns, is_workers ? STREAM_PACKETS + 1 : is_small))
            return TC_ACT_UNSPEC;
    }
    // What is sent, the peer's program must take: a packet whose transport checksum is still left to
    // a device would reach a worker there as it is, where both hosts share a machine.
    int is_plain_here = is_v6 ? is_plain_v6(skb, ipv6, LINK_BYTES, 2) : is_plain(ip, 2);
    __u32 said = is_v6 ? BIG_ENDIAN_16(ipv6->payload_bytes) + IPV6_BYTES
                       : BIG_ENDIAN_16(ip->total_bytes);
    if (!is_plain_here || said != total || total > TOTAL_BYTES_MAX - OUTER_BYTES)
        return TC_ACT_UNSPEC;
    // Our own tunnel packet, routed back into the tunnel.
    if (!is_v6 && ip->source == settings->underlay_address && protocol == UDP)
        return TC_ACT_UNSPEC;
    if (segment) {
        repeated = repeated_bytes(skb, protocol, LINK_BYTES + ip_bytes, ip_bytes);
        if (!repeated || repeated >= total)
            return TC_ACT_UNSPEC;
        largest = repeated + segment;
    }
    if (largest > settings->mtu_bytes)
        return TC_ACT_UNSPEC;
    const struct peer *peer =
        is_v6 ? peer_of_v6(settings, ipv6->destination) : peer_of(settings, ip->destination);
    if (!peer || !(peer->flags & PEER_SEND) || (!is_v6 && ip->destination == peer->subnet))
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
    __u32 packets = packets_of(total, repeated, segment);
    __sync_fetch_and_add(&counts->sent_packets, packets);
    __sync_fetch_and_add(&counts->sent_bytes, total + (packets - 1) * repeated);
    // But for answers to a prober, as `mark_if_long` in src/engine/egress.rs has it.
    int is_answer = !is_v6 && protocol == ICMP && ip->source == settings->tun_address;
    if (largest > LONG_BYTES && !is_answer)
        __sync_fetch_and_add(&counts->sent_long, packets);
    if (store(skb, LINK_BYTES, &outer, sizeof(outer), 0) ||
        store_hop(skb, LINK_BYTES + OUTER_BYTES, &inner, is_v6))
        return TC_ACT_SHOT;
    if ((LINK_BYTES == 0 && change_head(skb, ETH_HLEN, 0)) ||
        store(skb, 0, &frame, sizeof(frame), 0))
        return TC_ACT_SHOT;
    return redirect(settings->underlay_device, 0);
}

SECTION("tc_out") int weft_out(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    __u64 now_ns = boot_ns();
    if (!settings || now_ns >= settings->until_ns)
        return TC_ACT_UNSPEC;
    if (skb->protocol == IPV4)
        return out(skb, settings, now_ns, 0);
    if (skb->protocol == IPV6 && settings->subnet_v6_mask[0])
        return out(skb, settings, now_ns, 1);
    return TC_ACT_UNSPEC;
}

struct received {
    struct outer outer;
    union inner inner;
};

// What arrived, of a family that is known where this is compiled in.
ALWAYS int in(struct __sk_buff *skb, const struct settings *settings, struct received *packet,
              int is_v6)
{
    const struct ip *outer = &packet->outer.ip;
    struct ip *ip = &packet->inner.v4;
    struct ipv6 *ipv6 = &packet->inner.v6;
    const __u32 at = ETH_HLEN + OUTER_BYTES, ip_bytes = is_v6 ? IPV6_BYTES : IP_BYTES;
    __u32 total = BIG_ENDIAN_16(outer->total_bytes) - OUTER_BYTES;
    __u32 segment = skb->gso_size, repeated = 0;

    if (is_v6 && load(skb, at + IP_BYTES, (__u8 *)ipv6 + IP_BYTES, IPV6_BYTES - IP_BYTES))
        return TC_ACT_UNSPEC;
    __u8 protocol = is_v6 ? ipv6->protocol : ip->protocol;
    __u32 said = is_v6 ? BIG_ENDIAN_16(ipv6->payload_bytes) + IPV6_BYTES
                       : BIG_ENDIAN_16(ip->total_bytes);
    if (said != total || !(is_v6 ? is_plain_v6(skb, ipv6, at, 1) : is_plain(ip, 1)))
        return TC_ACT_UNSPEC;
    if (is_v6) {
        int is_tun, unused;
        if (!is_own_v6(settings, ipv6->destination, &is_tun) || is_tun ||
            is_own_v6(settings, ipv6->source, &unused))
            return TC_ACT_UNSPEC;
    } else {
        __u32 subnet = settings->subnet, mask = settings->subnet_mask;
        if ((ip->destination & mask) != subnet || ip->destination == settings->tun_address ||
            ip->destination == settings->underlay_address || (ip->source & mask) == subnet ||
            ip->source == settings->tun_address || ip->source == settings->underlay_address)
            return TC_ACT_UNSPEC;
    }
    if (segment) {
        repeated = repeated_bytes(skb, protocol, at + ip_bytes, ip_bytes);
        if (!repeated || repeated >= total)
            return TC_ACT_UNSPEC;
    }
    const struct peer *peer =
        is_v6 ? peer_of_v6(settings, ipv6->source) : peer_of(settings, ip->source);
    if (!peer || !(peer->flags & PEER_RECEIVE) || peer->address != outer->source)
        return TC_ACT_UNSPEC;
    __u32 number = peer->number;
    struct counts *counts = lookup(&counts_map, &number);
    if (!counts)
        return TC_ACT_UNSPEC;

    if (adjust_room(skb, -OUTER_BYTES, BPF_ADJ_ROOM_MAC,
                    BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET |
                        (is_v6 ? LEAVES_IPV6 : 0)))
        return TC_ACT_UNSPEC;
    __u32 packets = packets_of(total, repeated, segment);
    __sync_fetch_and_add(&counts->received_packets, packets);
    __sync_fetch_and_add(&counts->received_bytes, total + (packets - 1) * repeated);
    if (total > LONG_BYTES) {
        __sync_fetch_and_add(&counts->received_long, packets);
        __sync_fetch_and_add(&counts->received_buffers, 1);
    }
    if (store_hop(skb, ETH_HLEN, &packet->inner, is_v6))
        return TC_ACT_SHOT;
    // The link header is still the underlay's, and a device that merges goes by it.
    __u16 kind = IPV6;
    if (is_v6 && store(skb, offsetof(struct frame, protocol), &kind, sizeof(kind), 0))
        return TC_ACT_SHOT;
    checksum_level(skb, BPF_CSUM_LEVEL_DEC);
    // Only TCP is merged, so nothing else has to wait for that.
    if (settings->gro_device && protocol == TCP) {
        // A queue for each processor: a flow's packets must not change queues.
        skb->queue_mapping = processor() + 1;
        return redirect(settings->gro_device, 0);
    }
    return redirect(settings->tun_device, BPF_F_INGRESS);
}

SECTION("tc_in") int weft_in(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    struct received packet;
    const struct ip *ip = &packet.outer.ip;
    const struct udp *udp = &packet.outer.udp;

    if (!settings || boot_ns() >= settings->until_ns || skb->protocol != IPV4 ||
        skb->pkt_type != PACKET_FOR_US || skb->vlan_present ||
        load(skb, ETH_HLEN, &packet, OUTER_BYTES + IP_BYTES))
        return TC_ACT_UNSPEC;
    // Ours, by senders that leave the checksum out: all others are merged by UDP_GRO and verified
    // by the socket. A marked ECN field is the workers' business, and so is another source port,
    // which a strict check refuses.
    if (ip->destination != settings->underlay_address || ip->protocol != UDP ||
        udp->destination != settings->port || udp->source != settings->port || udp->checksum ||
        (ip->tos & ECN_BITS))
        return TC_ACT_UNSPEC;
    __u32 outer_total = BIG_ENDIAN_16(ip->total_bytes);
    if (ip->version_and_length != 0x45 || (ip->fragment & FRAGMENT_BITS) || ip->ttl == 0 ||
        sum(ip) != 0xffff)
        return TC_ACT_UNSPEC;
    if (outer_total + ETH_HLEN != skb->len || BIG_ENDIAN_16(udp->bytes) + IP_BYTES != outer_total)
        return TC_ACT_UNSPEC;
    if (packet.inner.v4.version_and_length >> 4 != 6)
        return in(skb, settings, &packet, 0);
    return settings->subnet_v6_mask[0] ? in(skb, settings, &packet, 1) : TC_ACT_UNSPEC;
}

SECTION("tc_gro") int weft_gro(struct __sk_buff *skb)
{
    const struct settings *settings = settings_now();
    // Whatever else the host sends into a device that is up.
    if (!settings || (skb->protocol != IPV4 && skb->protocol != IPV6))
        return TC_ACT_SHOT;
    // Its link header is still the underlay's.
    change_type(skb, PACKET_FOR_US);
    return redirect(settings->tun_device, BPF_F_INGRESS);
}

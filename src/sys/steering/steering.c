// SPDX-License-Identifier: Apache-2.0
//
// Which queue of the TUN device a packet of this host's pods goes to, in the context of whoever
// sends it. The kernel takes the result modulo the number of queues (TUNSETSTEERINGEBPF in
// drivers/net/tun.c), which is LANES for each worker: those of one worker lie side by side.
//
// Its first lane is for packets of those who send little, and is served first. Who sends more has one
// of the bulk lanes, by the source address, so that a pod fills one lane with whatever it sends.
//
// Loads beyond the packet's end give up, and the packet goes to the first queue.
#include <linux/bpf.h>

#define ALWAYS static inline __attribute__((always_inline))
#define SECTION(name) __attribute__((section(name), used))

// LANES in steering.rs.
#define LANES 4

static void *(*lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*boot_ns)(void) = (void *)BPF_FUNC_ktime_get_boot_ns;
__u64 load_word(void *skb, __u64 at) asm("llvm.bpf.load.word");
__u64 load_half(void *skb, __u64 at) asm("llvm.bpf.load.half");
__u64 load_byte(void *skb, __u64 at) asm("llvm.bpf.load.byte");

struct map {
    __u32 kind, key_bytes, value_bytes, entries, flags;
};

// When each sender will have paid for what it has sent: pairs of addresses and protocols, then
// sources. They share places by chance: one of 256 busy pairs meets a quiet one's in 1 % of cases.
#define PLACES 32768
struct map due_map SECTION("maps") = {BPF_MAP_TYPE_ARRAY, 4, 8, 2 * PLACES, 0};

// What a sender pays for a datagram, and by how much it may be behind. A pair has 250 datagrams a
// second and 32 at once: a conversation, a resolver's client, the beginning of a connection. A
// source has four times as much, so that nobody gains by many destinations.
#define MS 1000000LL
#define PAIR_NS (4 * MS)
#define SOURCE_NS (1 * MS)
#define CREDIT_NS (128 * MS)
// Who had more comes back to the first lane after so long a silence that a bulk lane can't hold its
// packets any more.
#define SILENCE_NS (2000 * MS)

// 2^32 over the golden ratio, odd: multiplied by it, each bit of the lower half reaches the upper
// one.
#define MIX 0x9e3779b1u

// A product's bits know nothing of the factor's higher ones, where a source port is: fold these
// down first. The upper half of the result.
ALWAYS __u32 spread(__u32 hash) {
    return ((hash ^ hash >> 16) * MIX) >> 16;
}

ALWAYS __u32 is_frugal(__u32 place, __u64 now, __u64 price) {
    __u64 *due = lookup(&due_map, &place);
    if (!due) return 0;
    __u64 at = (*due > now ? *due : now) + price;
    if (at > now + CREDIT_NS) {
        *due = now + CREDIT_NS + SILENCE_NS;
        return 0;
    }
    *due = at;
    return 1;
}

// Who sends a packet to whom: IPv6's addresses as hashes of 32 bits. Where the ports are, if the packet
// can't be one of a flow of which others have none.
struct parties {
    __u32 source, addresses, protocol, ports_at;
};

// Extension headers that are looked behind: more of them are rare, and go by what comes first.
#define EXTENSIONS 3
#define HOP_BY_HOP 0
#define ROUTING 43
#define FRAGMENT 44
#define AUTHENTICATION 51
#define DESTINATION 60

ALWAYS __u32 is_extension(__u32 protocol) {
    return protocol == HOP_BY_HOP || protocol == ROUTING || protocol == FRAGMENT ||
           protocol == AUTHENTICATION || protocol == DESTINATION;
}

ALWAYS __u32 long_address(struct __sk_buff *skb, __u32 at) {
    __u32 hash = (__u32)load_word(skb, at) * MIX ^ (__u32)load_word(skb, at + 4);
    hash = hash * MIX ^ (__u32)load_word(skb, at + 8);
    return hash * MIX ^ (__u32)load_word(skb, at + 12);
}

ALWAYS struct parties parties_of(struct __sk_buff *skb) {
    struct parties found = {};
    __u32 destination;
    if (load_byte(skb, 0) >> 4 == 6) {
        found.source = long_address(skb, 8);
        destination = long_address(skb, 24);
        __u32 next = load_byte(skb, 6), at = 40, is_fragment = 0;
#pragma unroll
        for (int number = 0; number < EXTENSIONS; number++) {
            if (!is_extension(next)) break;
            __u32 length = load_byte(skb, at + 1);
            __u32 bytes = next == FRAGMENT         ? 8
                          : next == AUTHENTICATION ? (length + 2) * 4
                                                   : (length + 1) * 8;
            is_fragment |= next == FRAGMENT;
            next = load_byte(skb, at);
            at += bytes;
        }
        found.protocol = next;
        found.ports_at = is_fragment ? 0 : at;
    } else {
        found.source = load_word(skb, 12);
        destination = load_word(skb, 16);
        found.protocol = load_byte(skb, 9);
        if ((load_half(skb, 6) & 0x7fff) == 0x4000)
            found.ports_at = (load_byte(skb, 0) & 0x0f) << 2;
    }
    found.addresses = found.source * MIX ^ destination;
    return found;
}

// A hash of a packet's addresses and, of a TCP packet that must not be fragmented, its ports.
// Later fragments have no ports, and other protocols mix datagrams that are fragmented with ones
// that fit: by ports they would part, and overtake each other. TCP sets Don't Fragment on all
// packets of a connection or on none, and over IPv6 it sends no fragments.
ALWAYS __u32 flow_of(struct __sk_buff *skb, struct parties of) {
    if (of.protocol != 6 || !of.ports_at) return spread(of.addresses);
    return spread(of.addresses * MIX ^ (__u32)load_word(skb, of.ports_at));
}

SECTION("flows") __u32 weft_flows(struct __sk_buff *skb) { return flow_of(skb, parties_of(skb)); }

SECTION("lanes") __u32 weft_lanes(struct __sk_buff *skb) {
    struct parties of = parties_of(skb);
    __u32 worker = flow_of(skb, of);
    // A super-packet counts for the datagrams in it, which may be tiny, and for its bytes.
    __u32 bytes = skb->len, segment_bytes = skb->gso_size;
    __u64 datagrams = 1 + (bytes >> 11) + (segment_bytes ? bytes / segment_bytes : 0);
    __u64 now = boot_ns();
    __u32 pair = spread(of.addresses + of.protocol) % PLACES, own = spread(of.source);
    __u32 lane = 0;
    if (!is_frugal(pair, now, datagrams * PAIR_NS) ||
        !is_frugal(PLACES + own % PLACES, now, datagrams * SOURCE_NS))
        lane = 1 + own % (LANES - 1);
    // The kernel takes 16 bits of it.
    return (worker >> 2) * LANES + lane;
}

# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # variables of scripts/bench, which sources this
# scripts/bench --soak: a long run at a rate that a plane carries, in which nothing may be lost
# and memory may not grow. Source it after bench-workloads.sh.

# Of the rate with at most 0.5 % loss, measured just before.
readonly SOAK_PERCENT=70
# A dataplane that allocates nothing after its start grows by no more than this, its log and its
# control plane included.
readonly SOAK_GROWTH_KB_MAX=1024

# run_soak: every plane on every link; the verdicts go to soak.ndjson and stdout.
run_soak() {
    local plane link
    : >"$out/soak.ndjson"
    for link in "${links[@]}"; do
        for plane in "${planes[@]}"; do
            LAB=${lab_of[$plane]} address=${server_of[$plane]}
            plane_pids=$(lab_daemons)
            raw=$out/raw/soak-$link-$plane
            lab_link "$link"
            soak_plane "$link" "$plane" || return 1
        done
    done
    jq -r '"\(.link) \(.plane): \(.offered) sent at \(.kpps * 10 | round / 10) thousand a second, "
        + "\(.lost) lost, \(.reordered) out of order; memory of host 1 and 2: "
        + ([.rss_kb_start, .rss_kb_end] | transpose
            | map("\(.[0]) to \(.[1]) KiB") | join(", "))
        + (if .lost == 0 then "" else "; dropped by the kernel: " + ([.lost_at | to_entries[]
            | "\(.value) \(.key | gsub("_"; " "))"] | join(", ")) end)' "$out/soak.ndjson"
    jq -se --argjson growth_max "$SOAK_GROWTH_KB_MAX" 'all(.[]; .lost == 0
        and all([.rss_kb_start, .rss_kb_end] | transpose[]; .[1] - .[0] <= $growth_max))' \
        "$out/soak.ndjson" >/dev/null ||
        die "packets were lost or memory grew; see $out/soak.ndjson"
}

# soak_plane LINK PLANE: finds the rate, then holds 70 % of it.
soak_plane() {
    local link=$1 plane=$2 rate before after drops
    say "soak: $link $plane: searching for the rate"
    workload_search --bytes 64 >"$raw-search.json" || return 1
    rate=$(jq ".pdr_kpps * 1000 * $SOAK_PERCENT / 100 | floor" "$raw-search.json")
    ((rate > 0)) || die "$plane carries nothing on $link; see $raw.json"
    soak_counters "$plane" "$raw-before"
    before=$(resident_kb) drops=$(drop_counters)
    say "soak: $link $plane: $rate datagrams of 64 B a second for $soak_s s"
    # At the priority of any pod: one that takes three quarters of a processor from whoever else
    # the scheduler put there, as in the search, starves the plane and the pod that counts.
    in_ns p1 "$TRAFFIC" flood --to "$address" --seconds "$soak_s" \
        --pps "$rate" --bytes 64 >"$raw-flood.json" || return 1
    after=$(resident_kb)
    soak_counters "$plane" "$raw-after"
    jq -c --arg link "$link" --arg plane "$plane" --argjson rate "$rate" \
        --argjson before "$before" --argjson after "$after" \
        --argjson drops "$drops" --argjson drops_after "$(drop_counters)" \
        '{$link, $plane, asked_pps: $rate, rss_kb_start: $before, rss_kb_end: $after} + .
        + {lost_at: ($drops_after | with_entries(.value -= $drops[.key]))}' \
        "$raw-flood.json" >>"$out/soak.ndjson"
}

# What the kernel has dropped so far at the places where a packet of a soak can be lost outside
# weftd, whose own counters are in the raw files.
drop_counters() {
    local device=0 backlog=0 line
    device=$(in_ns h1 ip -json -statistics link show dev flannel0 2>/dev/null |
        jq '.[0].stats64.tx.dropped') || true
    # Second column, hexadecimal, one line per processor (net/core/net-procfs.c).
    while read -ra line; do backlog=$((backlog + 16#${line[1]})); done </proc/net/softnet_stat
    jq -nc --argjson queue_of_tun "${device:-0}" --argjson backlog "$backlog" \
        --argjson tunnel_socket "$(socket_drops h2)" --argjson pod_socket "$(socket_drops p2)" \
        '$ARGS.named'
}

# Datagrams that found a socket's buffer full in that namespace.
socket_drops() { in_ns "$1" nstat -jasz UdpRcvbufErrors | jq .kernel.UdpRcvbufErrors; }

# Memory that each of the plane's processes holds, as a JSON list.
resident_kb() {
    local pid
    for pid in $plane_pids; do sed -n 's/^VmRSS:\s*\([0-9]*\) kB/\1/p' "/proc/$pid/status"; done |
        jq -sc .
}

# soak_counters PLANE PREFIX: weftd's counters on both hosts, to see by what a packet was lost.
soak_counters() {
    local end
    [[ $1 == weft* ]] || return 0
    for end in 1 2; do
        "$REPO/target/release/weft" metrics --socket "$out/planes/$1/h$end/weft.sock" \
            >"$2-h$end.txt" 2>&1 || true
    done
}

# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # variables of scripts/bench, which sources this
# The workloads of scripts/bench: each drives one tool through a plane and prints a sample as
# JSON. Source it after lab.sh.
#
# Set by the caller: LAB, seconds, raw (prefix of the files for a tool's own output), address (of
# the pod that serves), trial_s, own_priority, out (the folder of the run).

readonly WORKLOADS_TCP=tcp1,tcp4,tcp16,tcp-bidir
readonly WORKLOADS_UDP=udp64,udp512,udpmtu,udp64x16,udp512x16,udpmtux16
readonly WORKLOADS_ALL=$WORKLOADS_TCP,$WORKLOADS_UDP,rr,ping,ping-bulk,ping-busy,ndr64,ndrimix,restart
# What the promises of the report need.
readonly WORKLOADS_DEFAULT=tcp1,tcp4,udp64,rr,ping,ping-bulk,ping-busy,restart
# A measurement that takes this much longer than asked for has stalled.
readonly GRACE_S=15
# A search has about a dozen trials, each with its questions, and repeats those that failed.
readonly SEARCH_TRIALS_MAX=40
# How long the flow that pings run beside has to reach its speed.
readonly BULK_LEAD_S=0.5
readonly BULK_EXTRA_S=2
readonly WARM_UP_S=1
# Programs that never sleep, and how long the scheduler has to spread them. Pings beside them come
# at a rate that leaves their sender idle, or it would have to wait for its turn as they do.
readonly BUSY_PER_PROCESSOR=6 BUSY_LEAD_S=0.3
readonly BUSY_PINGS_PER_S=100 BUSY_INTERVAL_S=0.01
# As benches/traffic counts a ping that was not answered.
readonly LOST_PING_US=50000
readonly IP_UDP_BYTES=28
# What a restart disturbs: small datagrams at a rate that every plane carries without loss.
readonly RESTART_BYTES=64 RESTART_PER_S=10000
# 40 ticks of two CPUs: fine enough to tell 5 % from nothing.
readonly BACKGROUND_WINDOW_S=0.2
readonly QUIET_PERCENT_MAX=5
readonly TRAFFIC=$REPO/target/release/examples/traffic

# serve_pod DIR: what the workloads talk to in pod 2, as long as the plane is up.
serve_pod() {
    local address
    address=$(pod_address 2)
    spawn_in p2 "$1/sockperf-server.log" sockperf server -i "$address"
    spawn_in p2 "$1/traffic-server.log" "$TRAFFIC" serve --bind "$address"
    wait_until 5 "sockperf's server" udp_bound 11111
    wait_until 5 "the server of traffic; log: $1/traffic-server.log" udp_bound 11201
}

udp_bound() { [[ -n $(in_ns p2 ss -Huln "sport = :$1") ]]; }
iperf_listens() { [[ -n $(in_ns p2 ss -Htln 'sport = :5201') ]]; }
pod_mtu() { in_ns p1 ip -json link show dev eth0 | jq '.[0].mtu'; }

# run_workload WORKLOAD: prints its sample, which is empty or has nulls if it failed.
run_workload() {
    local bytes
    case $1 in
        tcp-bidir) workload_tcp_bidir ;;
        tcp*) workload_tcp "${1#tcp}" ;;
        udp*)
            bytes=${1#udp} bytes=${bytes%x*}
            [[ $bytes != mtu ]] || bytes=$(($(pod_mtu) - IP_UDP_BYTES))
            workload_udp "$bytes" "$([[ $1 == *x* ]] && echo "${1#*x}" || echo 1)"
            ;;
        rr) workload_rr ;;
        ping) traffic ping --to "$address" --seconds "$seconds" ;;
        ping-bulk) workload_ping_bulk ;;
        ping-busy) workload_ping_busy ;;
        ndr64) workload_search --bytes 64 ;;
        ndrimix) workload_search --imix "$(pod_mtu)" ;;
        restart) workload_restart ;;
    esac
}

# About how long one run takes, for the estimate at the start.
workload_seconds() {
    case $1 in
        ping-bulk) echo $((seconds + BULK_EXTRA_S + 2)) ;;
        ndr*) echo 20 ;;
        *) echo $((seconds + 2)) ;;
    esac
}

# iperf NAME ARGUMENTS...: one run against a fresh server, whose death ends no later run.
iperf() {
    local name=$1 server
    shift
    iperf_server "$name" || return 1
    metered in_ns p1 timeout $((seconds + GRACE_S)) iperf3 -J -c "$address" -t "$seconds" "$@" \
        >"$name.json" 2>"$name.err" || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}

# Starts one for one client; `server` is its process.
iperf_server() {
    spawn_in p2 "$1.server" iperf3 -s -1
    server=$SPAWNED
    wait_until 5 "iperf3's server" iperf_listens
}

# transfer_both_ways NAME: of which nothing is measured.
transfer_both_ways() {
    local server
    iperf_server "$1" || return 0
    in_ns p1 timeout $((WARM_UP_S + GRACE_S)) iperf3 -c "$address" -t "$WARM_UP_S" --bidir \
        >"$1.txt" 2>&1 || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}

# Since the pods were made: segments that the sender sent again; that the receiver queued out of
# order, which a loss causes too; and how often the sender saw that a segment was late and not lost.
retransmits() { in_ns p1 nstat -jasz TcpRetransSegs | jq .kernel.TcpRetransSegs; }
out_of_order() { in_ns p2 nstat -jasz TcpExtTCPOFOQueue | jq .kernel.TcpExtTCPOFOQueue; }
reorderings() {
    in_ns p1 nstat -jasz TcpExtTCPSACKReorder TcpExtTCPRenoReorder TcpExtTCPTSReorder |
        jq '.kernel | add'
}

workload_tcp() {
    local again queued reordered
    again=$(retransmits) queued=$(out_of_order) reordered=$(reorderings)
    iperf "$raw" -P "$1"
    again=$(($(retransmits) - again)) queued=$(($(out_of_order) - queued))
    reordered=$(($(reorderings) - reordered))
    jq -c --argjson again "$again" --argjson queued "$queued" --argjson reordered "$reordered" \
        --argjson cpu "$(metered_cpu)" '(.end.sum_received.bytes / 1e9) as $gb | {
        gbps: (.end.sum_received.bits_per_second / 1e9),
        slowest_interval_gbps: ([.intervals[].sum.bits_per_second] | min / 1e9),
        retransmits: $again, out_of_order: $queued, reordered: $reordered,
        retransmits_per_gb: ($again / $gb), out_of_order_per_gb: ($queued / $gb)}
        + ($cpu | map_values(. / $gb) | with_entries(.key += "_s_per_gb"))' "$raw.json"
}

workload_tcp_bidir() {
    iperf "$raw" --bidir
    jq -c --argjson cpu "$(metered_cpu)" '.end.sum_received as $there
        | .end.sum_received_bidir_reverse as $back | {
        gbps: (($there.bits_per_second + $back.bits_per_second) / 1e9),
        there_gbps: ($there.bits_per_second / 1e9), back_gbps: ($back.bits_per_second / 1e9),
        retransmits: (.end.sum_sent.retransmits + .end.sum_sent_bidir_reverse.retransmits)}
        + ($cpu | map_values(. / (($there.bytes + $back.bytes) / 1e9))
            | with_entries(.key += "_s_per_gb"))' "$raw.json"
}

# workload_udp BYTES FLOWS: as fast as one sender can.
workload_udp() {
    iperf "$raw" -u -l "$1" -P "$2" -b 0
    jq -c --argjson cpu "$(metered_cpu)" '
        ([.end.streams[].udp.out_of_order] | add) as $reordered
        | (.end.sum.packets - .end.sum.lost_packets) as $received | .end.sum | {
        kpps: ($received / .seconds / 1e3), lost_percent,
        offered_kpps: (.packets / .seconds / 1e3), $reordered}
        + ($cpu | map_values(. / ($received / 1e6)) | with_entries(.key += "_s_per_mpkt"))
        ' "$raw.json"
}

workload_rr() {
    in_ns p1 timeout $((seconds + GRACE_S)) sockperf ping-pong -i "$address" -m 64 \
        -t "$seconds" >"$raw.txt" 2>&1 || true
    jq -cRn '[inputs | capture("percentile (?<at>[0-9.]+) = +(?<us>[0-9.]+)")
        | {(.at | tonumber | tostring): (.us | tonumber)}] | add
        | {p50_us: .["50"], p99_us: .["99"]}' "$raw.txt"
}

# traffic ARGUMENTS...: our own client; its result is its sample.
traffic() {
    in_ns p1 timeout $((seconds + GRACE_S)) "$TRAFFIC" "$@" 2>"$raw.err" | tee "$raw.json"
}

# Pings while a TCP flow goes the way of the requests.
workload_ping_bulk() {
    local server client
    iperf_server "$raw-bulk" || return 1
    in_ns p1 timeout $((seconds + GRACE_S)) iperf3 -J -c "$address" \
        -t $((seconds + BULK_EXTRA_S)) >"$raw-bulk.json" 2>"$raw-bulk.err" &
    client=$!
    sleep "$BULK_LEAD_S"
    traffic ping --to "$address" --seconds "$seconds" >/dev/null || true
    wait "$client" || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    jq -c --slurpfile bulk "$raw-bulk.json" \
        '. + {bulk_gbps: ($bulk[0].end.sum_received.bits_per_second / 1e9)}' "$raw.json"
}

# Pings while other programs want every processor: whoever carries them has to get its turn. The
# programs are in the pod so that lab_down ends them whatever happens.
workload_ping_busy() {
    local program pings=$((seconds * BUSY_PINGS_PER_S)) programs=()
    for ((program = 0; program < BUSY_PER_PROCESSOR * $(nproc); program++)); do
        # Its own process, not a shell's that waits for it: it has to end with this workload.
        spawn_in p1 "$raw.busy" timeout $((2 * GRACE_S + seconds)) sh -c 'while :; do :; done'
        programs+=("$SPAWNED")
    done
    sleep "$BUSY_LEAD_S"
    # ping(8) is answered by the other pod's kernel and takes the time of arrival from its own, so
    # that no pod's turn is in the figure.
    in_ns p1 timeout $((seconds + GRACE_S)) ping -c "$pings" -W 1 \
        -i "$BUSY_INTERVAL_S" "$address" >"$raw.txt" 2>"$raw.err" || true
    kill "${programs[@]}" 2>/dev/null || true
    wait "${programs[@]}" 2>/dev/null || true
    jq -cRn --argjson pings "$pings" --argjson lost_us "$LOST_PING_US" '
        [inputs | capture("time=(?<ms>[0-9.]+) ms").ms | tonumber * 1e3 / 2] as $answered
        | ($pings - ($answered | length)) as $lost
        | ($answered + [range($lost) | $lost_us] | sort) as $all
        | def at($share): $all[($all | length - 1) * $share | round];
        select($answered != []) | {p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999),
            lost_pings: $lost}' "$raw.txt"
}

# Datagrams at a constant rate while the sender's host gets another weftd, or another process of
# what else carries them; the kernel's own planes have none to exchange.
workload_restart() {
    local server client
    iperf_server "$raw" || return 1
    in_ns p1 timeout $((seconds + GRACE_S)) iperf3 -J -c "$address" -t "$seconds" \
        -u -l "$RESTART_BYTES" -b $((RESTART_PER_S * RESTART_BYTES * 8)) \
        >"$raw.json" 2>"$raw.err" &
    client=$!
    sleep "$(jq -n "$seconds / 2")"
    restart_plane || return 1
    wait "$client" || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    jq -c '{restart_lost: .end.sum.lost_packets,
        restart_reordered: ([.end.streams[].udp.out_of_order] | add)}' "$raw.json"
}

# Exchanges what carries packets on host 1, by its own arguments.
restart_plane() {
    local daemon argv
    daemon=$(ip netns pids "$LAB-h1")
    [[ -n $daemon ]] || return 0
    mapfile -d '' -t argv <"/proc/$daemon/cmdline"
    case ${argv[0]} in
        */weftd)
            [[ " ${argv[*]} " == *" --take-over "* ]] || argv+=(--take-over)
            spawn_in h1 "$raw.weftd" "${argv[@]}"
            ;;
        *)
            kill "$daemon"
            wait_until 5 "the end of ${argv[0]}" lab_process_ended "$daemon"
            lab_proxy 1 "$(dirname "$raw")" "$(basename "${argv[0]}")"
            return
            ;;
    esac
    wait_until 10 "the end of the weftd that has handed over" lab_process_ended "$daemon"
}

# workload_search SIZES...: the trials stay in the raw file.
workload_search() {
    local limit
    limit=$(jq -n "($trial_s + 0.2) * $SEARCH_TRIALS_MAX | ceil")
    # The sender stands for a machine of its own: it must not wait for the plane's processes.
    in_ns p1 timeout "$limit" "${own_priority[@]}" "$TRAFFIC" search --to "$address" \
        --seconds "$trial_s" "$@" >"$raw.json" 2>"$raw.err" || return 1
    jq -c 'del(.trials)' "$raw.json"
}

# CPU time of all processors, and of the plane's processes, in ticks: busy is all but idle, I/O
# wait and what the hypervisor took (proc(5)).
busy_ticks() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8; exit }' /proc/stat; }
plane_ticks() {
    local pid
    # User and system time of all threads, behind the name, which may hold spaces.
    for pid in $plane_pids; do sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null || true; done |
        awk '{ sum += $12 + $13 } END { print sum + 0 }'
}

# metered COMMAND...: runs it; metered_cpu then tells what it cost.
metered() {
    local busy plane result=0
    busy=$(busy_ticks) plane=$(plane_ticks)
    "$@" || result=$?
    metered_busy=$(($(busy_ticks) - busy)) metered_plane=$(($(plane_ticks) - plane))
    return "$result"
}

# In seconds: of the machine, and of the plane's processes if it has any.
metered_cpu() {
    jq -nc --argjson ticks "$(getconf CLK_TCK)" --argjson busy "$metered_busy" \
        --argjson plane "$metered_plane" --arg pids "$plane_pids" \
        '{cpu: ($busy / $ticks)} + if $pids == "" then {} else {dataplane: ($plane / $ticks)} end'
}

# CPU time that a hypervisor gave to others, and all of it, in ticks (proc(5)).
stolen_ticks() {
    awk '/^cpu / { print $9, $2 + $3 + $4 + $5 + $6 + $7 + $8 + $9; exit }' /proc/stat
}

# steal_percent_since "STOLEN ALL": its share since then.
steal_percent_since() {
    awk -v before="$1" -v now="$(stolen_ticks)" 'BEGIN {
        split(before, b, " "); split(now, n, " "); all = n[2] - b[2]
        printf "%.1f", (all > 0 ? 100 * (n[1] - b[1]) / all : 0) }'
}

# Per cent of all CPU time that went to something else, in the moment before a measurement.
background_cpu_percent() {
    local before after
    read -ra before < <(sed 's/^cpu *//;q' /proc/stat)
    sleep "$BACKGROUND_WINDOW_S"
    read -ra after < <(sed 's/^cpu *//;q' /proc/stat)
    # user nice system idle iowait irq softirq steal (proc(5)); guest time is part of user.
    local index total=0 idle=0
    for index in 0 1 2 3 4 5 6 7; do total=$((total + after[index] - before[index])); done
    for index in 3 4; do idle=$((idle + after[index] - before[index])); done
    echo $((total > 0 ? 100 * (total - idle) / total : 0))
}

# Prints the same, after waiting for a quiet moment as long as --settle allows.
settled_background() {
    local limit=$((SECONDS + settle)) percent
    percent=$(background_cpu_percent)
    while ((percent > QUIET_PERCENT_MAX && SECONDS < limit)); do
        percent=$(background_cpu_percent)
    done
    echo "$percent"
}

# sent_by_plane PLANE: what its hosts sent so far, in packets, if it is the fast path.
sent_by_plane() {
    local end
    [[ $1 == weft-fast ]] || return 0
    for end in 1 2; do
        weft_status "$out/planes/$1" "$end" \
            '{kernel: .fast_path.packets_sent, workers: .egress.packets_forwarded}' || return 1
    done | jq -sc '{kernel: (map(.kernel) | add), workers: (map(.workers) | add)}'
}

# add_kernel_share PLANE SENT: the sample on stdin, with the kernel's share of what was sent since.
add_kernel_share() {
    local now
    now=$(sent_by_plane "$1") || return 1
    jq -c --argjson before "$2" --argjson now "$now" '($now.kernel - $before.kernel) as $kernel
        | ($now.workers - $before.workers) as $workers
        | . + {kernel_share: ($kernel / ($kernel + $workers))}'
}

# From samples to medians and quartiles, to promises kept or broken, and to where weft is behind.
# bench-markdown.jq prints what this computes.

# Metrics of one family share a unit, a table and a chart; `better` says which way.
def families: [
    {id: "tcp", better: "more", title: "TCP, Gb/s received"},
    {id: "tcp-repair", better: "less",
        title: "TCP segments sent again, and queued out of order by the receiver, per gigabyte"},
    {id: "udp", better: "more", title: "UDP sent as fast as it goes, thousands received a second"},
    {id: "latency", better: "less",
        title: "64 B ping-pong, idle, half the round trip in microseconds"},
    {id: "latency-bulk", better: "less",
        title: "64 B ping-pong beside a TCP flow, half the round trip in microseconds"},
    {id: "latency-busy", better: "less",
        title: "Ping beside 6 busy programs a processor, half the round trip in microseconds"},
    {id: "restart", better: "less",
        title: "Of 10,000 datagrams a second, lost and out of order when the sender's host restarts"},
    {id: "loss-free", better: "more",
        title: "Highest rate without loss (NDR) and with 0.5 % (PDR), thousands a second"},
    {id: "cpu-tcp", better: "less",
        title: "CPU seconds per gigabyte of the whole machine, and of the plane's processes"},
    {id: "cpu-udp", better: "less",
        title: "CPU seconds per million packets of the whole machine, and of the plane's processes"}
];

# One row per metric: its family, its workload, its field in a sample, its heading, decimals.
def metrics:
    def metric($name; $family; $workload; $field; $title; $decimals):
        {$name, $family, $workload, $field, $title, $decimals};
    def latency($name; $family; $workload; $title):
        metric("\($name)_p50"; $family; $workload; "p50_us"; "\($title) p50 us"; 1),
        metric("\($name)_p99"; $family; $workload; "p99_us"; "\($title) p99 us"; 1);
    def cpu($workload; $unit; $field; $per):
        metric("cpu_\($workload)"; "cpu-\($unit)"; $workload; "cpu_s_per_\($field)";
            "\($workload) CPU s/\($per)"; 2),
        metric("dataplane_\($workload)"; "cpu-\($unit)"; $workload; "dataplane_s_per_\($field)";
            "\($workload) plane's CPU s/\($per)"; 2);
    [
        (("tcp1", "tcp4", "tcp16") as $name
            | metric($name; "tcp"; $name; "gbps"; "\($name) Gb/s"; 2)),
        metric("tcp_bidir"; "tcp"; "tcp-bidir"; "gbps"; "both ways Gb/s"; 2),
        metric("tcp_bidir_there"; "tcp"; "tcp-bidir"; "there_gbps"; "both ways, there Gb/s"; 2),
        metric("tcp_bidir_back"; "tcp"; "tcp-bidir"; "back_gbps"; "both ways, back Gb/s"; 2),
        metric("tcp_beside_ping"; "tcp"; "ping-bulk"; "bulk_gbps"; "tcp1 beside pings Gb/s"; 2),
        (("tcp1", "tcp4", "tcp16") as $name
            | metric("retransmits_\($name)"; "tcp-repair"; $name; "retransmits_per_gb";
                "\($name) sent again /GB"; 1),
            metric("out_of_order_\($name)"; "tcp-repair"; $name; "out_of_order_per_gb";
                "\($name) out of order /GB"; 1)),
        (("udp64", "udp512", "udpmtu", "udp64x16", "udp512x16", "udpmtux16") as $name
            | metric($name; "udp"; $name; "kpps"; "\($name) kpps"; 0)),
        latency("rr"; "latency"; "rr"; "rr"),
        latency("ping"; "latency"; "ping"; "ping"),
        metric("ping_p999"; "latency"; "ping"; "p999_us"; "ping p99.9 us"; 1),
        latency("bulk"; "latency-bulk"; "ping-bulk"; "ping under bulk"),
        metric("bulk_p999"; "latency-bulk"; "ping-bulk"; "p999_us"; "ping under bulk p99.9 us"; 1),
        latency("busy"; "latency-busy"; "ping-busy"; "ping beside busy programs"),
        metric("restart_lost"; "restart"; "restart"; "restart_lost"; "lost"; 0),
        metric("restart_reordered"; "restart"; "restart"; "restart_reordered"; "out of order"; 0),
        (("64", "imix") as $mix | ("ndr", "pdr") as $rate | metric("\($rate)\($mix)"; "loss-free";
            "ndr\($mix)"; "\($rate)_kpps"; "\($rate | ascii_upcase) \($mix) kpps"; 0)),
        (("tcp1", "tcp4") as $name | cpu($name; "tcp"; "gb"; "GB")),
        (("udp64", "udpmtu") as $name | cpu($name; "udp"; "mpkt"; "Mpkt"))
    ];

# A promise: the median of weft as a multiple of the same median of `base` on that link.
def promise($metric; $link; $base; $relation; $target):
    {$metric, $link, $base, $relation, $target};

# What weft promises of its workers.
def promises:
    ("pass", "wire") as $link | (
        promise("tcp1"; $link; "one-packet"; ">="; 7),
        promise("tcp1"; $link; "vxlan"; ">="; if $link == "pass" then 0.38 else 0.9 end),
        promise("tcp4"; $link; "one-packet"; ">="; 7),
        (if $link == "wire" then promise("tcp4"; $link; "vxlan"; ">="; 0.9) else empty end),
        promise("udp64"; $link; "one-packet"; ">="; if $link == "pass" then 3 else 3.5 end),
        promise("udp64"; $link; "vxlan"; ">="; if $link == "pass" then 1.4 else 1.9 end),
        promise("ping_p50"; $link; "one-packet"; "<="; 0.9),
        promise("bulk_p99"; $link; "one-packet"; "<="; 0.5),
        promise("restart_lost"; $link; "vxlan"; "<="; 1));

# What weft promises of the kernel's fast path.
def fast_promises:
    ("pass", "wire") as $link | def vxlan($metric; $relation; $target):
        promise($metric; $link; "vxlan"; $relation; $target);
    (("tcp1", "tcp4") as $name | vxlan($name; ">="; if $link == "pass" then 0.95 else 1 end)),
    vxlan("udp64"; ">="; 1.1),
    promise("udp64"; $link; "weft"; ">="; 0.9),
    (("ping_p50", "ping_p99") as $name | vxlan($name; "<="; 1)),
    vxlan("bulk_p99"; "<="; 1.5),
    vxlan("restart_lost"; "<="; 1),
    (if $link == "pass" then vxlan("busy_p50"; "<="; 1.5) else empty end),
    (("cpu_tcp1", "cpu_tcp4") as $name | vxlan($name; "<="; 1.1)),
    (("retransmits", "out_of_order") as $name | ("tcp1", "tcp4") as $workload
        | vxlan("\($name)_\($workload)"; "<="; 1));

# Differences below this share are none.
def same_share: 0.02;

# Linear interpolation between the closest ranks.
def quantile($q):
    sort as $sorted | ((($sorted | length) - 1) * $q) as $rank | ($rank | floor) as $low
    | $sorted[$low] as $below | ($sorted[$low + 1] // $below) as $above
    | $below + ($above - $below) * ($rank - $low);

def spread:
    if . == [] then {n: 0}
    else {n: length, median: quantile(0.5), q1: quantile(0.25), q3: quantile(0.75)} end;

def unique_in_order: reduce .[] as $item ([]; if index([$item]) then . else . + [$item] end);

# Metrics of which a run has at least one figure.
def measured_metrics($samples):
    [metrics[] | . as $metric | select(any($samples[];
        .workload == $metric.workload and (.failed or .[$metric.field] != null)))];

def summarise($samples):
    measured_metrics($samples) as $metrics
    | ([$samples[].link] | unique_in_order[]) as $link
    | ([$samples[].plane] | unique_in_order[]) as $plane
    | [$samples[] | select(.link == $link and .plane == $plane)] as $own
    | {$link, $plane} + ($metrics | map(. as $metric
        | [$own[] | select(.workload == $metric.workload)] as $runs
        | {(.name): ([$runs[] | .[$metric.field] // empty] | spread
            | if .n == 0 and any($runs[]; .failed) then .failed = true else . end)}) | add)
    + {retransmits: ([$own[].retransmits // empty] | add),
       out_of_order: ([$own[].out_of_order // empty] | add),
       reordered: ([$own[].reordered // empty] | add),
       lost_pings: ([$own[].lost_pings // empty] | add),
       slowest_interval_gbps: ([$own[].slowest_interval_gbps // empty] | min),
       searches: ([$own[] | select(.workload | startswith("ndr"))] | length),
       sender_limited: ([$own[] | select(.sender_limited)] | length),
       failed: ([$own[] | select(.failed)] | length)};

# The spread of a metric of one plane on one link, or null.
def of($summary; $link; $plane; $metric):
    [$summary[] | select(.link == $link and .plane == $plane)] | first // {}
    | .[$metric] // {n: 0} | select(.n > 0) // null;

# Ratio of two spreads' medians, or null.
def over($base): if . == null or $base == null or $base.median == 0 then null
    else .median / $base.median end;

# Planes that answer for weft: those without a handicap.
def subjects($summary):
    [$summary[].plane | select(startswith("weft") and . != "weft-no-offload" and . != "weft-before")] | unique_in_order;
def is_fast: . == "weft-fast";

# Of a metric that may be 0, such as retransmits, there is no multiple, but a verdict.
def checked($summary; promises; $planes):
    [promises | . as $promise | select(any($summary[]; .link == $promise.link))
        | .planes = [$planes[] as $plane
        | of($summary; $promise.link; $plane; $promise.metric) as $own
        | of($summary; $promise.link; $promise.base; $promise.metric) as $base
        | ($own | over($base)) as $ratio
        | {$plane, $ratio, verdict: (
            if $own == null or $base == null then "not measured"
            elif (if $ratio == null then $promise.relation == ">=" or $own.median == 0
                elif $promise.relation == ">=" then $ratio >= $promise.target
                else $ratio <= $promise.target end) then "pass"
            else "FAIL" end)}]];

# Where a plane of weft is worse than a yardstick, whatever was promised. When the plane that
# chooses its engine by itself was measured, it speaks for those that are told which: it is what
# users get.
def behind($summary; $metrics):
    subjects($summary) as $subjects
    | (if $subjects | index("weft") then [$subjects[] | select(. == "weft" or is_fast)]
        else $subjects end) as $planes
    | [($summary | [.[].link] | unique_in_order[]) as $link | ("vxlan", "one-packet") as $base
        | $planes[] as $plane | $metrics[] as $metric
        | (families[] | select(.id == $metric.family) | .better) as $better
        | of($summary; $link; $plane; $metric.name) as $own
        | of($summary; $link; $base; $metric.name) as $yardstick
        | ($own | over($yardstick)) as $ratio
        | select($ratio != null and (if $better == "more" then $ratio < 1 - same_share
            else $ratio > 1 + same_share end))
        | {$link, $plane, $base, metric: $metric.name, title: $metric.title,
            decimals: $metric.decimals, own: $own.median, other: $yardstick.median, $ratio,
            overlap: ($own.q1 <= $yardstick.q3 and $yardstick.q1 <= $own.q3)}];

def results($machine; $samples):
    [summarise($samples)] as $summary | measured_metrics($samples) as $metrics
    | {$machine, families: [families[] | select(.id as $id | any($metrics[]; .family == $id))],
       $metrics, $summary,
       promises: checked($summary; promises; subjects($summary) | map(select(is_fast | not))),
       behind: behind($summary; $metrics),
       background_cpu_percent: ([$samples[].background_cpu_percent // empty] | spread), $samples}
    # Runs before 2026-11-26 did not ask.
    | if any($samples[]; .steal_percent)
      then .steal_percent = ([$samples[].steal_percent // empty] | spread)
          | .retakes = ([$samples[].retakes // 0] | add)
      else . end
    | if any($summary[]; .plane | is_fast)
      then .fast_promises = checked($summary; fast_promises; ["weft-fast"]) else . end;

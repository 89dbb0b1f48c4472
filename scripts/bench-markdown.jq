# results.json as Markdown: report.md, docs/performance.md and the few rows of the README.
include "bench-report";

# A number with its decimals, trailing zeros kept.
def fixed($decimals):
    if . == null then "-"
    elif $decimals == 0 then round | tostring
    else (. * pow(10; $decimals) | round) as $scaled | pow(10; $decimals) as $unit
        | ($scaled % $unit + $unit | tostring | .[1:]) as $fraction
        | "\($scaled / $unit | floor).\($fraction)" end;

def row: "| " + join(" | ") + " |";
def rule($columns): "|" + ("---|" * $columns);

# Of the packets that the hosts of the fast path's plane sent.
def kernel_share_line:
    [.samples[] | select(.kernel_share)] | if . == [] then empty else
        (map(.workload) | unique_in_order) as $workloads | . as $samples
        | "The kernel carried of weft-fast's packets, in the lowest of all rounds: "
            + ([$workloads[] as $workload | [$samples[] | select(.workload == $workload)
                    | .kernel_share] | "\($workload) \(min * 100 | fixed(1)) %"] | join(", "))
            + "." end;

def head:
    .machine as $machine
    | "\($machine.rounds) interleaved rounds of \($machine.seconds) s; median (quartiles)."
        + " \($machine.cpus) × \($machine.cpu), Linux \($machine.kernel),"
        + ($machine.congestion_control | if . then " TCP with \(.)," else "" end)
        + " commit \($machine.commit), \($machine.date).",
      ($machine.engines // {} | to_entries | select(. != [])
        | "Engines: " + (map("\(.key) ran \(.value)") | join(", ")) + "."),
      kernel_share_line,
      ($machine.left_out // [] | .[] | "Not measured: \(.plane), \(.why).");

# Figures from a machine that others were using are no basis for a claim.
def background_note:
    . as $run | .background_cpu_percent | if .n == 0 then empty else
        "CPU used by others just before each measurement: median \(.median | fixed(0)) %,"
        + " upper quartile \(.q3 | fixed(0)) %"
        + (if .q3 > 10 then " (**the machine was not quiet: do not quote these**)." else "." end)
    end,
    ($run.steal_percent | if . == null then empty else
        "Taken by the hypervisor during a measurement: median \(.median | fixed(1)) %, upper quartile"
        + " \(.q3 | fixed(1)) %; \($run.retakes) measurements were taken again for more than 5 %."
    end);

def cell($decimals):
    if .failed then "failed" elif .n == 0 then "-"
    else "\(.median | fixed($decimals)) (\(.q1 | fixed($decimals))–\(.q3 | fixed($decimals)))" end;

def median_table($rows; $metrics):
    (["plane"] + [$metrics[].title] | row),
    rule(1 + ($metrics | length)),
    ($rows[] | . as $it
        | [.plane] + [$metrics[] | . as $metric | $it[.name] | cell($metric.decimals)] | row);

# The yardsticks, with the letters that stand for them.
def yardsticks($rows):
    [{plane: "one-packet", letter: "P"}, {plane: "vxlan", letter: "V"},
        {plane: "straightforward", letter: "S"}]
    | map(select(.plane as $plane | any($rows[]; .plane == $plane)));

def ratio($rows; $metric; $base):
    . as $it | of($rows; $it.link; $it.plane; $metric.name)
    | over(of($rows; $it.link; $base; $metric.name)) | fixed(2);

def ratio_table($rows; $metrics):
    yardsticks($rows) as $yardsticks
    | if $yardsticks == [] then empty else
        ([$yardsticks[] | "\(.plane) (\(.letter))"] | join(", ")) as $names
        | "", "As multiples of \($names):", "",
        (["plane"] + [$metrics[] | (.title | sub(" (Gb/s|kpps|us|s/GB|s/Mpkt)$"; "")) as $name
            | $yardsticks[] | "\($name) ×\(.letter)"] | row),
        rule(1 + ($yardsticks | length) * ($metrics | length)),
        ($rows[] | . as $it | [.plane]
            + [$metrics[] as $metric | $yardsticks[] | .plane as $base
                | $it | ratio($rows; $metric; $base)] | row) end;

# What one sender can offer on this machine is no property of the plane.
def sender_note($rows):
    [$rows[] | select(.sender_limited > 0)
        | "\(.plane) \(.sender_limited) of \(.searches)"] | if . == [] then empty else
        "", "Searches in which the plane lost nothing of all that one sender could offer, so that"
            + " it may carry more: " + join(", ") + "." end;

def disorder_table($rows):
    (["plane", "TCP retransmits", "TCP queued out of order", "reordered, TCP and UDP",
        "TCP slowest second Gb/s", "lost pings", "failed runs"] | row),
    rule(7),
    ($rows[] | [.plane, (.retransmits | fixed(0)), (.out_of_order | fixed(0)),
        (.reordered | fixed(0)), (.slowest_interval_gbps | fixed(2)), (.lost_pings | fixed(0)),
        (.failed | tostring)] | row);

def promise_table($promises):
    ($promises[0].planes // [] | map(.plane)) as $planes
    | if $planes == [] then "No plane of weft was measured." else
        (["promise", "link", "target"] + $planes | row), rule(3 + ($planes | length)),
        ($promises[] | . as $promise
            | [(metrics[] | select(.name == $promise.metric) | .title), .link,
                "\(if .relation == ">=" then "≥" else "≤" end) \(.target) × \(.base)"]
            + [.planes[] | if .verdict == "not measured" then .verdict
                elif .ratio == null then "of 0: " + if .verdict == "FAIL" then "**FAIL**"
                    else .verdict end
                elif .verdict == "FAIL" then "\(.ratio | fixed(2)) **FAIL**"
                else "\(.ratio | fixed(2)) \(.verdict)" end]
            | row) end;

def behind_lines:
    if .behind == [] then "Nowhere in this run." else .behind[] | .decimals as $decimals
        | "- \(.link), \(.title): \(.plane) \(.own | fixed($decimals)), \(.base)"
        + " \(.other | fixed($decimals)) (\(.ratio | fixed(2)) ×"
        + (if .overlap then "; the quartiles overlap)" else ")" end) end;

def family_tables($rows; $ratios; $level):
    .families as $families | .metrics as $metrics | $families[] as $family
    | [$metrics[] | select(.family == $family.id)] as $own
    | "", "\($level) \($family.title) (\($family.better) is better)", "",
      median_table($rows; $own),
      (if $family.id == "loss-free" then sender_note($rows) else empty end),
      (if $ratios then ratio_table($rows; $own) else empty end);

def verdicts($level):
    "", "\($level) What was promised", "",
    "Medians as multiples of the yardstick's, same run, same link.",
    # A run of the fast path alone has nothing to say about the workers.
    (if .fast_promises and .promises[0].planes == [] then empty
     else "", promise_table(.promises) end),
    (if .fast_promises then "", promise_table(.fast_promises) else empty end),
    "", "\($level) Where weft is behind", "",
    "Every metric in which weft is more than 2 % worse than kernel VXLAN or than one packet per"
        + " call, promised or not.", "", behind_lines;

def markdown:
    . as $results | .summary as $summary
    | head, background_note, verdicts("###"),
      ([$summary[].link] | unique_in_order[] as $link
        | [$summary[] | select(.link == $link)] as $rows
        | "", "### Link: \($link)", ($results | family_tables($rows; true; "####")),
          "", "#### Disorder and loss", "",
          "Summed over all rounds; a loss also fills the out-of-order queue.", "",
          disorder_table($rows));

# The block of docs/performance.md for the record in `directory`, whose charts are named `charts`.
def performance($directory; $charts):
    . as $results | .summary as $summary
    | "Recorded in `\($directory)/` with",
      "`\(.machine.command)`.",
      "`pass`: the underlay carries super-packets whole, like a card with all offloads; `wire`: like a",
      "card without offloads. Pods, hosts and all processes share \(.machine.cpus) processors.", "",
      head, background_note, verdicts("###"),
      ([$summary[].link] | unique_in_order[] as $link
        | [$summary[] | select(.link == $link)] as $rows
        | "", "### Link: \($link)", ($results | family_tables($rows; false; "####"))),
      (if $charts == [] then empty else "", "### Charts", "",
        ($charts[] | "![\(. | rtrimstr(".svg"))](../\($directory)/\(.))") end);

# The README's rows: the metrics that decide whether to switch, in plain words.
def headlines: .metrics as $measured | [
    {name: "tcp1", title: "TCP, one flow, Gb/s", short: "TCP with one flow", decimals: 2},
    {name: "tcp4", title: "TCP, four flows, Gb/s", short: "TCP with four flows", decimals: 2},
    {name: "udp64", title: "UDP, 64-byte datagrams, thousand/s", short: "64-byte UDP",
        decimals: 0},
    {name: "ping_p50", title: "Latency, idle, median, µs", short: "latency when idle",
        decimals: 0},
    {name: "bulk_p99", title: "Latency beside a TCP flow, 99th percentile, µs",
        short: "latency beside a TCP flow", decimals: 0},
    {name: "busy_p50", title: "Latency beside 6 busy programs a processor, median, µs",
        short: "latency on busy processors", decimals: 0},
    {name: "cpu_tcp1", title: "CPU seconds per GB of TCP, whole machine", short: "CPU per GB of TCP",
        decimals: 2}
] | map(select(.name as $name | any($measured[]; .name == $name)));

# With the fast path in the run, a plane of the workers says what it is.
def plane_title($has_fast): {
    "one-packet": "one packet per call", "vxlan": "kernel VXLAN",
    "weft": (if $has_fast then "weft, workers" else "weft" end),
    "weft-mmsg": "weft, mmsg", "weft-io_uring": "weft, io_uring", "weft-fast": "weft, fast path"
}[.];

# The README's block. One figure per link in each cell.
def readme($directory; $charts):
    .machine as $machine | .summary as $summary | .behind as $behind
    | ([$summary[].link] | unique_in_order) as $links | headlines as $headlines
    | (.fast_promises != null) as $has_fast
    # One that chooses its engine stands for those that are told which.
    | ([$summary[].plane] | unique_in_order | map(select(plane_title($has_fast)))
        | if index("weft") then map(select(is_fast or (startswith("weft-") | not))) else . end)
        as $planes
    | "\($machine.cpus) × \($machine.cpu), Linux \($machine.kernel), \($machine.date[:10]), medians of"
        + " \($machine.rounds) runs;",
      "`\($directory)/`. Each cell: on a card that offloads segmentation / on one"
        + " that does not.", "",
      (["", ($planes[] | plane_title($has_fast))] | row), rule(1 + ($planes | length)),
      ($headlines[] as $metric | [$metric.title, ($planes[] as $plane
            | [$links[] as $link | of($summary; $link; $plane; $metric.name)
                | if . == null then "-" else .median | fixed($metric.decimals) end]
            | join(" / "))] | row),
      "",
      ([$headlines[] as $metric | [$links[] | . as $link | select(any($behind[];
            .base == "vxlan" and (.plane | is_fast) == $has_fast and .metric == $metric.name and .link == $link))]
        | select(. != []) | $metric.short + (if . == $links then "" else
                " (\(map({pass: "with offloads", wire: "without"}[.]) | join(", ")))" end)]
        | if . == [] then "In none of these rows is weft slower than kernel VXLAN."
          else "Worse than kernel VXLAN"
            + (if $has_fast then ", with the fast path: " else ": " end) + join("; ") + "." end);

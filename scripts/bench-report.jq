# From samples to medians and quartiles, and from those to Markdown.

# One row per metric: its workload, its field in a sample, its heading, decimals to print.
def metrics: [
    {name: "tcp1", workload: "tcp1", field: "gbps", title: "tcp1 Gb/s", decimals: 2},
    {name: "tcp4", workload: "tcp4", field: "gbps", title: "tcp4 Gb/s", decimals: 2},
    {name: "udp64", workload: "udp64", field: "kpps", title: "udp64 kpps", decimals: 0},
    {name: "rr_p50", workload: "rr", field: "p50_us", title: "rr p50 us", decimals: 1},
    {name: "rr_p99", workload: "rr", field: "p99_us", title: "rr p99 us", decimals: 1}
];

# A number with its decimals, trailing zeros kept.
def fixed($decimals):
    if . == null then "-"
    elif $decimals == 0 then round | tostring
    else (. * pow(10; $decimals) | round) as $scaled | pow(10; $decimals) as $unit
        | ($scaled % $unit + $unit | tostring | .[1:]) as $fraction
        | "\($scaled / $unit | floor).\($fraction)" end;

# Linear interpolation between the closest ranks.
def quantile($q):
    sort as $sorted | ((($sorted | length) - 1) * $q) as $rank | ($rank | floor) as $low
    | $sorted[$low] as $below | ($sorted[$low + 1] // $below) as $above
    | $below + ($above - $below) * ($rank - $low);

def spread:
    if . == [] then {n: 0}
    else {n: length, median: quantile(0.5), q1: quantile(0.25), q3: quantile(0.75)} end;

def unique_in_order: reduce .[] as $item ([]; if index([$item]) then . else . + [$item] end);

def summarise($samples):
    ([$samples[].link] | unique_in_order[]) as $link
    | ([$samples[].plane] | unique_in_order[]) as $plane
    | [$samples[] | select(.link == $link and .plane == $plane)] as $own
    | {$link, $plane} + (metrics | map(. as $metric | {(.name):
        [$own[] | select(.workload == $metric.workload) | .[$metric.field] // empty] | spread})
        | add)
    + {retransmits: ([$own[].retransmits // empty] | add),
       out_of_order: ([$own[].out_of_order // empty] | add),
       reordered: ([$own[].reordered // empty] | add),
       slowest_interval_gbps: ([$own[].slowest_interval_gbps // empty] | min),
       failed: ([$own[] | select(.failed)] | length)};

def results($machine; $samples): {
    $machine, summary: [summarise($samples)],
    background_cpu_percent: ([$samples[].background_cpu_percent // empty] | spread), $samples};

# Figures from a machine that others were using are no basis for a claim.
def background_note:
    .background_cpu_percent | if .n == 0 then empty else
        "CPU used by others just before each measurement: median \(.median | fixed(0)) %,"
        + " upper quartile \(.q3 | fixed(0)) %"
        + (if .q3 > 10 then " (**the machine was not quiet: do not quote these**)." else "." end)
    end;

def row: "| " + join(" | ") + " |";
def rule($columns): "|" + ("---|" * $columns);

def median_table($rows):
    (["plane"] + [metrics[].title] | row),
    rule(1 + (metrics | length)),
    ($rows[] | . as $it | [.plane] + [metrics[] | . as $metric | $it[.name]
        | if .n == 0 then "failed"
          else "\(.median | fixed($metric.decimals)) (\(.q1 | fixed($metric.decimals))–\(.q3 | fixed($metric.decimals)))"
          end] | row);

# Each median as a multiple of the same median of one-packet and of vxlan.
def ratio($rows; $metric; $base):
    .[$metric.name].median as $own
    | ([$rows[] | select(.plane == $base)] | first // {} | .[$metric.name].median?) as $yardstick
    | if $own == null or $yardstick == null then "-"
      else $own / $yardstick | fixed(2) end;

def ratio_table($rows):
    (["plane"] + [metrics[].title | split(" ") | .[:-1] | join(" ") | "\(.) ×P", "\(.) ×V"] | row),
    rule(1 + 2 * (metrics | length)),
    ($rows[] | . as $it | [.plane] + [metrics[] | . as $metric
        | ($it | ratio($rows; $metric; "one-packet")), ($it | ratio($rows; $metric; "vxlan"))]
        | row);

def disorder_table($rows):
    (["plane", "TCP retransmits", "TCP queued out of order", "reordered, TCP and UDP",
        "TCP slowest second Gb/s", "failed runs"] | row),
    rule(6),
    ($rows[] | [.plane, (.retransmits | fixed(0)), (.out_of_order | fixed(0)),
        (.reordered | fixed(0)),
        (.slowest_interval_gbps | fixed(2)), (.failed | tostring)] | row);

def markdown:
    .machine as $machine | .summary as $summary
    | "\($machine.rounds) interleaved rounds of \($machine.seconds) s; median (quartiles)."
        + " \($machine.cpus) × \($machine.cpu), Linux \($machine.kernel),"
        + " commit \($machine.commit), \($machine.date).",
      background_note,
      ([$summary[].link] | unique_in_order[] as $link
        | [$summary[] | select(.link == $link)] as $rows
        | "", "### Link: \($link)", "", median_table($rows),
          "", "As multiples of one-packet (P) and of kernel VXLAN (V):", "", ratio_table($rows),
          "", "Disorder and loss, summed over all rounds (a loss also fills the out-of-order queue):", "", disorder_table($rows));

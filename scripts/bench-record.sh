# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # variables of scripts/bench, which sources this
# What scripts/bench leaves behind: the description of the machine, the report and its charts,
# the record in the repository, its tables in the documents. Source it after common.sh.

readonly RECORDS=benches/record
# Compressed raw output above this stays out of the repository.
readonly RAW_BYTES_MAX=1000000

# describe_machine COMMAND: what the figures depend on.
describe_machine() {
    local commit
    commit=$(git -C "$REPO" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
    jq -n \
        --arg date "$(date --utc --iso-8601=seconds)" \
        --arg kernel "$(uname -r)" \
        --arg cpu "$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1)" \
        --argjson cpus "$(nproc)" \
        --arg congestion_control "$(sysctl -n net.ipv4.tcp_congestion_control)" \
        --arg load_average "$(cut -d ' ' -f 1-3 /proc/loadavg)" \
        --arg commit "$commit" \
        --arg rustc "$(cd "$REPO" && rustc --version)" \
        --arg iperf3 "$(iperf3 --version | head -n 1)" \
        --arg sockperf "$(sockperf --version | head -n 1)" \
        --arg sender_priority "${own_priority[*]}" \
        --argjson rounds "$rounds" --argjson seconds "$seconds" --arg command "$1" \
        '$ARGS.named'
}

# make_report DIR: results.json, report.md and the charts, from machine.json and samples.ndjson.
make_report() {
    local dir=$1
    jq -n --slurpfile machine "$dir/machine.json" --slurpfile samples "$dir/samples.ndjson" \
        -L "$REPO/scripts" 'include "bench-report"; results($machine[0]; $samples)' \
        >"$dir/results.json"
    jq -r -L "$REPO/scripts" 'include "bench-markdown"; markdown' "$dir/results.json" \
        >"$dir/report.md"
    rm -f "$dir"/*.svg
    "$REPO/target/release/examples/bench-charts" "$dir/results.json" "$dir"
}

# A dataplane's own counters belong to the raw data; a plane without them leaves none.
save_status() {
    local plane end dir
    for plane in "${planes[@]}"; do
        [[ $plane == weft* ]] || continue
        dir=$out/planes/$plane
        for end in 1 2; do
            "$REPO/target/release/weft" status --socket "$dir/h$end/weft.sock" \
                >"$dir/h$end/status.txt" 2>&1 || true
        done
    done
}

# record_engines MACHINE_JSON: which engine each plane of weft ran, as it says itself. That of the
# fast path's workers says nothing about it.
record_engines() {
    local plane engine described
    for plane in "${planes[@]}"; do
        [[ $plane != weft-fast ]] || continue
        engine=$(sed -n 's/^dataplane .*: engine \([a-z_]*\),.*/\1/p' \
            "$out/planes/$plane/h1/status.txt" 2>/dev/null) || continue
        described=$(jq --arg plane "$plane" --arg engine "$engine" \
            '.engines[$plane] = $engine' "$1")
        printf '%s\n' "$described" >"$1"
    done
}

# record_run DIR: copies a run to benches/record/DATE, in place of another one of that day.
record_run() {
    local dir=$1 record raw
    record=$REPO/$RECORDS/$(jq -r '.date[:10]' "$dir/machine.json")
    mkdir -p "$record"
    # What else was measured that day stays.
    rm -f "$record"/{machine.json,samples.ndjson,results.json,report.md,raw.tar.xz} "$record"/*.svg
    cp "$dir"/{machine.json,samples.ndjson,results.json,report.md} "$dir"/*.svg "$record/"
    raw=$(mktemp)
    # Without the daemons' logs, which name folders of this machine.
    tar -C "$dir" -cJf "$raw" raw
    if (($(stat -c %s "$raw") <= RAW_BYTES_MAX)); then
        cp "$raw" "$record/raw.tar.xz"
        chmod 644 "$record/raw.tar.xz"
    else
        say "bench: the raw output stays in $dir: too large for the repository"
    fi
    rm -f "$raw"
    publish_record "$record"
    say "bench: recorded in ${record#"$REPO/"}; README.md and docs/performance.md show it"
}

# record_block FILTER DIR: what FILTER of bench-markdown.jq makes of the record in DIR: readme, the
# README's few rows, or performance, all tables.
record_block() {
    local dir charts
    dir=$(cd "$2" && pwd)
    charts=$(cd "$dir" && shopt -s nullglob && jq -nc --args '$ARGS.positional' -- *.svg)
    jq -r -L "$REPO/scripts" --arg directory "${dir#"$REPO/"}" --argjson charts "$charts" \
        "include \"bench-markdown\"; $1(\$directory; \$charts)" "$dir/results.json"
}

# publish_record DIR: puts the record in DIR into README.md and docs/performance.md.
publish_record() {
    [[ -f $1/results.json ]] || die "--readme $1: there is no results.json"
    replace_block "$REPO/README.md" readme "$1"
    replace_block "$REPO/docs/performance.md" performance "$1"
}

# replace_block FILE FILTER DIR: writes the block between FILE's markers.
replace_block() {
    local block
    block=$(mktemp)
    record_block "$2" "$3" >"$block"
    sed -i -e "/<!-- bench:begin -->/,/<!-- bench:end -->/{
        /<!-- bench:begin -->/{p; r $block
        }
        /<!-- bench:end -->/p
        d
    }" "$1"
    rm -f "$block"
}

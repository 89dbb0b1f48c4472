# shellcheck shell=bash
# Container images without a registry and without a builder: tars as `docker save` writes them.
# Source it after common.sh; it only defines.

# cluster_images DIR OUT: into OUT the images of weft, of the test pods, and of the pause container.
cluster_images() {
    local dir=$1 out=$2
    mkdir -p "$out"
    weft_image "$dir" "$out"
    pod_image "$dir" "$out"
    pause_image "$dir" "$out"
    dns_image "$dir" "$out"
}

# layer ROOT FILE: the directory ROOT as a layer.
layer() {
    tar -C "$1" --sort=name --numeric-owner --owner=0 --group=0 --format=gnu \
        ${SOURCE_DATE_EPOCH:+--mtime=@"$SOURCE_DATE_EPOCH"} -cf "$2" .
}

# base_layer DIR NAME: the layer of the root DIR/NAME, kept for the next time; prints its path.
base_layer() {
    local file=$1/$2.tar
    if [[ ! -e $file ]]; then
        # A device is the runtime's business, and what was mounted here is not in there.
        tar -C "$1/$2" --numeric-owner --exclude='./dev/*' -cf "$file.part" .
        mv "$file.part" "$file"
    fi
    printf '%s\n' "$file"
}

# image FILE TAG CONFIG LAYER...: CONFIG is the JSON of how a container starts.
image() {
    local file=$1 tag=$2 config=$3 stage path sums=() names=() number=0
    shift 3
    stage=$(mktemp -d "$file.XXXXXX")
    for path in "$@"; do
        number=$((number + 1))
        cp --reflink=auto "$path" "$stage/$number.tar"
        sums+=("sha256:$(sha256sum <"$path" | cut -d ' ' -f 1)")
        names+=("$number.tar")
    done
    jq -n --argjson config "$config" '{ architecture: "amd64", os: "linux", config: $config,
        rootfs: { type: "layers", diff_ids: $ARGS.positional } }' --args "${sums[@]}" \
        >"$stage/config.json"
    jq -n --arg tag "$tag" '[{ Config: "config.json", RepoTags: [$tag],
        Layers: $ARGS.positional }]' --args "${names[@]}" >"$stage/manifest.json"
    tar -C "$stage" -cf "$file.part" manifest.json config.json "${names[@]}"
    mv "$file.part" "$file"
    rm -r "$stage"
}

# weft_image DIR OUT: the container file's second stage, on the root DIR/image.
weft_image() {
    local dir=$1 out=$2
    weft_layer "${CARGO_TARGET_DIR:-$REPO/target}/release" "$out/weft.layer"
    image "$out/weft.tar" "weft:$(weft_version)" "$(weft_config)" \
        "$(base_layer "$dir" image)" "$out/weft.layer"
    rm "$out/weft.layer"
}

# container_lines: the container file's second stage, each instruction in one line.
container_lines() {
    # shellcheck disable=SC2016 # the file's own variable
    sed -n '/^FROM ${DEBIAN}$/,$p' "$REPO/deploy/container/Dockerfile" | sed -z 's/ *\\\n */ /g'
}

# weft_layer BIN FILE: what that stage copies and links, with the programs in BIN.
weft_layer() {
    local bin=$1 file=$2 stage from to links
    stage=$(mktemp -d "$file.XXXXXX")
    chmod 755 "$stage"
    while read -r from to; do
        case $from in
            /weft/target/release/*) from=$bin/${from##*/} ;;
            *) from=$REPO/$from ;;
        esac
        install -D -m 755 "$(realpath "$from")" "$stage$to"
        [[ $from != "$bin"/* ]] || strip "$stage$to"
    done < <(container_lines | sed -nE 's/^COPY (--from=build )?//p')
    links=$(container_lines | sed -n 's/^RUN \(mkdir .*\)/\1/p')
    bash -euc "${links// \// $stage/}"
    layer "$stage" "$file"
    rm -r "$stage"
}

# weft_config: how a container of it starts, and its labels.
weft_config() {
    jq -n --arg env "$(container_lines | sed -n 's/^ENV //p')" \
        --argjson start "$(container_lines | sed -n 's/^ENTRYPOINT //p')" \
        --arg labels "$(container_lines | sed -n 's/^LABEL //p')" '{ Env: [$env],
        Entrypoint: $start, Labels: [$labels | scan("([^ =]+)=\"([^\"]*)\"")
            | { key: .[0], value: .[1] }] | from_entries }'
}

# pod_image DIR OUT: the root with the tools, and our own traffic.
pod_image() {
    local dir=$1 out=$2 stage
    stage=$(mktemp -d "$out/pod.XXXXXX")
    install -D -m 755 "$REPO/scripts/cluster-traffic.py" "$stage/usr/local/bin/traffic"
    layer "$stage" "$out/pod.layer"
    image "$out/pod.tar" pod:1 '{ "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "Cmd": ["traffic", "serve"] }' "$(base_layer "$dir" pod)" "$out/pod.layer"
    rm -r "$stage" "$out/pod.layer"
}

# program_image FILE TAG CONFIG PROGRAM [LAYER]: PROGRAM in /usr/local/bin, on LAYER.
program_image() {
    local file=$1 tag=$2 config=$3 program=$4 stage
    shift 4
    stage=$(mktemp -d "$file.XXXXXX")
    chmod 755 "$stage"
    install -D -m 755 -t "$stage/usr/local/bin" "$program"
    layer "$stage" "$file.layer"
    image "$file" "$tag" "$config" "$@" "$file.layer"
    rm -r "$stage" "$file.layer"
}

readonly PAUSE='{ "Entrypoint": ["/usr/local/bin/busybox", "sleep", "2147483647"] }'

pause_image() { program_image "$2/pause.tar" pause:1 "$PAUSE" "$1/node/bin/busybox"; }

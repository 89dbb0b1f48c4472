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
}

# layer ROOT FILE: the directory ROOT as a layer.
layer() {
    tar -C "$1" --numeric-owner --owner=0 --group=0 --xattrs -cf "$2" .
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

# weft_image DIR OUT: what the second stage of the container file says, line by line.
weft_image() {
    local dir=$1 out=$2 stage lines from to links
    stage=$(mktemp -d "$out/weft.XXXXXX")
    # shellcheck disable=SC2016 # the file's own variable
    lines=$(sed -n '/^FROM ${DEBIAN}$/,$p' "$REPO/deploy/container/Dockerfile")
    while read -r from to; do
        from=${from#/weft/}
        case $from in
            target/*) from=${CARGO_TARGET_DIR:-$REPO/target}/${from#target/} ;;
            *) from=$REPO/$from ;;
        esac
        install -D -m 755 "$(realpath "$from")" "$stage$to"
        [[ $from != */target/release/* ]] || strip "$stage$to"
    done < <(sed -nE 's/^COPY (--from=build )?//p' <<<"$lines")
    links=$(sed -n 's/^RUN \(ln .*\)/\1/p' <<<"$lines")
    bash -euc "${links// \// $stage/}"
    layer "$stage" "$out/weft.layer"
    image "$out/weft.tar" weft:0.1.0 "$(jq -n --arg env "$(sed -n 's/^ENV //p' <<<"$lines")" \
        --argjson start "$(sed -n 's/^ENTRYPOINT //p' <<<"$lines")" \
        '{ Env: [$env], Entrypoint: $start }')" "$(base_layer "$dir" image)" "$out/weft.layer"
    rm -r "$stage" "$out/weft.layer"
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

pause_image() {
    local dir=$1 out=$2 stage
    stage=$(mktemp -d "$out/pause.XXXXXX")
    install -D -m 755 "$dir/node/bin/busybox" "$stage/bin/busybox"
    layer "$stage" "$out/pause.layer"
    image "$out/pause.tar" pause:1 '{ "Cmd": ["/bin/busybox", "sleep", "2147483647"] }' \
        "$out/pause.layer"
    rm -r "$stage" "$out/pause.layer"
}

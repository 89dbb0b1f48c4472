# shellcheck shell=bash
# The container image of a release as an archive in OCI's layout, which is also one that `docker load`
# reads. Source it after common.sh, cluster-build.sh and cluster-images.sh; it only defines.

# release_image BIN SCRATCH ARCHITECTURE FILE: the container file's second stage with the programs in
# BIN, on a Debian made anew in SCRATCH.
release_image() {
    local bin=$1 scratch=$2 architecture=$3 file=$4
    local -a packages
    mkdir -p "$scratch/log"
    make_base "$scratch" "$SUITE"
    read -ra packages <<<"$(image_packages)"
    make_root "$scratch" "$SUITE" image "${packages[@]}"
    say "release: the image"
    plain_layer "$scratch/image" "$scratch/base.layer"
    weft_layer "$bin" "$scratch/weft.layer"
    oci_archive "$file" "weft:$(weft_version)" "$architecture" "$(weft_config)" \
        "$scratch/base.layer" "$scratch/weft.layer"
}

# plain_layer ROOT FILE: a Debian root without what is this machine's, or of the day on which it was
# made.
plain_layer() {
    local root=$1
    # The third field is the day of the last change.
    sed -i 's/^\([^:]*:[^:]*:\)[0-9]*:/\119700:/' "$root/etc/shadow"
    tar -C "$root" --sort=name --numeric-owner --format=gnu --mtime="@$SOURCE_DATE_EPOCH" \
        --clamp-mtime --exclude='./dev/*' --exclude='./run/*' --exclude='./tmp/*' \
        --exclude='./proc/*' --exclude='./sys/*' --exclude='./var/log/*' \
        --exclude='./var/cache/*/*' --exclude='./var/lib/apt/*/*' --exclude='./var/lib/dpkg/*-old' \
        --exclude='./etc/*-' --exclude='./etc/resolv.conf' --exclude='./etc/hostname' \
        --exclude='./etc/machine-id' --exclude='./usr/sbin/policy-rc.d' -cf "$2" .
}

# oci_archive FILE TAG ARCHITECTURE CONFIG LAYER...
oci_archive() {
    local file=$1 tag=$2 architecture=$3 config=$4 stage path blobs
    local sums=() layers=() digest
    shift 4
    stage=$(mktemp -d "$file.XXXXXX")
    blobs=$stage/blobs/sha256
    mkdir -p "$blobs"
    for path in "$@"; do
        sums+=("sha256:$(sha256sum <"$path" | cut -d ' ' -f 1)")
        gzip -9nc "$path" >"$stage/part"
        digest=$(keep_blob "$stage/part" "$blobs")
        layers+=("$(descriptor "$blobs" "$digest" application/vnd.oci.image.layer.v1.tar+gzip)")
    done
    jq -n --argjson config "$config" --arg architecture "$architecture" \
        --arg created "$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" \
        '{ created: $created, architecture: $architecture, os: "linux", config: $config,
           rootfs: { type: "layers", diff_ids: $ARGS.positional } }' --args "${sums[@]}" \
        >"$stage/part"
    digest=$(keep_blob "$stage/part" "$blobs")
    config=$(descriptor "$blobs" "$digest" application/vnd.oci.image.config.v1+json)
    jq -n --argjson config "$config" --argjson layers "$(jq -n '$ARGS.positional' \
        --jsonargs "${layers[@]}")" '{ schemaVersion: 2,
        mediaType: "application/vnd.oci.image.manifest.v1+json", config: $config,
        layers: $layers }' >"$stage/part"
    digest=$(keep_blob "$stage/part" "$blobs")
    # The names by which containerd and others find it.
    jq -n --argjson manifest "$(descriptor "$blobs" "$digest" \
        application/vnd.oci.image.manifest.v1+json)" --arg tag "$tag" \
        --arg architecture "$architecture" '{ schemaVersion: 2,
        mediaType: "application/vnd.oci.image.index.v1+json", manifests: [$manifest
        + { platform: { architecture: $architecture, os: "linux" }, annotations: {
            "io.containerd.image.name": "docker.io/library/\($tag)",
            "org.opencontainers.image.ref.name": ($tag | sub(".*:"; "")) } }] }' \
        >"$stage/index.json"
    printf '{"imageLayoutVersion":"1.0.0"}' >"$stage/oci-layout"
    jq -n --arg tag "$tag" --argjson config "$config" --argjson layers "$(jq -n \
        '$ARGS.positional' --jsonargs "${layers[@]}")" 'def path: "blobs/" + (.digest | sub(":"; "/"));
        [{ Config: ($config | path), RepoTags: [$tag], Layers: [$layers[] | path] }]' \
        >"$stage/manifest.json"
    layer_of_names "$stage" "$file"
    rm -r "$stage"
}

# keep_blob FILE BLOBS: moves FILE to where its sum says, which is printed.
keep_blob() {
    local sum
    sum=$(sha256sum <"$1" | cut -d ' ' -f 1)
    mv "$1" "$2/$sum"
    printf '%s\n' "$sum"
}

# descriptor BLOBS SUM TYPE
descriptor() {
    jq -n --arg sum "$2" --arg type "$3" --argjson size "$(stat --format %s "$1/$2")" \
        '{ mediaType: $type, digest: "sha256:\($sum)", size: $size }'
}

# layer_of_names STAGE FILE: the layout as one archive.
layer_of_names() {
    tar -C "$1" --sort=name --numeric-owner --owner=0 --group=0 --format=gnu \
        --mode=a+rX,u+w,go-w --mtime="@$SOURCE_DATE_EPOCH" \
        -cf "$2" oci-layout index.json manifest.json blobs
}

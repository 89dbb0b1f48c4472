# shellcheck shell=bash
# Whether what scripts/release has made is the same when it is made again, and what happens to who
# installs it. Source it after the other release-*.sh; it only defines.

# How long somebody waits from the package in a bare Debian to an answer through the tunnel.
readonly BARE_LIMIT_S=60

# check_release OUT SCRATCH ARM: ARM says whether arm64 is part of it, yes or no.
check_release() {
    local out=$1 scratch=$2 arm=$3 suite
    mkdir -p "$scratch/check"
    check_signing "$out" "$scratch/check"
    check_image "$out" "$scratch/check"
    for suite in bookworm trixie; do
        check_booted "$suite" "$out" "$scratch/check" "$scratch/tree"
    done
    check_bare "$out" "$scratch/check"
    check_again "$out" "$scratch/check" "$arm"
}

# check_signing OUT WORK: with a key that is thrown away, and only if there is no signature yet.
check_signing() {
    local out=$1 work=$2
    (cd "$out" && sha256sum --check --quiet SHA256SUMS) || die "SHA256SUMS"
    if [[ -e $out/SHA256SUMS.asc ]]; then
        gpg --batch --verify "$out/SHA256SUMS.asc" "$out/SHA256SUMS" >"$work/gpg" 2>&1 ||
            die "the signature: $(<"$work/gpg")"
        return
    fi
    (
        export GNUPGHOME=$work/keys
        mkdir -m 700 "$GNUPGHOME"
        gpg --batch --quiet --passphrase '' --quick-generate-key 'a throw-away key' 2>"$work/gpg"
        cp "$out/SHA256SUMS" "$work/SHA256SUMS"
        sign 'a throw-away key' "$work/SHA256SUMS"
        gpg --batch --verify "$work/SHA256SUMS.asc" "$work/SHA256SUMS" 2>>"$work/gpg" ||
            die "a signature: $(<"$work/gpg")"
        echo >>"$work/SHA256SUMS"
        ! gpg --batch --verify "$work/SHA256SUMS.asc" "$work/SHA256SUMS" 2>>"$work/gpg" ||
            die "a signature holds for another text"
        gpgconf --kill all
    )
    say "check: the sums can be signed"
}

# check_image OUT WORK: skopeo reads it, and it runs from its layers.
check_image() {
    local out=$1 work=$2 file root=$2/image layer
    file=$(echo "$out"/weft-*-image-*.tar)
    skopeo inspect "oci-archive:$file" >"$work/inspected"
    [[ $(jq -r '.Labels["org.opencontainers.image.version"]' "$work/inspected") == \
        "$(weft_version)" ]] || die "the image's label"
    skopeo inspect "docker-archive:$file" >"$work/inspected"
    mkdir -p "$root" "$work/layout"
    tar -C "$work/layout" -xf "$file"
    while read -r layer; do
        tar -C "$root" -xzf "$work/layout/$layer"
    done < <(jq -r '.[0].Layers[]' "$work/layout/manifest.json")
    chroot "$root" /opt/bin/flanneld --version 2>"$work/version"
    grep -q "$(weft_version)" "$work/version" || die "the image's flanneld says: $(<"$work/version")"
    chroot "$root" /usr/bin/weft version >/dev/null
    # On a node without any C library. Where the program lies, which copies its neighbour, is in /proc.
    mkdir "$work/node"
    # shellcheck disable=SC2016 # for the inner shell
    unshare --mount sh -euc 'mount -t proc proc "$1/proc"; chroot "$1" weft install-cni /flannel' \
        sh "$root" >/dev/null
    cp "$root/flannel" "$work/node"
    CNI_COMMAND=VERSION chroot "$work/node" /flannel | jq -e .supportedVersions >/dev/null ||
        die "the CNI plugin does not start without a C library"
    for program in iptables nft ip; do
        chroot "$root" /bin/sh -c "command -v $program" >/dev/null || die "the image has no $program"
    done
    [[ -z $(find "$root" -name resolv.conf -path '*/etc/*' -o -name policy-rc.d) ]] ||
        die "the image has files of this machine"
    rm -rf "$root" "$work/layout"
    say "check: the image"
}

# debian SUITE ROOT [PACKAGES]
debian() {
    debootstrap --variant=minbase ${3:+--include="$3"} "$1" "$2" "$(mirror)" >"$2.log" 2>&1 ||
        die "debootstrap: the output is in $2.log"
}

# check_booted SUITE OUT WORK TREE: install, upgrade under traffic, remove and purge, in a Debian that
# systemd has booted. The version before is the same tree under a smaller number.
check_booted() {
    local suite=$1 out=$2 work=$3 tree=$4 root=$3/$1 limit_s=600
    debian "$suite" "$root" systemd,systemd-sysv,iproute2,iptables,nftables,iputils-ping,kmod
    mkdir "$root/given"
    cp -a "$tree" "$work/before"
    rm -r "$work/before/DEBIAN" "$work/before/usr/share/doc/weft/"{copyright,changelog.gz}
    cp "$REPO/LICENSE" "$work/before/usr/share/doc/weft/LICENSE"
    WEFT_PACKAGE_COMPRESSION=none PACKAGE_VERSION="$(weft_version)~before" debian_package \
        "$work/before" "$ARCHITECTURE" 'nobody <nobody@localhost>' "$root/given" >/dev/null
    rm -r "$work/before"
    cp "$out"/weft_*.deb "$REPO/scripts/release-installed.sh" "$root/given"
    cat >"$root/etc/systemd/system/weft-probe.service" <<END
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'exec >/given/answers 2>&1; bash /given/release-installed.sh \\
    /given/weft_*~before_*.deb /given/weft_$(weft_version)_*.deb'
ExecStopPost=/bin/systemctl --no-block poweroff
END
    timeout --kill-after=5 "$limit_s" systemd-nspawn --directory="$root" --quiet --register=no \
        --machine="weft-$suite-$$" --keep-unit --private-network \
        --capability=CAP_BPF,CAP_NET_ADMIN --system-call-filter=bpf --bind=/dev/net/tun \
        --boot -- --unit=weft-probe.service >"$work/$suite.console" 2>&1 </dev/null || true
    grep -qx '== all is well' "$root/given/answers" ||
        die "the package in $suite: $(cat "$root/given/answers" "$work/$suite.console")"
    say "check: the package in $suite: $(grep '^upgrade' "$root/given/answers")"
    rm -rf --one-file-system "$root"
}

# check_bare OUT WORK: package, two lines and a start without systemd, in a Debian with nothing else.
check_bare() {
    local out=$1 root=$2/bare started
    debian bookworm "$root"
    cp "$out"/weft_*_"$ARCHITECTURE".deb "$root/"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    started=$SECONDS
    unshare --mount --pid --fork --kill-child bash -euc "$BARE" bash "$root" >"$root.out" 2>&1 ||
        die "a bare Debian: $(tail -n 30 "$root.out")"
    say "check: a bare Debian 12 has an overlay after $((SECONDS - started)) s"
    ((SECONDS - started <= BARE_LIMIT_S)) || die "that is more than $BARE_LIMIT_S s"
    rm -rf --one-file-system "$root"
}

# The other host is a second weftd on the same store, in a network of its own.
BARE=$(
    cat <<'END'
root=$1
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
! chroot "$root" sh -c 'command -v cc gcc systemctl'
chroot "$root" apt-get -q update
DEBIAN_FRONTEND=noninteractive chroot "$root" sh -c 'apt-get -qy install ./weft_*.deb'
mkdir -p "$root/var/lib/weft"
echo '{"Network":"10.5.0.0/16"}' >"$root/var/lib/weft/config"
echo 'FLANNELD_LOCAL_STORE=/var/lib/weft' >>"$root/etc/default/weftd"
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
for host in 1 2; do
    ip netns add "weft-bare-$host"
    ip -n "weft-bare-$host" link set lo up
done
ip -n weft-bare-1 link add eth0 type veth peer name eth0 netns weft-bare-2
for host in 1 2; do
    ip -n "weft-bare-$host" address add "172.20.0.$host/24" dev eth0
    ip -n "weft-bare-$host" link set eth0 up
    ip -n "weft-bare-$host" route add default via 172.20.0.254
    ip netns exec "weft-bare-$host" chroot "$root" sh -c "set -a; . /etc/default/weftd
        FLANNELD_SUBNET_FILE=/run/flannel$host/subnet.env
        exec weftd \$WEFTD_OPTIONS" &
done
for try in {1..300}; do
    far=$(sed -n 's/^FLANNEL_SUBNET=\(.*\)\.1\/.*/\1.0/p' "$root/run/flannel2/subnet.env") || true
    [[ -z $far ]] || ! ip netns exec weft-bare-1 ping -n -c 1 -W 1 "$far" || exit 0
    sleep 0.1
done
exit 1
END
)

# check_again OUT WORK ARM: from a clone in another place, with nothing that the first build has left.
check_again() {
    local out=$1 work=$2 arguments=(--out "$2/again")
    [[ $3 == no ]] || arguments+=(--arm64)
    git clone --quiet "$REPO" "$work/clone"
    git -C "$work/clone" checkout --quiet --detach "$(git -C "$REPO" rev-parse HEAD)"
    (
        unset CARGO_TARGET_DIR
        "$work/clone/scripts/release" "${arguments[@]}"
    )
    diff "$out/SHA256SUMS" "$work/again/SHA256SUMS" || die "a second build is another one"
    say "check: a second build is the same"
}

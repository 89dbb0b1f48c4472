# shellcheck shell=bash
# What scripts/cluster runs and a checkout does not hold: Debian roots for nodes, images and the
# compiler, and Kubernetes' programs built from source. Source it after common.sh; it only defines.
# Each step makes its thing whole or not at all, so that a build that was broken off goes on.

readonly SUITE=bookworm
readonly PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl)
# A node: the runtime, what kubelet and kube-proxy start, and what a person looks with. etcd is for
# the machine of the control plane, which has the same root.
readonly NODE_PACKAGES=(
    containerd runc containernetworking-plugins iptables ipset conntrack nftables iproute2 ethtool
    iputils-ping kmod mount procps busybox-static etcd-server etcd-client jq tcpdump
)
# What pods of the cases run.
readonly POD_PACKAGES=(busybox-static iperf3 iproute2 iputils-ping python3)

# cluster_build DIR: fills DIR.
cluster_build() {
    local dir=$1
    mkdir -p "$dir/bin" "$dir/log"
    make_base "$dir"
    local -a packages
    read -ra packages <<<"$(image_packages)"
    make_root "$dir" image "${packages[@]}"
    make_root "$dir" pod "${POD_PACKAGES[@]}"
    make_root "$dir" node "${NODE_PACKAGES[@]}"
    place_plugins "$dir/node"
    make_programs "$dir"
}

# What the container file installs on its second Debian.
image_packages() {
    sed -n 's/.*apt-get install -y --no-install-recommends \(.*\) \\$/\1/p' \
        "$REPO/deploy/container/Dockerfile" | tail -n 1
}

# logged DIR NAME COMMAND...: the output goes to a file, of which a failure shows the end.
logged() {
    local log=$1/log/$2
    shift 2
    "$@" >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "failed: $1; the whole output is in $log"
    }
}

make_base() {
    local dir=$1
    [[ ! -d $dir/debian ]] || return 0
    say "cluster: a minimal Debian"
    rm -rf --one-file-system "$dir/debian.part"
    logged "$dir" debian debootstrap --variant=minbase "$SUITE" "$dir/debian.part" "$(mirror)"
    printf 'deb %s %s main\ndeb-src %s %s main\n' "$(mirror)" "$SUITE" "$(mirror)" "$SUITE" \
        >"$dir/debian.part/etc/apt/sources.list"
    # No service starts in there, and no package asks.
    printf '#!/bin/sh\nexit 101\n' >"$dir/debian.part/usr/sbin/policy-rc.d"
    chmod 755 "$dir/debian.part/usr/sbin/policy-rc.d"
    mv "$dir/debian.part" "$dir/debian"
}

mirror() { printf '%s\n' "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"; }

# make_root DIR NAME PACKAGE...: DIR/NAME, the minimal Debian with these packages, without what a
# slim image of Debian leaves out.
make_root() {
    local dir=$1 name=$2 root=$1/$2.part
    shift 2
    [[ ! -d $dir/$name ]] || return 0
    say "cluster: Debian with $*"
    rm -rf --one-file-system "$root"
    cp -a "$dir/debian" "$root"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    logged "$dir" "$name-lists" in_root "$root" apt-get -q update
    logged "$dir" "$name" in_root "$root" apt-get -qy install --no-install-recommends "$@"
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb
    rm -rf "$root"/usr/share/{doc,man,locale,info}/*
    : >"$root/etc/resolv.conf"
    mv "$root" "$dir/$name"
}

# Where Kubernetes' own packages have the plugins, and where every manifest looks for them.
place_plugins() {
    [[ ! -d $1/opt/cni/bin ]] || return 0
    mkdir -p "$1/opt/cni/bin"
    cp -L "$1"/usr/lib/cni/* "$1/opt/cni/bin/"
}

# in_root ROOT COMMAND...: COMMAND with ROOT as its root, /proc and /dev in it; nothing stays
# mounted, and no process stays.
in_root() {
    # shellcheck disable=SC2016 # for that shell
    unshare --mount --pid --fork --kill-child bash -euc '
        mount --make-rprivate /
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        root=$0
        exec env -i HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"
    ' "$@"
}

# make_programs DIR: Kubernetes of Debian's source package, by Debian's Go.
make_programs() {
    local dir=$1 root=$1/build program missing=()
    for program in "${PROGRAMS[@]}"; do
        [[ -x $dir/bin/$program ]] || missing+=("$program")
    done
    ((${#missing[@]} > 0)) || return 0
    make_builder "$dir"
    say "cluster: compiling ${missing[*]}"
    # shellcheck disable=SC2016 # for that shell
    logged "$dir" compile in_root "$root" bash -euc '
        cd /go/src/k8s.io/kubernetes
        version=$(sed -n "1s/.*really\([0-9.]*\).*/v\1/p" debian/changelog)
        minor=${version#v1.} minor=${minor%%.*}
        flags="-s -w"
        for package in component-base/version client-go/pkg/version; do
            for pair in gitVersion=$version gitMajor=1 gitMinor=$minor gitTreeState=clean; do
                flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.$pair"
            done
        done
        export GOPATH=/go GO111MODULE=off CGO_ENABLED=0 GOFLAGS=-trimpath GOCACHE=/go/cache
        # What is generated and not part of the source: the schema that the API server serves.
        schema=pkg/generated/openapi/zz_generated.openapi.go
        if [[ ! -e $schema ]]; then
            inputs=$(grep -RlE --include="*.go" "^// \+k8s:openapi-gen=" pkg vendor/k8s.io |
                grep -vE "/_examples/|sample-apiserver|/config/" | xargs -n 1 dirname | sort -u |
                sed "s,^,k8s.io/kubernetes/," | paste -sd ,)
            go run k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen \
                -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
                -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base /go/src
        fi
        mkdir -p /out
        for program in "$@"; do
            go build -ldflags "$flags" -o "/out/$program" "k8s.io/kubernetes/cmd/$program"
        done
    ' bash "${missing[@]}"
    for program in "${missing[@]}"; do mv "$root/out/$program" "$dir/bin/$program"; done
    # 3 GB that a second build would need, and nobody else.
    rm -rf --one-file-system "$root"
}

# make_builder DIR: DIR/build, a root with the compiler and the unpacked source.
make_builder() {
    local dir=$1 root=$1/build
    make_root "$dir" build golang-go dpkg-dev
    [[ ! -d $root/go/src/k8s.io/kubernetes ]] || return 0
    say "cluster: Kubernetes' source from Debian"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    rm -rf "$root/src"
    logged "$dir" source in_root "$root" bash -euc '
        mkdir -p /src /go/src/k8s.io
        cd /src
        apt-get -q update
        apt-get -q -o APT::Sandbox::User=root source kubernetes
        mv kubernetes-*/ /go/src/k8s.io/kubernetes
    '
}

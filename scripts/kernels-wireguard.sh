# shellcheck shell=bash
# The wireguard backend for scripts/kernels-guest.sh: what no namespace of a kernel without
# WireGuard can try. Source it after lab.sh; it only defines.

# In a packet of the pods, and nowhere on the wire.
readonly WIREGUARD_MARKER=plaintext-that-nobody-may-see
readonly WIREGUARD_PSK=dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=

# Modes, families and whether there is a shared key; the first has all that is tried once.
wireguard_rows() {
    echo "wireguard separate both psk"
    echo "wireguard separate 4 -"
    echo "wireguard auto both -"
    echo "wireguard ipv6 both -"
    echo "wireguard separate 6 -"
}

# wireguard_row MODE FAMILIES psk|-: prints its verdict and a line that explains it.
wireguard_row() {
    local mode=$1 key='' case verdict
    dir=$(mktemp -d /tmp/row.XXXXXX)
    lab_trap lab_down
    case $2 in
        both) LAB_FAMILIES="4 6" ;;
        *) LAB_FAMILIES=$2 ;;
    esac
    [[ $3 != psk ]] || key=",\"PSK\":\"$WIREGUARD_PSK\""
    # shellcheck disable=SC2034 # for lab.sh
    LAB_BACKEND_KEYS=",\"Mode\":\"$mode\"$key"
    head -c "$((TRANSFER_KIB * 1024))" /dev/urandom >"$dir/sent"
    lab_up row
    local_store "$dir/store" wireguard
    if ! lab_plane_weft "$dir" --local-store "$dir/store"; then
        tail -n 20 "$dir"/h?/weftd.log >&2
        verdict="fails: no lease"
        ! grep -q "kernel has no WireGuard" "$dir/h1/weftd.log" || verdict=refused
        tell verdict "$verdict" "$(said "$dir/h1/weftd.log" '^[EF]')"
        return
    fi
    step "leases"
    local cases=(reachable transfers secret states)
    [[ $3 != psk ]] || cases+=(
        shared restart deleted peer_removed moved peer_leaves other_backend port_taken cleanup)
    for case in "${cases[@]}"; do
        if ! "wireguard_$case"; then
            tail -n 30 "$dir"/h?/weftd*.log "$dir"/*.log >&2
            tell verdict "fails: ${case//_/ }" "$(said "$dir/h1/weftd.log" '^[EFW]')"
            return
        fi
        step "$case"
    done
    tell verdict runs ""
}

wireguard_devices() {
    in_ns "h$1" wg show interfaces | tr ' ' '\n' | sort
}

wireguard_reachable() { lab_reachable; }

wireguard_transfers() {
    local family from
    for family in $LAB_FAMILIES; do
        for from in 1 2; do wireguard_transfer "$from" "$((3 - from))" "$family" || return; done
    done
}

# wireguard_transfer FROM TO FAMILY: a file arrives unchanged in the other pod.
wireguard_transfer() {
    local server to
    to=$(pod_address "$2" "$3")
    [[ $to != *:* ]] || to="[$to]"
    spawn_in "p$2" "$dir/receive.log" timeout "$((TRANSFER_LIMIT_S * SLOWNESS))" \
        socat -u "TCP$3-LISTEN:$TRANSFER_PORT,reuseaddr" "OPEN:$dir/received,creat,trunc"
    server=$SPAWNED
    wait_until 5 "socat in pod $2" receiver_listens "$2" &&
        in_ns "p$1" timeout "$((TRANSFER_LIMIT_S * SLOWNESS))" \
            socat -u "OPEN:$dir/sent" "TCP$3:$to:$TRANSFER_PORT" &&
        wait "$server" && cmp "$dir/sent" "$dir/received"
}

# What pods send is not on the wire, and datagrams of WireGuard are.
wireguard_secret() {
    local family capture marker
    marker=$(printf %s "${WIREGUARD_MARKER:0:16}" | od -An -v -tx1 | tr -d ' \n')
    spawn_in h2 "$dir/capture.log" tcpdump -i wire0 -U -Z root -w "$dir/wire.pcap"
    capture=$SPAWNED
    wait_until 10 "the capture" grep -q listening "$dir/capture.log" || return
    for family in $LAB_FAMILIES; do
        in_ns p1 ping -qc3 -i 0.3 -W5 -p "$marker" "$(pod_address 2 "$family")" || return
        echo "$WIREGUARD_MARKER" |
            in_ns p1 socat -u - "UDP$family-SENDTO:$(wireguard_pod "$family"):9" || return
    done
    kill "$capture"
    wait_until 10 "the capture to end" lab_process_ended "$capture" || return
    ! grep -aqF "${WIREGUARD_MARKER:0:16}" "$dir/wire.pcap" &&
        (($(tcpdump -r "$dir/wire.pcap" udp portrange 51820-51821 2>/dev/null | wc -l) >= 6))
}

wireguard_pod() {
    if [[ $1 == 6 ]]; then echo "[$(pod_address 2 6)]"; else pod_address 2 4; fi
}

# weftd says what WireGuard knows, and `wg` the same.
wireguard_states() {
    wait_until 30 "the peer to be ok" wireguard_is_ok 1 || return
    wireguard_is_ok 2 || return
    "$WEFT" peers --socket "$dir/h1/weft.sock" >&2
    "$WEFT" status --socket "$dir/h1/weft.sock" >&2
    in_ns h1 "$WEFT" check --socket "$dir/h1/weft.sock" --subnet-file "$dir/h1/subnet.env" >&2
    in_ns h1 "$WEFT" explain "$(pod_address 1)" "$(pod_address 2)" \
        --socket "$dir/h1/weft.sock" >&2
    in_ns h1 "$WEFT" ping "$(pod_address 2)" --socket "$dir/h1/weft.sock" >&2
    in_ns h1 wg show >&2
}

wireguard_is_ok() {
    status "$1" '.routes[0] | "\(.state) \(.wireguard.last_handshake_unix > 0) " +
        "\(.wireguard.received_bytes > 0)"' | grep -qx "ok true true"
}

wireguard_shared() {
    in_ns h1 wg show all preshared-keys | grep -qF "$WIREGUARD_PSK" &&
        ! grep -rqF "${WIREGUARD_PSK:0:20}" "$dir"/h?/weftd.log
}

# wireguard_start HOST: weftd again, with what the last one left.
wireguard_start() {
    rm -f "$dir/h$1/weft.sock"
    spawn_in "h$1" "$dir/h$1/weftd-again.log" \
        env WIREGUARD_KEY_FILE="$dir/h$1/wgkey" "$WEFTD" --local-store "$dir/store" \
        --iface wire0 --subnet-file "$dir/h$1/subnet.env" \
        --status-socket "$dir/h$1/weft.sock" --iptables-forward-rules=false
    WEFTD_PID[$1]=$SPAWNED
    wait_until 20 "weftd on host $1" wireguard_is_ready "$1"
}

wireguard_is_ready() { status "$1" .ready | grep -qx true; }

wireguard_stop() {
    kill "${WEFTD_PID[$1]}"
    wait_until 10 "weftd to end" lab_process_ended "${WEFTD_PID[$1]}"
}

# No packet is lost when weftd is restarted on either host, and no session begins anew.
wireguard_restart() {
    local before ping
    before=$(in_ns h1 wg show all public-key)
    spawn_in p1 "$dir/ping.log" ping -q -i 0.2 "$(pod_address 2 4)"
    ping=$SPAWNED
    wireguard_stop 1 && wireguard_start 1 && wireguard_stop 2 && wireguard_start 2 || return
    kill -INT "$ping"
    wait_until 10 "ping to end" lab_process_ended "$ping" || return
    cat "$dir/ping.log" >&2
    grep -q " 0% packet loss" "$dir/ping.log" &&
        [[ $before == "$(in_ns h1 wg show all public-key)" ]]
}

# A deleted device is there again, with its peers.
wireguard_deleted() {
    in_ns h1 ip link del flannel-wg
    wait_until 15 "the device to be repaired" pods_answer &&
        grep -q "deleted by someone else" "$dir/h1/weftd-again.log"
}

wireguard_peer_removed() {
    local peer
    peer=$(in_ns h1 wg show flannel-wg peers)
    in_ns h1 wg set flannel-wg peer "$peer" remove
    ! in_ns h1 wg show flannel-wg peers | grep -q . || return
    wait_until 20 "the peer to be set again" pods_answer
}

# A peer that sends from another port is answered there, whatever its lease says, for longer than
# weftd takes to compare again; and at its own again once it is back.
wireguard_moved() {
    wireguard_stop 2 || return
    in_ns h2 wg set flannel-wg listen-port 40000
    wait_until 20 "the peer at its new port" wireguard_is_at 40000 || return
    sleep 15
    wireguard_is_at 40000 && wireguard_start 2 &&
        wait_until 20 "the peer at its own port" wireguard_is_at 51820
}

# wireguard_is_at PORT: packets pass, and host 1 sends its own there.
wireguard_is_at() {
    in_ns p2 ping -qc1 -W1 "$(pod_address 1 4)" && pods_answer &&
        in_ns h1 wg show flannel-wg endpoints | grep -qE "172\.20\.0\.2:$1\$"
}

# A node that leaves takes its peer with it, and the others stay.
wireguard_peer_leaves() {
    local lease="$dir/store/subnets/10.5.77.0-24&fd00:5:0:77::-64" key count
    key=$(wg genkey | wg pubkey)
    count=$(in_ns h1 wg show flannel-wg peers | wc -l)
    printf '{"PublicIP":"172.20.0.77","PublicIPv6":"fd99::77","BackendType":"wireguard",%s}' \
        "\"BackendData\":{\"PublicKey\":\"$key\",\"Port\":51820},\"BackendV6Data\":{\"PublicKey\":\"$key\",\"Port\":51821}" \
        >"$dir/lease"
    mv "$dir/lease" "$lease"
    wait_until 20 "the new peer" wireguard_has_peer "$key" || return
    in_ns h1 wg show flannel-wg endpoints | grep -F "$key" | grep -qF 172.20.0.77:51820 || return
    in_ns h1 wg show flannel-wg allowed-ips | grep -F "$key" | grep -qF 10.5.77.0/24 || return
    rm "$lease"
    wait_until 30 "the peer to go" wireguard_lacks_peer "$key" &&
        [[ $(in_ns h1 wg show flannel-wg peers | wc -l) == "$count" ]] && pods_answer
}

wireguard_has_peer() { in_ns h1 wg show flannel-wg peers | grep -qF "$1"; }
wireguard_lacks_peer() { ! wireguard_has_peer "$1"; }

# With another backend the devices go.
wireguard_other_backend() {
    wireguard_stop 2 && [[ $(wireguard_devices 2 | wc -l) == 2 ]] || return
    local_store "$dir/other" host-gw
    spawn_in h2 "$dir/other.log" "$WEFTD" --local-store "$dir/other" --iface wire0 \
        --subnet-file "$dir/h2/subnet.env" --status-socket "$dir/h2/other.sock" \
        --iptables-forward-rules=false
    WEFTD_PID[2]=$SPAWNED
    wait_until 15 "the devices to go" wireguard_is_gone 2 && wireguard_stop 2
}

wireguard_is_gone() { [[ -z $(wireguard_devices "$1" | tr -d '\n') ]]; }

# Another program has the port: weftd says so, and leases nothing.
wireguard_port_taken() {
    local taker
    spawn_in h2 "$dir/taker.log" socat -u UDP4-RECVFROM:51820,fork -
    taker=$SPAWNED
    wait_until 5 "another program at the port" wireguard_port_is_used || return
    in_ns h2 env WIREGUARD_KEY_FILE="$dir/h2/wgkey" timeout 60 "$WEFTD" \
        --local-store "$dir/store" --iface wire0 --subnet-file "$dir/h2/subnet.env" \
        --status-socket "$dir/h2/taken.sock" >"$dir/taken.log" 2>&1
    [[ $? == 1 ]] && grep -q "UDP port 51820, for flannel-wg, is taken" "$dir/taken.log" || return
    kill "$taker"
}

wireguard_port_is_used() { [[ -n $(in_ns h2 ss -Hun "sport = :51820" -l) ]]; }

# What a stop leaves, weft cleanup removes.
wireguard_cleanup() {
    wireguard_stop 1 && [[ $(wireguard_devices 1 | wc -l) == 2 ]] || return
    in_ns h1 "$WEFT" cleanup --subnet-file "$dir/h1/subnet.env" >&2 && wireguard_is_gone 1
}

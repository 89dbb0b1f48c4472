# shellcheck shell=bash
# The ipsec backend for scripts/kernels-guest.sh, with ESP by the kernel, which that of the tests
# lacks: charon agrees on keys and carries nothing. Source it after kernels-wireguard.sh; it only
# defines.

# In a packet of the pods, and nowhere on the wire.
readonly IPSEC_MARKER=plaintext-that-nobody-may-see

# ESP as it is, and in datagrams of UDP.
ipsec_rows() {
    echo "ipsec kernel esp -"
    echo "ipsec kernel udp -"
}

# ipsec_row PLANE esp|udp -: prints its verdict and a line that explains it.
ipsec_row() {
    local encapsulation=$2 case psk
    dir=$(mktemp -d /tmp/row.XXXXXX)
    lab_trap lab_down
    psk=$(head -c 72 /dev/urandom | base64 -w 0)
    # shellcheck disable=SC2034 # for lab.sh
    LAB_BACKEND_KEYS=",\"PSK\":\"$psk\""
    # shellcheck disable=SC2034
    [[ $encapsulation == esp ]] || LAB_BACKEND_KEYS+=',"UDPEncap":true'
    head -c "$((TRANSFER_KIB * 1024))" /dev/urandom >"$dir/sent"
    ipsec_prepare
    lab_up row
    # Policies apply to what has a route. By this one all would leave that no policy keeps.
    in_ns h1 ip route add default via "${UNDERLAY[2]}"
    in_ns h2 ip route add default via "${UNDERLAY[1]}"
    local_store "$dir/store" ipsec
    if ! WEFTD=$dir/weftd lab_plane_weft "$dir" --local-store "$dir/store"; then
        tell verdict "fails: no lease" "$(said "$dir/h1/weftd.log" '^[EF]')"
        return
    fi
    step "leases"
    for case in reachable transfer_there transfer_back policies secret states restart \
        peer_removed charon_killed closed cleanup; do
        if ! "ipsec_$case"; then
            tail -n 30 "$dir"/h?/weftd*.log "$dir"/*.log >&2
            ipsec_show >&2
            tell verdict "fails: ${case//_/ }" "$(said "$dir/h1/weftd.log" '^[EFW]')"
            return
        fi
        step "$case"
    done
    tell verdict runs ""
}

# ipsec_prepare: charon's settings, and a weftd whose host has a /run of its own, because charon's
# socket has one name everywhere.
ipsec_prepare() {
    cat >"$dir/strongswan.conf" <<'END'
charon {
  load = kernel-netlink nonce aes sha1 sha2 hmac kdf gmp openssl gcm socket-default vici
}
END
    cat >"$dir/weftd" <<END
#!/bin/sh
exec "$dir/on-host" "$WEFTD" "\$@"
END
    cat >"$dir/on-host" <<END
#!/bin/sh
run=$dir/run-\$(ip netns identify | tail -c 3)
mkdir -p "\$run"
mount --bind "\$run" /run
exec env STRONGSWAN_CONF=$dir/strongswan.conf "\$@"
END
    chmod +x "$dir/weftd" "$dir/on-host"
}

# on_host HOST COMMAND...: with that host's /run.
on_host() {
    local host=$1
    shift
    in_ns "h$host" "$dir/on-host" "$@"
}

ipsec_show() {
    local host
    for host in 1 2; do
        in_ns "h$host" ip -s xfrm policy
        # Without the keys.
        in_ns "h$host" ip -s xfrm state | grep -vE '^\s+(enc|auth|aead|auth-trunc) '
        on_host "$host" swanctl --list-sas
        in_ns "h$host" cat /proc/net/xfrm_stat
    done
    dmesg | tail -n 5
}

# The first exchange of keys takes a while here.
ipsec_reachable() {
    wait_until 60 "the pods to reach each other" pods_answer
}

ipsec_transfer_there() { transfer 1 2; }
ipsec_transfer_back() { transfer 2 1; }

# ipsec_network HOST: its subnet.
ipsec_network() { subnet_of "$(env_value "$dir/h$1/subnet.env" FLANNEL_SUBNET)"; }

# What the leases ask for, and nothing else: out, in and forward, from end to end.
ipsec_policies() {
    local host other wanted found
    for host in 1 2; do
        other=$((3 - host))
        wanted=$(printf '%s\n' \
            "src $(ipsec_network "$host") dst $(ipsec_network "$other") out ${UNDERLAY[host]} ${UNDERLAY[other]}" \
            "src $(ipsec_network "$other") dst $(ipsec_network "$host") fwd ${UNDERLAY[other]} ${UNDERLAY[host]}" \
            "src $(ipsec_network "$other") dst $(ipsec_network "$host") in ${UNDERLAY[other]} ${UNDERLAY[host]}")
        found=$(in_ns "h$host" ip xfrm policy | awk '
            /^src/ { selector = $1 " " $2 " " $3 " " $4 }
            $1 == "dir" { direction = $2 }
            $1 == "tmpl" { print selector " " direction " " $3 " " $5 }' | grep -v '0.0.0.0/0' | sort)
        [[ $found == "$(sort <<<"$wanted")" ]] || {
            say "host $host has $found, the leases want $wanted"
            return 1
        }
        [[ $(in_ns "h$host" ip xfrm policy | grep -c 'proto esp reqid 11 mode tunnel') == 3 ]] || return
    done
}

# Of what pods send the wire has nothing, and ESP, or datagrams of it, instead.
ipsec_secret() {
    local marker kind
    marker=$(printf %s "${IPSEC_MARKER:0:16}" | od -An -v -tx1 | tr -d ' \n')
    ipsec_captures capture || return
    in_ns p1 ping -qc3 -i 0.3 -W5 -p "$marker" "$(pod_address 2)" || return
    echo "$IPSEC_MARKER" | in_ns p1 socat -u - "UDP4-SENDTO:$(pod_address 2):9" || return
    ipsec_captured_all || return
    kind="ip proto 50"
    [[ $encapsulation == esp ]] || kind="udp port 4500"
    ! grep -aqF "${IPSEC_MARKER:0:16}" "$dir"/wire?.pcap &&
        [[ $(ipsec_captured "net ${LAB_NETWORK}") == 0 ]] && (($(ipsec_captured "$kind") >= 7))
}

# ipsec_captures NAME: what either host sends goes to files, until ipsec_captured_all. Not what they
# receive: there a capture has the packets once more, as they were before.
ipsec_captures() {
    local host
    CAPTURES=()
    for host in 1 2; do
        spawn_in "h$host" "$dir/$1$host.log" \
            tcpdump --immediate-mode -i wire0 -Q out -U -Z root -w "$dir/wire$host.pcap"
        CAPTURES+=("$SPAWNED")
        wait_until 10 "the capture" grep -q listening "$dir/$1$host.log" || return
    done
}

ipsec_captured_all() {
    local capture
    for capture in "${CAPTURES[@]}"; do
        kill "$capture"
        wait_until 10 "the capture to end" lab_process_ended "$capture" || return
    done
}

# ipsec_captured FILTER: how many such packets both have sent.
ipsec_captured() {
    local host
    for host in 1 2; do tcpdump -r "$dir/wire$host.pcap" "$1" 2>/dev/null; done | wc -l
}

# weftd says what charon knows, and the kernel has the states.
ipsec_states() {
    local host
    for host in 1 2; do
        wait_until 30 "the keys in the status" ipsec_is_set_up "$host" || return
        "$WEFT" peers --socket "$dir/h$host/weft.sock" >&2
        in_ns "h$host" ip -s xfrm state | grep -E '^src|[(]bytes[)], ' | grep -v limit >&2
        (($(in_ns "h$host" ip xfrm state | grep -c "proto esp")  >= 2)) || return
        ! in_ns "h$host" ip link show ipsec0 >/dev/null 2>&1 || return
    done
    on_host 1 "$WEFT" check --socket "$dir/h1/weft.sock" --subnet-file "$dir/h1/subnet.env" >&2 ||
        say "check said so"
    in_ns h1 ip xfrm state | grep -q "encap type espinudp" ||
        [[ $encapsulation == esp ]]
}

ipsec_is_set_up() {
    status "$1" '.routes[0] | "\(.state) \(.ipsec.installed_unix > 0)"' | grep -qx "set-up true"
}

# No packet is lost when weftd is restarted, and charon goes on.
ipsec_restart() {
    local ping before
    before=$(ipsec_charon 1)
    spawn_in p1 "$dir/ping.log" ping -q -i 0.2 "$(pod_address 2)"
    ping=$SPAWNED
    kill "${WEFTD_PID[1]}"
    wait_until 10 "weftd to end" lab_process_ended "${WEFTD_PID[1]}" || return
    rm -f "$dir/h1/weft.sock"
    spawn_in h1 "$dir/h1/weftd-again.log" "$dir/weftd" --local-store "$dir/store" \
        --iface wire0 --subnet-file "$dir/h1/subnet.env" \
        --status-socket "$dir/h1/weft.sock" --iptables-forward-rules=false
    WEFTD_PID[1]=$SPAWNED
    wait_until 30 "weftd and its keys" ipsec_is_set_up 1 || return
    kill -INT "$ping"
    wait_until 10 "ping to end" lab_process_ended "$ping" || return
    cat "$dir/ping.log" >&2
    grep -q " 0% packet loss" "$dir/ping.log" && [[ -n $before && $before == "$(ipsec_charon 1)" ]]
}

ipsec_charon() {
    local pid
    for pid in $(ip netns pids "$LAB-h$1"); do
        [[ $(<"/proc/$pid/comm") != charon ]] || echo "$pid"
    done
}

# A node that leaves takes its policies with it, and the others stay.
ipsec_peer_removed() {
    local lease="$dir/store/subnets/10.5.77.0-24"
    printf '{"PublicIP":"172.20.0.77","PublicIPv6":null,"BackendType":"ipsec"}' >"$dir/lease"
    mv "$dir/lease" "$lease"
    wait_until 20 "its policies" ipsec_has_policy || return
    rm "$lease"
    wait_until 30 "its policies to go" ipsec_has_no_policy && ipsec_policies && pods_answer
}

ipsec_has_policy() { (($(in_ns h1 ip xfrm policy | grep -c '10\.5\.77\.0/24') == 3)); }
ipsec_has_no_policy() { ! in_ns h1 ip xfrm policy | grep -q '10\.5\.77\.0/24'; }

# A charon that is killed is started again, and agrees on new keys.
ipsec_charon_killed() {
    local before
    before=$(ipsec_charon 2)
    kill -9 "$before"
    wait_until 30 "another charon" ipsec_has_other_charon "$before" || return
    wait_until 120 "the pods to reach each other" pods_answer
}

ipsec_has_other_charon() { [[ -n $(ipsec_charon 2) && $(ipsec_charon 2) != "$1" ]]; }

# Without keys nothing leaves. What leaves unencrypted for want of a policy, the other host refuses.
ipsec_closed() {
    local host
    for host in 1 2; do
        kill -STOP "$(ipsec_charon "$host")" || return
        in_ns "h$host" ip xfrm state flush
    done
    ipsec_captures closed || return
    ! in_ns p1 ping -qc3 -i 0.3 -W1 "$(pod_address 2)" || return
    ipsec_captured_all || return
    [[ $(ipsec_captured "net $LAB_NETWORK") == 0 ]] || return
    ipsec_captures refused || return
    # weftd sets them again, but not at once.
    in_ns h1 ip xfrm policy flush
    ! in_ns p1 ping -qc2 -i 0.3 -W1 "$(pod_address 2)" || return
    ipsec_captured_all || return
    for host in 1 2; do kill -CONT "$(ipsec_charon "$host")"; done
    (($(ipsec_captured "src net $(ipsec_network 1)") > 0)) &&
        [[ $(ipsec_captured "src net $(ipsec_network 2)") == 0 ]]
}

# What a stop leaves, weft cleanup removes.
ipsec_cleanup() {
    kill "${WEFTD_PID[1]}"
    wait_until 10 "weftd to end" lab_process_ended "${WEFTD_PID[1]}" || return
    on_host 1 "$WEFT" cleanup --subnet-file "$dir/h1/subnet.env" >&2 || return
    [[ -z $(ipsec_charon 1) ]] && ! in_ns h1 ip xfrm policy | grep -q '10\.5\.' &&
        ! in_ns h1 ip xfrm state | grep -q 'proto esp'
}

# shellcheck shell=bash
# The lab: two hosts with a pod each, all of them network namespaces. Source it after common.sh.
#
#       $LAB-p1            $LAB-h1                        $LAB-h2            $LAB-p2
#   +------------+   +-----------------+  underlay   +-----------------+   +------------+
#   | eth0       |---| pod0     wire0  |-------------| wire0      pod0 |---| eth0       |
#   | subnet1 .2 |   | .1    172.20.0.1|  MTU 1500   |172.20.0.2   .1  |   | subnet2 .2 |
#   +------------+   | mgmt0           |             |           mgmt0 |   +------------+
#                    +-----|-----------+             +------------|----+
#                          |  172.21.0.1      172.21.0.2          |
#                          +---------[ br0 172.21.0.254 ]---------+
#                                        $LAB-store               (lab_store_up only)
#
# Every pair is a veth. Hosts forward; every other sysctl keeps its default. Several labs can be
# up at once: LAB names the one that the functions below work on, and lab_down removes them all.
# Pods come last, because a daemon chooses the subnet; see lab_pods.

readonly UNDERLAY=(- 172.20.0.1 172.20.0.2)
readonly LAB_NETWORK=10.5.0.0/16
# Of which families hosts and pods have addresses: 4, 6 or both.
LAB_FAMILIES=${LAB_FAMILIES:-4}
# Further keys of the Backend in the network configuration, such as ',"Port":8286'.
LAB_BACKEND_KEYS=${LAB_BACKEND_KEYS:-}
readonly UNDERLAY_V6=(- fd99::1 fd99::2)
readonly LAB_NETWORK_V6=fd00:5::/48
# Subnets for the planes that have no daemon to choose them, spelled as in subnet.env.
readonly FIXED_SUBNET=(- 10.5.1.1/24 10.5.2.1/24)
readonly TUNNEL_PORT=8285
readonly STORE_ADDRESS=172.21.0.254 STORE_ADDRESS_V6=fd98::254
# What a header of the plane takes from the underlay's MTU of 1500.
readonly MTU_PLAIN=1500 MTU_VXLAN=1450 MTU_UDP=1472

LAB=
LABS=()
LAB_PIDS=()
WEFTD_PID=() # of the lab made last, by host

lab_has() { [[ " $LAB_FAMILIES " == *" $1 "* ]]; }

# in_ns NAME COMMAND...: runs COMMAND in the namespace $LAB-NAME.
in_ns() {
    local name=$1
    shift
    ip netns exec "$LAB-$name" "$@"
}

# spawn_in NAME LOG COMMAND...: starts COMMAND in the background; SPAWNED is its process id.
spawn_in() {
    local name=$1 log=$2
    shift 2
    ip netns exec "$LAB-$name" "$@" >"$log" 2>&1 </dev/null &
    SPAWNED=$!
    LAB_PIDS+=("$SPAWNED")
}

# lab_up NAME: makes hosts, pods and the underlay, and selects the new lab.
lab_up() {
    local end
    LAB="weft-$$-$1"
    LABS+=("$LAB")
    for end in h1 h2 p1 p2; do
        ip netns add "$LAB-$end"
        in_ns "$end" ip link set lo up
    done
    ip link add wire0 netns "$LAB-h1" mtu 1500 type veth peer name wire0 mtu 1500 netns "$LAB-h2"
    for end in 1 2; do
        in_ns "h$end" ip link set wire0 up
        if lab_has 4; then
            in_ns "h$end" sysctl -qw net.ipv4.ip_forward=1
            in_ns "h$end" ip address add "${UNDERLAY[end]}/24" dev wire0
        fi
        if lab_has 6; then
            in_ns "h$end" sysctl -qw net.ipv6.conf.all.forwarding=1
            in_ns "h$end" ip address add "${UNDERLAY_V6[end]}/64" dev wire0 nodad
        fi
        ip link add pod0 netns "$LAB-h$end" type veth peer name eth0 netns "$LAB-p$end"
    done
}

# lab_link pass|wire: an ideal card, which super-packets cross whole, or one without offloads.
lab_link() {
    local end state
    case $1 in
        pass) state=on ;;
        wire) state=off ;;
        *) die "a link is pass or wire, not $1" ;;
    esac
    for end in h1 h2; do
        in_ns "$end" ethtool -K wire0 tso "$state" gso "$state" \
            tx-udp_tnl-segmentation "$state" tx-udp_tnl-csum-segmentation "$state" \
            tx-udp-segmentation "$state" gro "$([[ $1 == wire ]] && echo on || echo off)"
    done
}

# lab_pods SUBNET1 SUBNET2 MTU: addresses the pods. A subnet is spelled as FLANNEL_SUBNET in
# subnet.env, gateway/length; the pod gets the address after the gateway.
lab_pods() {
    local end subnet gateway length pod mtu=$3
    for end in 1 2; do
        subnet=${!end} gateway=${subnet%/*} length=${subnet#*/}
        pod=${gateway%.*}.$((${gateway##*.} + 1))
        in_ns "h$end" ip address replace "$subnet" dev pod0
        in_ns "h$end" ip link set pod0 mtu "$mtu" up
        in_ns "p$end" ip address replace "$pod/$length" dev eth0
        in_ns "p$end" ip link set eth0 mtu "$mtu" up
        in_ns "p$end" ip route replace default via "$gateway"
    done
}

# lab_pods_v6 DIR MTU: the same of IPv6, by FLANNEL_IPV6_SUBNET, whose gateways end in ::1.
lab_pods_v6() {
    local end subnet gateway
    for end in 1 2; do
        subnet=$(env_value "$1/h$end/subnet.env" FLANNEL_IPV6_SUBNET) gateway=${subnet%/*}
        in_ns "h$end" ip link set pod0 mtu "$2" up
        in_ns "p$end" ip link set eth0 mtu "$2" up
        in_ns "h$end" ip address replace "$subnet" dev pod0 nodad
        in_ns "p$end" ip address replace "${gateway%1}2/${subnet#*/}" dev eth0 nodad
        in_ns "p$end" ip -6 route replace default via "$gateway"
    done
}

# pod_address 1|2 [4|6]: the address of a family that the pod has.
pod_address() {
    in_ns "p$1" ip -json -"${2:-4}" address show dev eth0 scope global |
        jq -r '.[0].addr_info[0].local'
}

# subnet_of SUBNET: the network of a /24 spelled as in subnet.env.
subnet_of() { printf '%s.0/%s\n' "${1%.*}" "${1#*/}"; }

# Plain routing: what flannel calls host-gw.
lab_plane_plain() {
    local end
    for end in 1 2; do
        in_ns "h$end" ip route add "$(subnet_of "${FIXED_SUBNET[3 - end]}")" \
            via "${UNDERLAY[3 - end]}"
    done
    lab_pods "${FIXED_SUBNET[1]}" "${FIXED_SUBNET[2]}" "$MTU_PLAIN"
}

# The kernel's VXLAN, set up as flannel's vxlan backend does: no learning, permanent neighbours.
lab_plane_vxlan() {
    local end other network mac=(- 0e:00:00:00:00:01 0e:00:00:00:00:02)
    for end in 1 2; do
        other=$((3 - end))
        network=$(subnet_of "${FIXED_SUBNET[other]}")
        in_ns "h$end" ip link add flannel.1 address "${mac[end]}" mtu "$MTU_VXLAN" type vxlan \
            id 1 dev wire0 local "${UNDERLAY[end]}" dstport 8472 nolearning
        in_ns "h$end" ip address add "${FIXED_SUBNET[end]%.*}.0/32" dev flannel.1
        in_ns "h$end" ip link set flannel.1 up
        in_ns "h$end" ip neighbour add "${network%/*}" lladdr "${mac[other]}" dev flannel.1 \
            nud permanent
        in_ns "h$end" bridge fdb add "${mac[other]}" dev flannel.1 dst "${UNDERLAY[other]}"
        in_ns "h$end" ip route add "$network" via "${network%/*}" dev flannel.1 onlink
    done
    lab_pods "${FIXED_SUBNET[1]}" "${FIXED_SUBNET[2]}" "$MTU_VXLAN"
}

# lab_plane_proxy DIR PROGRAM: a proxy of benches/ on both hosts; logs go to DIR.
lab_plane_proxy() {
    local end
    for end in 1 2; do lab_proxy "$end" "$1" "$2" || return 1; done
    lab_pods "${FIXED_SUBNET[1]}" "${FIXED_SUBNET[2]}" "$MTU_UDP"
}

# lab_proxy END DIR PROGRAM [ARGUMENT...]: a program of benches/ on host END, with its device.
lab_proxy() {
    local end=$1 dir=$2 program=$3 path
    shift 3
    path=$REPO/target/release/examples/$program
    if [[ ! -x $path ]]; then
        say "there is no example $program in this tree"
        return 1
    fi
    mkdir -p "$dir"
    spawn_in "h$end" "$dir/$program$end.log" "$path" \
        --tun flannel0 --bind "${UNDERLAY[end]}:$TUNNEL_PORT" \
        --route "$(subnet_of "${FIXED_SUBNET[3 - end]}")=${UNDERLAY[3 - end]}:$TUNNEL_PORT" "$@"
    if ! wait_until 5 "flannel0 of $program on host $end" in_ns "h$end" ip link show flannel0; then
        tail -n 5 "$dir/$program$end.log" >&2
        return 1
    fi
    in_ns "h$end" ip address add "${FIXED_SUBNET[end]%.*}.0/32" dev flannel0
    in_ns "h$end" ip link set flannel0 mtu "$MTU_UDP" up
    in_ns "h$end" ip route add "$LAB_NETWORK" dev flannel0
}

# lab_plane_weft DIR ARGUMENT...: weftd on both hosts and the pods that its leases ask for. The
# arguments choose the store, WEFTD another program. Host N's files are in DIR/hN.
lab_plane_weft() {
    local dir=$1 end subnet=() mtu program=${WEFTD:-$REPO/target/release/weftd}
    shift
    for end in 1 2; do
        mkdir -p "$dir/h$end"
        spawn_in "h$end" "$dir/h$end/weftd.log" \
            env WIREGUARD_KEY_FILE="$dir/h$end/wgkey" "$program" "$@" \
            --iface wire0 --subnet-file "$dir/h$end/subnet.env" \
            --status-socket "$dir/h$end/weft.sock" \
            --iptables-forward-rules="${LAB_FORWARD_RULES:-false}"
        WEFTD_PID[end]=$SPAWNED
    done
    for end in 1 2; do
        if ! wait_until 15 "the lease of host $end" weft_has_lease_or_died "$dir" "$end" ||
            [[ ! -s $dir/h$end/subnet.env ]]; then
            tail -n 15 "$dir/h$end/weftd.log" >&2
            say "weftd on host $end has no lease"
            return 1
        fi
        subnet[end]=$(env_value "$dir/h$end/subnet.env" FLANNEL_SUBNET)
    done
    mtu=$(env_value "$dir/h1/subnet.env" FLANNEL_MTU)
    ! lab_has 4 || lab_pods "${subnet[1]}" "${subnet[2]}" "$mtu"
    ! lab_has 6 || lab_pods_v6 "$dir" "$mtu"
}

# weft_status DIR HOST FILTER: what weftd of that host says of itself, by jq's FILTER.
weft_status() {
    "$REPO/target/release/weft" status -o json --socket "$1/h$2/weft.sock" | jq -er "$3"
}

# lab_fast_path DIR: the kernel carries the packets between the pods, both ways.
lab_fast_path() {
    local end
    wait_until 15 "the fast path of $LAB" fast_path_carries "$1" && return
    for end in 1 2; do
        say "host $end: $(weft_status "$1" "$end" '.fast_path | .reason
            // "on, with \(.peers) peers and \(.packets_sent) packets sent"')"
    done
    return 1
}

# Pings each time, because the first packets are the workers': with them the kernel finds the
# hardware address of the other host.
fast_path_carries() {
    local end
    pods_answer || return 1
    for end in 1 2; do
        weft_status "$1" "$end" '.fast_path | .peers == 1 and .packets_sent > 0' || return 1
    done
}

# lab_daemons: the processes that move the lab's packets; the pods' are in their own namespaces.
lab_daemons() {
    local end
    for end in 1 2; do ip netns pids "$LAB-h$end"; done | tr '\n' ' '
}

# Waiting further is pointless once the daemon is gone.
weft_has_lease_or_died() {
    [[ -s $1/h$2/subnet.env ]] || lab_process_ended "${WEFTD_PID[$2]}"
}

# local_store DIR [BACKEND]: a store of files with the lab's network configuration.
local_store() {
    mkdir -p "$1"
    network_config "${2:-udp}" >"$1/config"
}

network_config() {
    local v4='"EnableIPv4":false,' v6=
    ! lab_has 4 || v4="\"Network\":\"$LAB_NETWORK\","
    ! lab_has 6 || v6="\"EnableIPv6\":true,\"IPv6Network\":\"$LAB_NETWORK_V6\","
    printf '{%s%s"Backend":{"Type":"%s"%s}}\n' "$v4" "$v6" "${1:-udp}" "$LAB_BACKEND_KEYS"
}

env_value() { sed -n "s/^$2=//p" "$1"; }

# lab_store_up DIR [BACKEND]: a private etcd in a namespace of its own, reachable from both hosts at
# STORE_URL, holding the lab's network configuration.
lab_store_up() {
    local dir=$1 end
    STORE_URL="http://$STORE_ADDRESS:2379"
    lab_has 4 || STORE_URL="http://[$STORE_ADDRESS_V6]:2379"
    ip netns add "$LAB-store"
    in_ns store ip link set lo up
    in_ns store ip link add br0 type bridge
    ! lab_has 4 || in_ns store ip address add "$STORE_ADDRESS/24" dev br0
    ! lab_has 6 || in_ns store ip address add "$STORE_ADDRESS_V6/64" dev br0 nodad
    in_ns store ip link set br0 up
    for end in 1 2; do
        ip link add mgmt0 netns "$LAB-h$end" type veth peer name "h$end" netns "$LAB-store"
        in_ns store ip link set "h$end" master br0 up
        in_ns "h$end" ip link set mgmt0 up
        ! lab_has 4 || in_ns "h$end" ip address add "172.21.0.$end/24" dev mgmt0
        ! lab_has 6 || in_ns "h$end" ip address add "fd98::$end/64" dev mgmt0 nodad
    done
    spawn_in store "$dir/etcd.log" etcd --data-dir "$dir/etcd" --listen-client-urls "$STORE_URL" \
        --advertise-client-urls "$STORE_URL" --listen-peer-urls http://127.0.0.1:2380 \
        --initial-advertise-peer-urls http://127.0.0.1:2380 \
        --initial-cluster default=http://127.0.0.1:2380
    wait_until 15 "etcd; log: $dir/etcd.log" lab_etcdctl endpoint health
    lab_etcdctl put /coreos.com/network/config "$(network_config "${2:-udp}")" >/dev/null
}

lab_etcdctl() {
    ETCDCTL_API=3 in_ns store etcdctl --endpoints "$STORE_URL" "$@"
}

# lab_reachable: a packet crosses from pod to pod, both ways.
lab_reachable() {
    wait_until 10 "the pods of $LAB to reach each other" pods_answer
}

pods_answer() {
    local family
    for family in $LAB_FAMILIES; do
        in_ns p1 ping -qc1 -W1 "$(pod_address 2 "$family")" || return
        in_ns p2 ping -qc1 -W1 "$(pod_address 1 "$family")" || return
    done
}

# lab_down: ends what was started here and removes every lab. Safe to call twice, and on the way
# out of a failure, so nothing in it may fail.
lab_down() {
    local namespace pid
    for pid in ${LAB_PIDS[@]+"${LAB_PIDS[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${LAB_PIDS[@]+"${LAB_PIDS[@]}"}; do
        wait_until 3 "process $pid to end" lab_process_ended "$pid" || kill -9 "$pid" || true
        wait "$pid" 2>/dev/null || true
    done
    LAB_PIDS=()
    for LAB in ${LABS[@]+"${LABS[@]}"}; do
        for namespace in h1 h2 h3 p1 p2 store switch; do
            [[ -e /run/netns/$LAB-$namespace ]] || continue
            # A namespace lives on while a process is in it, whoever started that process.
            ip netns pids "$LAB-$namespace" | xargs -r kill -9 2>/dev/null || true
            ip netns delete "$LAB-$namespace" || true
        done
    done
    LABS=()
}

# A child that was not waited for yet is a zombie: it has ended.
lab_process_ended() {
    ! kill -0 "$1" 2>/dev/null || [[ $(ps -o stat= -p "$1") == Z* ]]
}

# lab_trap CLEANUP: CLEANUP runs once however the script ends, Ctrl-C included.
lab_trap() {
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    # shellcheck disable=SC2064 # the name of the function, now
    trap "trap '' INT TERM HUP; $1" EXIT
}

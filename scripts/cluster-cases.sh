# shellcheck shell=bash
# What scripts/cluster tries, for each backend. A case is a function case_NAME: it prints what it
# saw where that is worth a line, and fails with a reason. Source it after cluster-weft.sh.

readonly CASES=(
    rollout nodes_ready pods_addressed ping_across tcp_across udp_across full_packets service_tcp
    service_udp dns hairpin host_port outside nftables_proxy status_in_pod rolling_update delete_pod
    two_versions
)
# Those of them that traffic of IPv6 has as well, with --dual.
readonly BOTH_CASES=(
    pods_addressed ping_across tcp_across udp_across full_packets service_tcp service_udp hairpin host_port
    outside nftables_proxy rolling_update
)
# From this version on kube-proxy has a mode for nftables by itself.
readonly NFTABLES_MINOR=31
# One daemon after the other: three containers begin and a probe waits, for each node.
readonly ROLLOUT_S=180
# Updates of the case rolling_update, one after the other. WEFT_UPDATES=20 takes some minutes.
readonly UPDATES=${WEFT_UPDATES:-1}

BACKEND=
# Of what the case sends: 4 or 6.
FAMILY=4
# What the case has seen, for its line.
SEEN=

# run_cases BACKEND [CASE...]: those without which nothing works come first and end the round.
run_cases() {
    BACKEND=$1
    shift
    (($# > 0)) || set -- "${CASES[@]}"
    [[ " $* " == *" rollout "* ]] || set -- rollout "$@"
    run_all "$@"
}

run_all() {
    local name
    for name in "$@"; do
        if ! run_case "$name" && [[ $name == rollout ]]; then
            diagnose
            return 0
        fi
        # shellcheck disable=SC2154 # scripts/cluster
        if [[ $dual == yes && " ${BOTH_CASES[*]} " == *" $name "* ]]; then
            use_family 6
            run_case "$name" || true
            use_family 4
        fi
    done
}

run_case() {
    local name=$1 log shown started=$SECONDS
    shown=$BACKEND
    [[ $FAMILY == 4 ]] || shown+=" IPv6"
    log=$RUN/${shown// /-}-$name.log
    SEEN=
    # Not in a subshell, because cases set what others use; so errors are looked at by hand.
    if "case_$name" >"$log" 2>&1; then
        passed=$((passed + 1))
        say "ok     $shown $name: $((SECONDS - started)) s${SEEN:+, $SEEN}"
    else
        failed=$((failed + 1))
        say "FAILED $shown $name: $((SECONDS - started)) s${SEEN:+, $SEEN}"
        sed 's/^/       /' "$log" | tail -n 25 >&2
        return 1
    fi
}

# diagnose: what a person would ask for first.
diagnose() {
    {
        kubectl get nodes,pods -A -o wide
        kubectl get events -A --sort-by=.lastTimestamp | tail -n 30
        kubectl -n "$NAMESPACE" describe pods
        for node in "${NODES[@]}"; do
            kubectl -n "$NAMESPACE" logs "$(weft_pod "$node")" --all-containers --tail=60
        done
    } >"$RUN/$BACKEND-diagnosis.log" 2>&1 || true
    say "       see $RUN/$BACKEND-diagnosis.log"
}

case_rollout() {
    pods_down && weft_up "$BACKEND" && pods_up
}

# pods_up: the pods of the cases: "a" on the first node; "b" on the second, with a hostPort; and
# Services: "far" for b, "near" for a itself.
pods_up() {
    {
        pod a "${NODES[0]}" ''
        pod b "${NODES[1]}" ', hostPort: 17001'
        service near a
        service far b
    } | kubectl apply -f - >/dev/null || return 1
    kubectl wait --for=condition=Ready pod/a pod/b --timeout=60s >/dev/null || return 1
    use_family 4
    dns_up
}

pods_down() {
    dns_down && kubectl delete pod a b --ignore-not-found --grace-period=1 >/dev/null
}

# use_family FAMILY: has the cases use its addresses.
use_family() {
    FAMILY=$1
    POD_A=$(pod_address a) POD_B=$(pod_address b)
    SERVICE_NEAR=$(service_address near) SERVICE_FAR=$(service_address far)
    NODE_A=$(machine_addresses 1 | of_family) NODE_B=$(machine_addresses 2 | of_family)
    OUTSIDE=$(both "$OUTSIDE_ADDRESS" "$OUTSIDE_ADDRESS_V6" | of_family)
}

# Of addresses or prefixes, separated by commas or spaces, the one of the family.
of_family() {
    local ipv6=-v
    [[ $FAMILY == 4 ]] || ipv6=
    tr -s ', ' '\n' | grep $ipv6 :
}

pod_address() { kubectl get pod "$1" -o jsonpath='{.status.podIPs[*].ip}' | of_family; }

service_address() { kubectl get service "$1" -o jsonpath='{.spec.clusterIPs[*]}' | of_family; }

pod_cidr() { kubectl get node "$1" -o jsonpath='{.spec.podCIDRs[*]}' | of_family; }

pod() {
    cat <<END
---
apiVersion: v1
kind: Pod
metadata: { name: $1, labels: { name: $1 } }
spec:
  nodeSelector: { kubernetes.io/hostname: $2 }
  terminationGracePeriodSeconds: 1
  containers:
  - name: traffic
    image: pod:1
    ports:
    - { containerPort: 7001$3 }
END
}

service() {
    cat <<END
---
apiVersion: v1
kind: Service
metadata: { name: $1 }
spec:
  selector: { name: $2 }
$([[ $dual == no ]] || echo '  ipFamilyPolicy: RequireDualStack')
  ports:
  - { name: tcp, port: 80, targetPort: 7001 }
  - { name: udp, port: 53, targetPort: 7001, protocol: UDP }
END
}

# in_pod NAME COMMAND...
in_pod() {
    local name=$1
    shift
    kubectl exec "$name" -- "$@"
}

case_nodes_ready() {
    kubectl wait --for=condition=Ready node --all --timeout=60s
}

# Each in its own node's PodCIDR.
case_pods_addressed() {
    local node address name cidr
    for name in a b; do
        node=$(kubectl get pod "$name" -o jsonpath='{.spec.nodeName}')
        cidr=$(pod_cidr "$node")
        address=$(pod_address "$name")
        echo "$name on $node has $address of $cidr"
        python3 -c 'import ipaddress, sys
pod, cidr = sys.argv[1:]
sys.exit(ipaddress.ip_address(pod) not in ipaddress.ip_network(cidr))' "$address" "$cidr" || return 1
    done
}

case_ping_across() {
    in_pod a ping -c 3 -i 0.2 -W 2 "$POD_B" && in_pod b ping -c 3 -i 0.2 -W 2 "$POD_A"
}

# sees FROM WHO EXPECTED ADDRESS [PORT] [KIND]: the server there sees the client as EXPECTED.
sees() {
    local from=$1 expected=$2 seen
    shift 2
    seen=$(in_pod "$from" traffic peer "$@") || return 1
    echo "$from to $*: seen as $seen, expected $expected"
    [[ $seen == "$expected" ]]
}

# Pods see each other's own addresses.
case_tcp_across() {
    sees a "$POD_A" "$POD_B" && sees b "$POD_B" "$POD_A"
}

case_udp_across() {
    sees a "$POD_A" "$POD_B" 7001 udp && sees b "$POD_B" "$POD_A" 7001 udp
}

# TCP as fast as it goes, and the largest packet that must not be cut.
case_full_packets() {
    local mtu rate
    mtu=$(in_pod a cat /sys/class/net/eth0/mtu) || return 1
    in_pod a ping -c 2 -i 0.2 -W 2 -M "do" -s $((mtu - (FAMILY == 4 ? 28 : 48))) "$POD_B" || return 1
    in_pod b iperf3 --server --one-off --daemon || return 1
    rate=$(in_pod a iperf3 --client "$POD_B" --time 2 --json) || return 1
    SEEN="MTU $mtu, $(jq -r '.end.sum_received.bits_per_second / 1e6 | round' <<<"$rate") Mbit/s"
}

case_service_tcp() { sees a "$POD_A" "$SERVICE_FAR" 80; }

# As a pod asks the cluster's DNS.
case_service_udp() { sees a "$POD_A" "$SERVICE_FAR" 53 udp; }

# A pod to its own Service: the bridge hands the packet back where it came from, masqueraded.
case_hairpin() {
    in_pod a traffic peer "$SERVICE_NEAR" 80
}

# From the other node and from outside, to the address of b's node.
case_host_port() {
    in_pod a traffic peer "$NODE_B" 17001 &&
        nsenter --target "${MACHINE[control]}" --net \
            python3 "$REPO/scripts/cluster-traffic.py" peer "$NODE_B" 17001
}

# What is outside sees the node.
case_outside() {
    sees a "$NODE_A" "$OUTSIDE" && sees b "$NODE_B" "$OUTSIDE" 7001 udp
}

# The same Services by kube-proxy's other mode, where the version has it.
case_nftables_proxy() {
    ((MINOR >= NFTABLES_MINOR)) || {
        SEEN="not in Kubernetes 1.$MINOR"
        return 0
    }
    # shellcheck disable=SC2154 # scripts/cluster
    [[ $kubeadm == no ]] || {
        SEEN="left out: kubeadm's kube-proxy is a pod"
        return 0
    }
    local bad=0
    proxy_mode nftables || return 1
    {
        wait_until 30 "rules of the other mode" case_service_tcp && case_service_udp &&
            case_hairpin && case_host_port && case_outside
    } || bad=1
    proxy_mode iptables && wait_until 30 "rules of the first mode" case_service_tcp || bad=1
    ((bad == 0))
}

# proxy_mode MODE: every kube-proxy anew, without the rules of the one before.
proxy_mode() {
    local node
    for node in "${NODES[@]}"; do
        proxy_config "$node" "$1" >"$(machine_place "$node")/etc/kube-proxy.yaml" || return 1
        in_machine "$node" pkill -x kube-proxy
        in_machine "$node" kube-proxy --cleanup \
            --config=/etc/kubernetes/kube-proxy.yaml >/dev/null 2>&1 || true
        wait_until 20 "kube-proxy of $node" in_machine "$node" pgrep -x kube-proxy || return 1
    done
}

case_status_in_pod() {
    local node status
    for node in "${NODES[@]}"; do
        status=$(on_weft "$node" weft status -o json) || {
            echo "$status"
            return 1
        }
        [[ $(jq -r .verdict.state <<<"$status") == ready ]] || return 1
        [[ $BACKEND != udp-fast ]] || jq -e '.fast_path.packets_sent > 0' <<<"$status" || return 1
        on_weft "$node" weft peers || return 1
        on_weft "$node" weft check || return 1
    done
}

# under_traffic COMMAND...: traffic from a to b meanwhile; fails if any of it is lost. Where there may
# be no weftd for a while, MAY_LOSE, datagrams of workers are; the connections live through it. With
# wireguard, which this script's machines have in weftd, they are until there are new keys.
under_traffic() {
    local result=$RUN/traffic.json changed=0
    # Not as a child of the exec, which a kubelet's end would end.
    in_pod a sh -c "rm -f /tmp/stop /tmp/result
        setsid traffic send $POD_B $((ROLLOUT_S * (UPDATES + 1))) >/tmp/result 2>&1 </dev/null &" || return 1
    sleep 3
    "$@" || changed=$?
    sleep 3
    in_pod a touch /tmp/stop || return 1
    wait_until 20 "the end of the traffic" in_pod a test -s /tmp/result || return 1
    in_pod a cat /tmp/result >"$result" || return 1
    ((changed == 0)) || return 1
    cat "$result"
    SEEN=$(jq -r '"\(.lost) of \(.sent) datagrams lost" +
        (if .lost > 0 then " (from \(.first_lost_s) s to \(.last_lost_s) s, at most " +
            "\(.longest_lost_s) s of them in a row)" else "" end) +
        ", \(.resets) resets, slowest answer \(.slowest_s) s"' "$result")
    jq -e --arg backend "$BACKEND" --arg may_lose "${MAY_LOSE:-no}" '
        .resets == 0 and ((.lost == 0 and .unanswered == 0) or
            ($backend == "udp" and $may_lose == "yes") or
            ($backend == "wireguard" and .unanswered == 0))' "$result"
}

case_rolling_update() {
    has_surge || local MAY_LOSE=yes
    under_traffic updated_often
    local kept=$?
    SEEN="$UPDATES updates, $SEEN"
    return "$kept"
}

updated_often() {
    local count
    for ((count = 0; count < UPDATES; count++)); do updated || return 1; done
}

updated() {
    kubectl -n "$NAMESPACE" rollout restart "$DAEMONS" && rolled_out $ROLLOUT_S
}

case_delete_pod() {
    local MAY_LOSE=yes
    under_traffic pod_deleted
}

pod_deleted() {
    local pod
    pod=$(weft_pod "${NODES[0]}")
    kubectl -n "$NAMESPACE" delete pod "$pod" && sleep 1 && rolled_out $ROLLOUT_S
}

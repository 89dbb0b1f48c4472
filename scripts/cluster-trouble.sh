# shellcheck shell=bash
# What scripts/cluster does to a cluster in which everything works, with traffic meanwhile, or to
# the DaemonSet as a whole. They are tried once, with the backend that is tried last. Source it after
# cluster-cases.sh.

readonly TROUBLES=(
    weft_killed kubelet_restarted runtime_restarted proxy_restarted api_away account_made_again
    bad_image crash_loop configuration_changed memory_limit second_cni pod_made_again
    node_made_again chart from_flannel
)
# Long enough for every watch to end and be tried again. WEFT_API_AWAY_S=600 takes ten minutes.
readonly API_AWAY_S=${WEFT_API_AWAY_S:-30}

run_troubles() { run_all "${TROUBLES[@]}"; }

# After the faults, with workers: a tunnel that is kept stays two minutes.
run_last() { run_all daemonset_deleted; }

# Ends weftd where a kubelet starts it again.
case_weft_killed() {
    under_traffic weft_killed
}

weft_killed() {
    local before
    before=$(restarts)
    in_machine "${NODES[0]}" pkill -9 -x flanneld || in_machine "${NODES[0]}" pkill -9 -x weftd ||
        return 1
    wait_until 60 "another weftd" restarted "$before" && rolled_out 60
}

restarts() {
    kubectl -n "$NAMESPACE" get pod "$(weft_pod "${NODES[0]}")" \
        -o jsonpath='{.status.containerStatuses[0].restartCount}'
}

restarted() { (($(restarts) > $1)); }

case_kubelet_restarted() {
    under_traffic service_restarted kubelet && kubectl wait --for=condition=Ready node --all
}

case_runtime_restarted() {
    under_traffic service_restarted containerd && kubectl wait --for=condition=Ready node --all
}

case_proxy_restarted() {
    under_traffic service_restarted kube-proxy
}

# service_restarted NAME: on the first node; the machine starts it again.
service_restarted() {
    local node=${NODES[0]}
    in_machine "$node" pkill -x "$1" || return 1
    sleep 5
    wait_until 30 "$1" in_machine "$node" pgrep -x "$1" && rolled_out 60
}

# Pods go on, and a weftd that was running goes on. What it has watched is compacted meanwhile. Killed,
# because an API server that is told to end serves watches for another minute.
case_api_away() {
    local etc pid_before pid_after said
    etc=$(machine_place control)/etc
    pid_before=$(in_machine "${NODES[0]}" pgrep -x 'flanneld|weftd') || return 1
    mv "$etc/apiserver" "$etc/apiserver.away" || return 1
    in_machine control pkill -9 -x kube-apiserver
    compacted || return 1
    # Without the API there is no exec; so from the node, into the pod's namespace.
    local pod
    pod=$(in_machine "${NODES[0]}" pgrep -f 'traffic serve' | head -n 1)
    in_machine "${NODES[0]}" nsenter --target "$pod" --net \
        ping -q -i 0.1 -W 1 -c $((API_AWAY_S * 10)) "$POD_B" >"$RUN/ping.log"
    said=$(in_machine "${NODES[0]}" nsenter --target "$pid_before" --mount \
        /usr/bin/weft status | head -n 1)
    mv "$etc/apiserver.away" "$etc/apiserver"
    wait_until 60 "the API" kubectl get --raw /readyz || return 1
    cat "$RUN/ping.log"
    SEEN=$(grep -o '[0-9.]*% packet loss' "$RUN/ping.log")
    pid_after=$(in_machine "${NODES[0]}" pgrep -x 'flanneld|weftd') || return 1
    [[ $SEEN == "0% packet loss" && $pid_before == "$pid_after" ]] || return 1
    SEEN="$SEEN in $API_AWAY_S s; weft status: $said"
    [[ $said == *"weftd goes on with the peers known so far"* ]] &&
        wait_until 60 "weftd to hear from the API" status_is_ready
}

compacted() {
    local revision
    revision=$(in_machine control etcdctl get / --limit=1 --keys-only -w json |
        jq .header.revision) || return 1
    in_machine control etcdctl compact "$revision"
}

status_is_ready() {
    on_weft "${NODES[0]}" weft status -o json | jq -e '.verdict.state == "ready"'
}

# The account is made again, which ends all its tokens, as a rotation of the authority would. weftd
# says so once its watch has ended, and the next pods have new tokens.
case_account_made_again() {
    under_traffic account_made_again
}

account_made_again() {
    kubectl -n "$NAMESPACE" delete serviceaccount flannel &&
        manifest "$BACKEND" | kubectl apply -f - || return 1
    in_machine control pkill -9 -x kube-apiserver
    wait_until 120 "the API" kubectl get --raw /readyz || return 1
    wait_until 60 "weftd to be refused" status_says "${NODES[0]}" 'Unauthorized' || return 1
    updated && wait_until 60 "weftd to hear from the API" status_is_ready
}

# status_says NODE PATTERN. Where something is wrong, weft status fails.
status_says() { grep -E "$2" <<<"$(on_weft "$1" weft status)"; }

# An update to an image that is nowhere, taken back.
case_bad_image() {
    under_traffic bad_image
}

bad_image() {
    local before
    before=$(template)
    kubectl -n "$NAMESPACE" set image "$DAEMONS" kube-flannel=weft:nowhere || return 1
    wait_until 90 "a pod without its image" has_no_image || return 1
    taken_back "$before"
}

has_no_image() {
    kubectl -n "$NAMESPACE" get pods | grep -E 'ErrImage|ImagePull|Init'
}

# An update with which weftd ends again and again, taken back.
case_crash_loop() {
    under_traffic crash_loop
}

crash_loop() {
    local before
    before=$(template)
    patch_weft '[{ "op": "add", "path": "/spec/template/spec/containers/0/args/-",
        "value": "--iface=nowhere0" }]' || return 1
    wait_until 120 "a second crash" has_crashed 2 || return 1
    SEEN="$(kubectl -n "$NAMESPACE" get pods --no-headers | tr -s ' ' | cut -d ' ' -f 3,4 |
        paste -sd ,)"
    taken_back "$before"
}

# patch_weft JSON: changes the DaemonSet.
patch_weft() { kubectl -n "$NAMESPACE" patch "$DAEMONS" --type=json -p "$1"; }

has_crashed() {
    kubectl -n "$NAMESPACE" get pods -o json |
        jq -e --argjson times "$1" 'any(.items[].status.containerStatuses[]?;
            .restartCount >= $times and .ready == false)'
}

# The kubelet brings the file within syncFrequency, and weftd reads it each minute.
case_configuration_changed() {
    local mtu=1380 started=$SECONDS seen
    set_mtu "$mtu" || return 1
    wait_until 150 "weftd to read it" restart_needed || return 1
    seen="said after $((SECONDS - started)) s"
    updated || return 1
    on_weft "${NODES[0]}" grep "FLANNEL_MTU=$mtu" /run/flannel/subnet.env && case_ping_across ||
        return 1
    # The next update takes it back.
    set_mtu null || return 1
    SEEN=$seen
}

# set_mtu BYTES: of the overlay, in the ConfigMap; null is none.
set_mtu() {
    kubectl -n "$NAMESPACE" get configmap kube-flannel-cfg -o json |
        jq --argjson mtu "$1" '.data["net-conf.json"] |=
            (fromjson | .Backend.MTU = $mtu | del(..|nulls) | tojson)' |
        kubectl apply -f - >/dev/null
}

restart_needed() {
    jq -e .restart_needed <<<"$(on_weft "${NODES[0]}" weft status -o json)"
}

# As much memory as the manifest asks for, as its limit, under load.
case_memory_limit() {
    local used before
    before=$(template)
    patch_weft '[{ "op": "add", "path": "/spec/template/spec/containers/0/resources/limits",
        "value": { "memory": "50Mi" } }]' && rolled_out "$ROLLOUT_S" || return 1
    case_full_packets || return 1
    used=$(on_weft "${NODES[1]}" cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes) || return 1
    SEEN="at most $((used >> 20)) of 50 MiB, $SEEN"
    on_weft "${NODES[1]}" weft status -o json | jq .process
    [[ $(kubectl -n "$NAMESPACE" get pods -l app=flannel -o json |
        jq '[.items[].status.containerStatuses[].restartCount] | add') == 0 ]] || return 1
    taken_back "$before"
}

# Another CNI configuration on the node. One whose name sorts behind weft's is of no importance; of
# one before it pods get their addresses, which ends with the file.
case_second_cni() {
    local node=${NODES[1]} place=/etc/cni/net.d address
    in_machine "$node" bash -c "cat >$place/87-other.conflist" <<'END' || return 1
{ "cniVersion": "0.3.1", "name": "other", "plugins": [ { "type": "bridge", "bridge": "other0",
  "isGateway": true, "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.250.0.0/24" }]] } } ] }
END
    sleep 6
    case_pod_made_again && case_pods_addressed || return 1
    in_machine "$node" mv "$place/87-other.conflist" "$place/05-other.conflist" || return 1
    sleep 6
    kubectl delete pod b --grace-period=1 && pods_up || return 1
    address=$POD_B
    in_machine "$node" rm "$place/05-other.conflist" || return 1
    sleep 6
    case_pod_made_again && case_pods_addressed && in_machine "$node" ip link delete other0 || return 1
    SEEN="before weft's: $address"
    [[ $address == 10.250.* ]]
}

case_pod_made_again() {
    kubectl delete pod b --grace-period=1 && pods_up && case_ping_across && case_service_tcp
}

# Drained, deleted and registered again, with another PodCIDR. A weftd that runs keeps the old one
# for the pods that have it; the next one takes the new one.
case_node_made_again() {
    local node=${NODES[1]} before after
    before=$(pod_cidr "$node")
    kubectl drain "$node" --ignore-daemonsets --force --timeout=60s &&
        kubectl delete node "$node" || return 1
    sleep 2
    in_machine "$node" pkill -x kubelet
    wait_until 60 "the Node $node" kubectl get node "$node" || return 1
    wait_until 60 "its PodCIDR" has_pod_cidr "$node" || return 1
    after=$(pod_cidr "$node")
    SEEN="PodCIDR $before, then $after"
    kubectl wait --for=condition=Ready "node/$node" --timeout=90s || return 1
    wait_until 60 "weftd to refuse it" is_refused "$node" "$after" || return 1
    kubectl -n "$NAMESPACE" delete pod "$(weft_pod "$node")" && sleep 1 || return 1
    if ! { rolled_out "$ROLLOUT_S" && pods_up; }; then
        kubectl describe pod b | tail -n 5
        return 1
    fi
    case_pods_addressed && case_ping_across && case_outside
}

is_refused() {
    jq -e --arg cidr "$2" '.store.refused_subnet == $cidr' <<<"$(on_weft "$1" weft status -o json)"
}

has_pod_cidr() { [[ -n $(pod_cidr "$1") ]]; }

# What is left lets flanneld start: no route to the whole network.
case_daemonset_deleted() {
    local node left
    manifest "$BACKEND" | kubectl delete -f - || return 1
    for node in "${NODES[@]}"; do
        wait_until 60 "weftd's end on $node" no_weftd "$node" || return 1
        wait_until 20 "the routes of $node to go" has_no_route "$node" || return 1
        left=$(in_machine "$node" ip -brief link | awk '/flannel/ { print $1 }' | paste -sd ' ')
        SEEN+="${SEEN:+, }$node: ${left:-no device} left"
    done
}

has_no_route() { [[ -z $(in_machine "$1" ip route show exact "$POD_NETWORK") ]]; }

no_weftd() { ! in_machine "$1" pgrep -x 'flanneld|weftd'; }

# The chart in place of the manifest, by Helm itself, with values as a user of flannel has them.
case_chart() {
    local type=${BACKEND%-fast} helm=${CARGO_TARGET_DIR:-$REPO/target}/tools/helm
    [[ -x $helm ]] || {
        echo "helm is fetched by scripts/setup --test"
        return 1
    }
    cp "$helm" "$RUN/images/helm" && cp -r "$REPO/deploy/chart" "$RUN/images/" || return 1
    manifest "$BACKEND" | kubectl delete --ignore-not-found -f - || return 1
    pods_down
    kubectl create namespace "$NAMESPACE" || return 1
    in_machine control /images/helm install weft /images/chart --namespace "$NAMESPACE" \
        --set "flannel.backend=$type" || return 1
    rolled_out 120 && pods_up && case_ping_across && case_outside || return 1
    in_machine control /images/helm upgrade weft /images/chart --namespace "$NAMESPACE" \
        --set "flannel.backend=$type" --set flannel.fast.metrics.port=9469 || return 1
    rolled_out "$ROLLOUT_S" && case_ping_across || return 1
    in_machine control busybox wget -qO- http://172.30.0.1:9469/metrics | grep -c ^flannel_ || return 1
    in_machine control /images/helm uninstall weft --namespace "$NAMESPACE"
}

# From flannel to weft and back, node by node, by applying the other one's manifest, if WEFT_FLANNEL
# names a directory with flanneld, install-conf, the CNI plugin "flannel", and kube-flannel.yml. Its
# manifest has no TUN device, so it is for vxlan and host-gw.
case_from_flannel() {
    local to
    [[ -n ${WEFT_FLANNEL:-} && $BACKEND != udp* ]] || {
        SEEN="needs WEFT_FLANNEL, and vxlan or host-gw"
        return 0
    }
    flannel_image || return 1
    pods_down
    manifest "$BACKEND" | kubectl delete --ignore-not-found -f - || return 1
    flannel_manifest | kubectl apply -f - && rolled_out "$ROLLOUT_S" && pods_up &&
        case_ping_across || return 1
    under_traffic weft_applied || return 1
    to=$SEEN
    under_traffic flannel_applied || return 1
    SEEN="to weft $to; back $SEEN"
    case_ping_across && flannel_manifest | kubectl delete -f -
}

flannel_image() {
    local node stage file=$RUN/images/flannel.tar
    stage=$(mktemp -d "$RUN/flannel.XXXXXX")
    install -D -m 755 -t "$stage/opt/bin" "$WEFT_FLANNEL"/{flanneld,install-conf} &&
        install -m 755 -t "$stage" "$WEFT_FLANNEL/flannel" || return 1
    layer "$stage" "$file.layer"
    # shellcheck disable=SC2154 # scripts/cluster
    image "$file" flannel:1 '{ "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"] }' \
        "$(base_layer "$dir" image)" "$file.layer"
    rm -r "$stage" "$file.layer"
    for node in "${NODES[@]}"; do
        in_machine "$node" ctr -n k8s.io images import /images/flannel.tar || return 1
    done
}

flannel_manifest() {
    sed -E -e "s/\"Type\": \"vxlan\"/\"Type\": \"$BACKEND\"/" \
        -e 's,image: ghcr.io/.*,image: flannel:1,' "$WEFT_FLANNEL/kube-flannel.yml"
}

weft_applied() {
    manifest "$BACKEND" | kubectl apply -f - && rolled_out "$ROLLOUT_S" &&
        wait_until 30 "weftd" status_is_ready
}

flannel_applied() { flannel_manifest | kubectl apply -f - && rolled_out "$ROLLOUT_S"; }

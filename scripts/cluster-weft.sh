# shellcheck shell=bash
# The cluster as a whole, and weft in it: the manifest as it is, with the changes that a user makes
# for another backend. Source it after cluster-kubernetes.sh.

readonly NODES=(node1 node2)
readonly NAMESPACE=kube-flannel
readonly DAEMONS=daemonset/kube-flannel-ds

# cluster_up DIR: control plane and nodes; nothing gives pods a network yet.
cluster_up() {
    local number=0 node
    # shellcheck disable=SC2154 # scripts/cluster
    if [[ $kubeadm == yes ]]; then
        kubeadm_up "$1"
    else
        pki_up
        say "cluster: control plane"
        control_up "$1"
        for node in "${NODES[@]}"; do
            number=$((number + 1))
            say "cluster: $node"
            node_up "$node" "$number" "$1"
        done
    fi
    # On the cable's far side, where nothing knows pods.
    nsenter --target "${MACHINE[control]}" --net --pid \
        python3 "$REPO/scripts/cluster-traffic.py" serve "$OUTSIDE_ADDRESS" "$OUTSIDE_ADDRESS_V6" \
        >"$RUN/outside.log" 2>&1 </dev/null &
    LAUNCHERS+=($!)
    # It ends with the machine, which is no news.
    disown $!
    for node in "${NODES[@]}"; do wait_until 60 "the Node $node" kubectl get node "$node"; done
}

cluster_down() { machines_down; }

# From this version on an update starts a node's new pod before the old one ends.
readonly SURGE_MINOR=22

has_surge() { ((MINOR >= SURGE_MINOR)); }

# manifest BACKEND: the manifest, with the backend that a user would write into its ConfigMap, and
# for udp-fast the arguments that have the kernel carry the packets, without a weftd as well, and
# with --dual the network of IPv6. An
# older Kubernetes gets it without the lines that the manifest says are to be deleted there.
manifest() {
    local edits=(-e "s/\"Type\": \"vxlan\"/\"Type\": \"${1%-fast}\"/")
    [[ $1 != udp-fast ]] ||
        edits+=(-e 's/^\( *\)- "--kube-subnet-mgr"$/&\n\1- "--fast-path=on"\n\1- "--keep-tunnel"/')
    # shellcheck disable=SC2154 # scripts/cluster
    [[ $dual == no ]] ||
        edits+=(-e "s,^\( *\)\"Network\": .*,&\n\1\"EnableIPv6\": true\,\n\1\"IPv6Network\": \"$POD_NETWORK_V6\"\,,")
    has_surge || edits+=(-e '/^  updateStrategy:$/,/^      maxUnavailable: 0$/d')
    sed "${edits[@]}" "$REPO/deploy/kubernetes/weft.yml"
}

# weft_up BACKEND: applies the manifest, and waits until every node has rolled out. A ConfigMap that
# changes moves no pod, so that a user restarts the DaemonSet.
weft_up() {
    local was
    was=$(kubectl -n "$NAMESPACE" get "$DAEMONS" -o name 2>/dev/null || true)
    manifest "$1" | kubectl apply -f - >/dev/null || return 1
    [[ -z $was ]] || kubectl -n "$NAMESPACE" rollout restart "$DAEMONS" >/dev/null
    rolled_out 120
}

rolled_out() { kubectl -n "$NAMESPACE" rollout status "$DAEMONS" --timeout="$1s" >/dev/null; }

# The DaemonSet's pods as they are now, for taken_back.
template() { kubectl -n "$NAMESPACE" get "$DAEMONS" -o json | jq -c .spec.template; }

# taken_back TEMPLATE: the DaemonSet as it was before a change. Not by `kubectl rollout undo`: a
# controller that was without the API for a while gives the ControllerRevisions wrong numbers, and
# the change before is taken back.
taken_back() {
    patch_weft "[{ \"op\": \"replace\", \"path\": \"/spec/template\", \"value\": $1 }]" &&
        rolled_out "$ROLLOUT_S"
}

# weft_pod NODE: the name of its pod, the newest that is not being deleted.
weft_pod() {
    kubectl -n "$NAMESPACE" get pods -l app=flannel --field-selector "spec.nodeName=$1" -o json |
        jq -r '[.items[].metadata | select(.deletionTimestamp == null)] |
            sort_by(.creationTimestamp) | last | .name'
}

# on_weft NODE COMMAND...: in weft's container there.
on_weft() {
    local node=$1
    shift
    kubectl -n "$NAMESPACE" exec "$(weft_pod "$node")" -c kube-flannel -- "$@"
}

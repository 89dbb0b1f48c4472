# shellcheck shell=bash
# Faults of a cluster, each in a pod of its own that is the DaemonSet's but for the fault, and the
# words with which weft names it: in its log, or by `kubectl exec` of weft status or weft check.
# Source it after cluster-trouble.sh.

# shellcheck disable=SC2034 # scripts/cluster
readonly FAULTS=(
    no_tun no_net_admin no_net_raw no_bpf no_host_network read_only_run no_cni_conf
    no_network_configuration bad_network_configuration unknown_backend wrong_api_address no_role
    no_token no_node_name unknown_node no_pod_cidr foreign_pod_cidr wrong_clock health_port_taken
    tunnel_port_taken no_such_interface
)
readonly FAULT_NODE=node2
# From the pod's start to the words, on a busy machine.
readonly FAULT_S=60

# run_faults FAULT...: with workers, which need the most. No pod of the DaemonSet on the node meanwhile.
run_faults() {
    BACKEND=udp
    # shellcheck disable=SC2034 # cluster-cases.sh
    SEEN=
    if ! { run_case rollout && faults_begin; }; then
        failed=$((failed + 1))
        say "FAILED faults: not begun"
        return 0
    fi
    run_all "${@/#/fault_}"
    kubectl taint node "$FAULT_NODE" "faults-" >/dev/null && rolled_out "$ROLLOUT_S"
}

faults_begin() {
    kubectl taint node "$FAULT_NODE" faults=yes:NoExecute >/dev/null &&
        wait_until 60 "weftd to leave the node" no_weftd "$FAULT_NODE"
}

# fault WHERE WORDS [CHANGE]: starts the pod with the change, a filter of jq, and waits until WHERE
# has the words, an extended regular expression.
fault() {
    local where=$1 words=$2 change=${3:-.} named=0
    fault_pod "$change" || return 1
    wait_until "$FAULT_S" "$where to name the fault" names "$where" "$words" || named=1
    # shellcheck disable=SC2034 # cluster-cases.sh
    SEEN="$where: $(look "$where" 2>&1 | grep -oE -m 1 ".{0,60}($words).{0,60}" || true)"
    ((named == 0)) || { look "$where"; look log; } 2>/dev/null | tail -n 40
    kubectl -n "$NAMESPACE" delete pod fault --grace-period=1 --wait >/dev/null || return 1
    return "$named"
}

fault_pod() {
    kubectl -n "$NAMESPACE" get "$DAEMONS" -o json | jq --arg node "$FAULT_NODE" \
        '{ apiVersion: "v1", kind: "Pod", metadata: { name: "fault", namespace: .metadata.namespace },
            spec: (.spec.template.spec + { nodeName: $node, tolerations: [{ operator: "Exists" }] }) } |
        def weftd: .spec.containers[0]; def without($name):
            weftd.volumeMounts |= map(select(.name != $name)) |
            .spec.volumes |= map(select(.name != $name)); '"$1" |
        kubectl apply -f - >/dev/null
}

# What is looked at may fail, because of the very fault.
names() { grep -qE "$2" <<<"$(look "$1" 2>&1)"; }

# look WHERE: log, an init container's log as init:NAME, status or check.
look() {
    case $1 in
        log)
            kubectl -n "$NAMESPACE" logs fault -c kube-flannel
            kubectl -n "$NAMESPACE" logs fault -c kube-flannel --previous
            ;;
        init:*) kubectl -n "$NAMESPACE" logs fault -c "${1#init:}" ;;
        *) kubectl -n "$NAMESPACE" exec fault -c kube-flannel -- weft "$1" ;;
    esac
}

case_fault_no_tun() { fault log '/dev/net/tun' 'without("tun")'; }

case_fault_no_net_admin() {
    fault log 'CAP_NET_ADMIN' 'weftd.securityContext.capabilities.add -= ["NET_ADMIN"]'
}

case_fault_no_net_raw() {
    fault check 'cap-net-raw' 'weftd.securityContext.capabilities.add -= ["NET_RAW"]'
}

case_fault_no_bpf() {
    fault log 'CAP_BPF' 'weftd.securityContext.capabilities.add -= ["BPF"] |
        weftd.args += ["--fast-path=on"]'
}

case_fault_no_host_network() {
    fault log 'needs hostNetwork: true' 'del(.spec.hostNetwork)'
}

case_fault_read_only_run() {
    fault check 'subnet-directory' \
        '(weftd.volumeMounts[] | select(.name == "run")).readOnly = true'
}

case_fault_no_cni_conf() {
    fault init:install-cni 'nowhere.json' \
        '(.spec.initContainers[] | select(.name == "install-cni")).args[0] |= sub("cni-conf"; "nowhere")'
}

# configured JSON: the fault's pod with another ConfigMap.
configured() {
    kubectl -n "$NAMESPACE" get configmap kube-flannel-cfg -o json | jq --argjson data "$1" \
        '{ apiVersion, kind, metadata: { name: "fault", namespace: .metadata.namespace },
            data: (.data + $data | with_entries(select(.value != null))) }' |
        kubectl apply -f - >/dev/null
}

readonly CONFIGURED='(.spec.volumes[] | select(.name == "flannel-cfg")).configMap.name = "fault"'

case_fault_no_network_configuration() {
    configured '{ "net-conf.json": null }' && fault log 'net-conf.json' "$CONFIGURED"
}

case_fault_bad_network_configuration() {
    configured '{ "net-conf.json": "Network: 10.244.0.0/16" }' &&
        fault log 'not a JSON object' "$CONFIGURED"
}

case_fault_unknown_backend() {
    configured '{ "net-conf.json":
        "{ \"Network\": \"10.244.0.0/16\", \"Backend\": { \"Type\": \"aws-tgw\" } }" }' &&
        fault log 'unknown backend type "aws-tgw"' "$CONFIGURED"
}

# In the service account's place the API has this address.
case_fault_wrong_api_address() {
    fault status '172.30.0.77:.*No route to host' \
        'weftd.env += [{ name: "KUBERNETES_SERVICE_HOST", value: "172.30.0.77" }]'
}

case_fault_no_role() {
    local bad=0
    kubectl delete clusterrolebinding flannel >/dev/null || return 1
    fault status '403 Forbidden: nodes' || bad=1
    manifest "$BACKEND" | kubectl apply -f - >/dev/null || return 1
    return "$bad"
}

case_fault_no_token() {
    fault log 'fail to create kubernetes config' '.spec.automountServiceAccountToken = false'
}

case_fault_no_node_name() {
    fault log 'NODE_NAME' 'weftd.env = []'
}

# node_named NAME: the pod believes to be on that Node.
node_named() {
    printf '(weftd.env[] | select(.name == "NODE_NAME")) = { name: "NODE_NAME", value: "%s" }' "$1"
}

case_fault_unknown_node() { fault status 'nobody' "$(node_named nobody)"; }

# node_made NAME SPEC: a Node that no kubelet has.
node_made() {
    jq -n --arg name "$1" --argjson spec "$2" \
        '{ apiVersion: "v1", kind: "Node", metadata: { name: $name }, spec: $spec }' |
        kubectl apply -f - >/dev/null
}

# The controller that assigns them stands still.
case_fault_no_pod_cidr() {
    local bad=0
    in_machine control pkill -STOP -x kube-controller || return 1
    node_made ghost '{}' && fault status 'pod cidr not assigned' "$(node_named ghost)" || bad=1
    kubectl delete node ghost >/dev/null
    in_machine control pkill -CONT -x kube-controller && return "$bad"
}

case_fault_foreign_pod_cidr() {
    local bad=0
    node_made ghost '{ "podCIDR": "10.99.0.0/24", "podCIDRs": ["10.99.0.0/24"] }' &&
        fault log '10.99.0.0/24' "$(node_named ghost)" || bad=1
    kubectl delete node ghost >/dev/null
    return "$bad"
}

# A clock cannot be set for one container. To one that runs ahead the API's certificate has expired,
# so here it has.
case_fault_wrong_clock() {
    local server bad=0
    certificate "$RUN" late /CN=apiserver "IP:$CONTROL_ADDRESS" -1 || return 1
    nsenter --target "${MACHINE[control]}" --net openssl s_server -quiet -accept 6444 \
        -cert "$RUN/late.crt" -key "$RUN/late.key" >/dev/null 2>&1 </dev/null &
    server=$!
    fault log 'invalid peer certificate: Expired' 'weftd.env += [
        { name: "KUBERNETES_SERVICE_HOST", value: "'"$CONTROL_ADDRESS"'" },
        { name: "KUBERNETES_SERVICE_PORT", value: "6444" }]' || bad=1
    kill "$server"
    return "$bad"
}

# taken KIND PORT WHERE WORDS: another program has the port of the node.
taken() {
    local other bad=0
    nsenter --target "${MACHINE[$FAULT_NODE]}" --net python3 -c "
import socket, time
place = socket.socket(socket.AF_INET, socket.SOCK_$1)
place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
place.bind(('0.0.0.0', $2))
if '$1' == 'STREAM': place.listen()
time.sleep(600)" &
    other=$!
    fault "$3" "$4" || bad=1
    kill "$other" || bad=1
    return "$bad"
}

case_fault_health_port_taken() { taken STREAM 8081 log ':8081'; }

case_fault_tunnel_port_taken() { taken DGRAM 8285 log '8285'; }

case_fault_no_such_interface() { fault log 'nowhere0' 'weftd.args += ["--iface=nowhere0"]'; }

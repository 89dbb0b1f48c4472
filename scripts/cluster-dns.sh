# shellcheck shell=bash
# The cluster's DNS: CoreDNS in pods on weft's network, as most clusters have it, where the directory
# of the programs holds one. Source it after cluster-cases.sh; it only defines.

readonly DNS_SERVICE=10.96.0.10 DNS_LABEL=k8s-app=kube-dns
# The API's endpoint slices, which CoreDNS reads, are of this version.
readonly DNS_MINOR=21
# Look-ups of each pod: kube-proxy chooses one of both servers for each.
readonly LOOK_UPS=10

has_dns() { [[ -e $RUN/images/dns.tar ]] && ((MINOR >= DNS_MINOR)); }

# make_dns DIR TREE: CoreDNS of a source tree with its vendored modules.
make_dns() {
    local dir=$1 tree=$2
    [[ ! -x $dir/bin/coredns ]] || return 0
    [[ -d $tree/vendor && -e $tree/coredns.go ]] ||
        die "$tree is no source tree of CoreDNS with its vendor directory"
    make_go "$dir" "$tree"
    say "cluster: compiling coredns"
    mkdir -p "$dir/out"
    logged "$dir" compile-coredns go_build "$dir" "$tree" coredns "-s -w" .
    mv "$dir/out/coredns" "$dir/bin/coredns"
    rm -rf --one-file-system "$dir/out" "$dir/cache"
}

# dns_image DIR OUT: the program alone.
dns_image() {
    local dir=$1 out=$2
    [[ -x $dir/bin/coredns ]] || return 0
    program_image "$out/dns.tar" dns:1 \
        '{ "Entrypoint": ["/usr/local/bin/coredns", "-conf", "/etc/coredns/Corefile"] }' \
        "$dir/bin/coredns"
}

# dns_up: a server on each node, and the Service that every pod's resolv.conf names; kubeadm has
# made its own. They come and go with the other pods, because a bridge keeps the MTU of the smallest
# of its ports.
dns_up() {
    has_dns || return 0
    local node
    # shellcheck disable=SC2154 # scripts/cluster
    if [[ $kubeadm == yes ]]; then
        kubectl -n kube-system scale deployment coredns --replicas=2 >/dev/null &&
            wait_until 20 "CoreDNS" dns_is_there || return 1
    else
        {
            dns_rights
            for node in "${NODES[@]}"; do dns_pod "$node"; done
        } | kubectl apply -f - >/dev/null || return 1
    fi
    kubectl -n kube-system wait --for=condition=Ready pod -l "$DNS_LABEL" --timeout=60s >/dev/null
}

dns_down() {
    if [[ $kubeadm == yes ]]; then
        kubectl -n kube-system scale deployment coredns --replicas=0 >/dev/null &&
            wait_until 60 "CoreDNS to end" dns_is_gone
    else
        kubectl -n kube-system delete pod -l "$DNS_LABEL" --ignore-not-found --grace-period=1 \
            >/dev/null
    fi
}

dns_pods() { kubectl -n kube-system get pods -l "$DNS_LABEL" -o jsonpath="{.items[*].$1}"; }

dns_is_there() { [[ -n $(dns_pods metadata.name) ]]; }

dns_is_gone() { ! dns_is_there; }

dns_rights() {
    cat <<END
apiVersion: v1
kind: ServiceAccount
metadata: { name: coredns, namespace: kube-system }
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: { name: coredns }
rules:
- { apiGroups: [""], resources: [endpoints, services, pods, namespaces], verbs: [list, watch] }
- { apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch] }
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: { name: coredns }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coredns }
subjects:
- { kind: ServiceAccount, name: coredns, namespace: kube-system }
---
apiVersion: v1
kind: ConfigMap
metadata: { name: coredns, namespace: kube-system }
data:
  Corefile: |
    .:53 {
        errors
        ready
        kubernetes cluster.local in-addr.arpa {
            pods insecure
        }
    }
---
apiVersion: v1
kind: Service
metadata: { name: kube-dns, namespace: kube-system, labels: { k8s-app: kube-dns } }
spec:
  clusterIP: $DNS_SERVICE
  selector: { k8s-app: kube-dns }
  ports:
  - { name: dns, port: 53, protocol: UDP }
  - { name: dns-tcp, port: 53, protocol: TCP }
END
}

# dns_pod NODE
dns_pod() {
    cat <<END
---
apiVersion: v1
kind: Pod
metadata: { name: dns-$1, namespace: kube-system, labels: { k8s-app: kube-dns } }
spec:
  nodeSelector: { kubernetes.io/hostname: $1 }
  serviceAccountName: coredns
  dnsPolicy: Default
  terminationGracePeriodSeconds: 1
  containers:
  - name: coredns
    image: dns:1
    readinessProbe: { periodSeconds: 1, httpGet: { path: /ready, port: 8181 } }
    volumeMounts:
    - { name: corefile, mountPath: /etc/coredns }
  volumes:
  - { name: corefile, configMap: { name: coredns } }
END
}

# Names of Services, asked by UDP and TCP from either node through the DNS's own Service, then from
# each server; and a Service by its name.
case_dns() {
    has_dns || {
        SEEN="no CoreDNS in the directory of the programs, or Kubernetes before 1.$DNS_MINOR"
        return 0
    }
    local pod server
    # shellcheck disable=SC2034 # scripts/cluster-cases.sh
    SEEN="servers on $(dns_pods spec.nodeName)"
    for pod in a b; do
        look_up "$pod" '' far && look_up "$pod" use-vc far.default.svc.cluster.local || return 1
        for server in $(dns_pods status.podIP); do
            in_pod "$pod" busybox nslookup far.default.svc.cluster.local "$server" || return 1
        done
    done
    sees a "$POD_A" far 80
}

# look_up POD OPTIONS NAME: as any program of the pod does, by the options of resolv.conf(5).
look_up() {
    local pod=$1 options=$2 name=$3 found
    # shellcheck disable=SC2016 # for that shell
    found=$(in_pod "$pod" env "RES_OPTIONS=timeout:2 attempts:1 $options" sh -euc '
        for try in $(seq "$1"); do getent ahostsv4 "$2"; done
    ' sh "$LOOK_UPS" "$name") || return 1
    echo "$pod asks for $name: $found"
    [[ $(grep -c "^$SERVICE_FAR .*STREAM" <<<"$found") == "$LOOK_UPS" ]]
}

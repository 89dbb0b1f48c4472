# shellcheck shell=bash
# Kubernetes on the machines: who may say what (certificates and kubeconfigs), the services of the
# control plane and of a node, and their configuration. Source it after cluster-machines.sh.

readonly CONTROL_ADDRESS=172.30.0.254
readonly POD_NETWORK=10.244.0.0/16
readonly SERVICE_NETWORK=10.96.0.0/16
readonly API_SERVICE=10.96.0.1
# The same of IPv6, with --dual; a machine's address has the number that its IPv4 ends with.
readonly MACHINES_V6=fd00:30::
readonly POD_NETWORK_V6=fd00:10:244::/48
readonly SERVICE_NETWORK_V6=fd00:10:96::/112
readonly API="https://$CONTROL_ADDRESS:6443"

# Of Kubernetes' version, the number after "1.".
MINOR=

# version_of DIR: finds out which Kubernetes the programs are.
version_of() {
    MINOR=$("$1/bin/kubelet" --version) || die "the kubelet does not run"
    say "cluster: $MINOR"
    MINOR=${MINOR#*v1.} MINOR=${MINOR%%.*}
}

# From this version on Kubernetes has both families without being asked.
has_both_families() { ((MINOR >= 23)); }

# both V4 V6: what a program is told of the families that the cluster has.
both() {
    # shellcheck disable=SC2154 # scripts/cluster
    if [[ $dual == yes ]]; then printf '%s,%s\n' "$1" "$2"; else printf '%s\n' "$1"; fi
}

# machine_addresses NUMBER: of the machine with this number.
machine_addresses() { both "172.30.0.$1" "$MACHINES_V6$1"; }

# machine_prefixes NUMBER: the same, each with the length of its network.
machine_prefixes() { both "172.30.0.$1/24" "$MACHINES_V6$1/64"; }

# kubectl as the administrator. Named as the program, because it is used as the program.
kubectl() { in_machine control kubectl "$@"; }

# pki_up: an authority, and the keys of service accounts.
pki_up() {
    PKI=$RUN/pki
    mkdir -p "$PKI"
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=cluster \
        -keyout "$PKI/ca.key" -out "$PKI/ca.crt" 2>/dev/null
    openssl genrsa -out "$PKI/accounts.key" 2048 2>/dev/null
    openssl rsa -in "$PKI/accounts.key" -pubout -out "$PKI/accounts.pub" 2>/dev/null
}

# certificate DIR NAME SUBJECT [NAMES [DAYS]]: a key and a certificate of the authority.
certificate() {
    local dir=$1 name=$2 subject=$3 names=${4:-DNS:$2} days=${5:-30}
    openssl req -newkey rsa:2048 -nodes -subj "$subject" -keyout "$dir/$name.key" \
        -out "$dir/$name.csr" 2>/dev/null
    openssl x509 -req -in "$dir/$name.csr" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -days "$days" \
        -CAcreateserial -extfile <(printf 'subjectAltName=%s\n' "$names") \
        -out "$dir/$name.crt" 2>/dev/null
    rm "$dir/$name.csr"
}

# kubeconfig DIR NAME SUBJECT: DIR is the machine's etc, which it sees as /etc/kubernetes.
kubeconfig() {
    local dir=$1 name=$2
    certificate "$dir" "$name" "$3"
    cat >"$dir/$name.conf" <<END
apiVersion: v1
kind: Config
clusters:
- name: cluster
  cluster: { server: "$API", certificate-authority: /etc/kubernetes/ca.crt }
users:
- name: user
  user:
    client-certificate: /etc/kubernetes/$name.crt
    client-key: /etc/kubernetes/$name.key
contexts:
- name: cluster
  context: { cluster: cluster, user: user }
current-context: cluster
END
    chmod 600 "$dir/$name.conf"
}

# control_up DIR: etcd and the control plane, until the API is ready.
control_up() {
    local dir=$1 etc
    etc=$(machine_place control)/etc
    mkdir -p "$etc"
    cp "$PKI"/* "$etc/"
    certificate "$etc" apiserver /CN=apiserver \
        "IP:$CONTROL_ADDRESS,IP:$API_SERVICE,DNS:kubernetes.default.svc,DNS:kubernetes"
    certificate "$etc" to-kubelet /O=system:masters/CN=apiserver
    kubeconfig "$etc" admin /O=system:masters/CN=admin
    kubeconfig "$etc" controllers /CN=system:kube-controller-manager
    kubeconfig "$etc" scheduler /CN=system:kube-scheduler
    control_services "$etc"
    machine_up control "$(machine_prefixes 254)" "$dir" etcd apiserver controllers scheduler
    control_wired
    wait_until 90 "the API" kubectl get --raw /readyz
}

control_services() {
    local etc=$1
    cat >"$etc/etcd" <<'END'
exec etcd --data-dir /var/lib/etcd/data --unsafe-no-fsync
END
    cat >"$etc/apiserver" <<END
cd /etc/kubernetes
exec kube-apiserver --etcd-servers=http://127.0.0.1:2379 --advertise-address=$CONTROL_ADDRESS \
    --service-cluster-ip-range=$(both $SERVICE_NETWORK $SERVICE_NETWORK_V6) --allow-privileged=true \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --client-ca-file=ca.crt --tls-cert-file=apiserver.crt --tls-private-key-file=apiserver.key \
    --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate=to-kubelet.crt --kubelet-client-key=to-kubelet.key \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file=accounts.pub --service-account-signing-key-file=accounts.key
END
    cat >"$etc/controllers" <<END
cd /etc/kubernetes
exec kube-controller-manager --kubeconfig=controllers.conf --leader-elect=false \
    --allocate-node-cidrs=true --cluster-cidr=$(both $POD_NETWORK $POD_NETWORK_V6) \
    --service-cluster-ip-range=$(both $SERVICE_NETWORK $SERVICE_NETWORK_V6) --use-service-account-credentials=true \
    --service-account-private-key-file=accounts.key --root-ca-file=ca.crt
END
    cat >"$etc/scheduler" <<END
exec kube-scheduler --kubeconfig=/etc/kubernetes/scheduler.conf --leader-elect=false
END
}

# node_up NAME NUMBER DIR: a node with its runtime and kubelet; does not wait for Ready.
node_up() {
    local name=$1 number=$2 dir=$3 etc
    etc=$(machine_place "$name")/etc
    mkdir -p "$etc/manifests"
    cp "$PKI/ca.crt" "$etc/"
    machine_addresses 254 | tr , '\n' >"$etc/gateways"
    kubeconfig "$etc" kubelet "/O=system:nodes/CN=system:node:$name"
    kubeconfig "$etc" proxy /CN=system:kube-proxy
    node_services "$etc" "$name" "$(machine_addresses "$number")"
    machine_up "$name" "$(machine_prefixes "$number")" "$dir" containerd kubelet kube-proxy
    node_wired "$name"
    load_images "$name"
}

# load_images NAME: into the node's runtime; its kubelet waits for them.
load_images() {
    local name=$1 image
    wait_until 30 "the runtime of $name" in_machine "$name" ctr version
    for image in "$RUN"/images/*.tar; do
        in_machine "$name" ctr -n k8s.io images import "/images/${image##*/}" >/dev/null
    done
    touch "$(machine_place "$name")/etc/has-images"
}

node_services() {
    local etc=$1 name=$2 addresses=$3
    cat >"$etc/containerd.toml" <<'END'
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
END
    cat >"$etc/containerd" <<'END'
exec containerd --config /etc/kubernetes/containerd.toml
END
    cat >"$etc/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
enforceNodeAllocatable: []
failSwapOn: false
authentication: { x509: { clientCAFile: /etc/kubernetes/ca.crt }, anonymous: { enabled: false } }
authorization: { mode: Webhook }
staticPodPath: /etc/kubernetes/manifests
resolvConf: /etc/resolv.conf
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
nodeStatusUpdateFrequency: 4s
syncFrequency: 10s
evictionHard: { memory.available: 50Mi }
$( ((MINOR < 31)) || echo 'failCgroupV1: false')
$( ((MINOR < 27)) || echo 'containerRuntimeEndpoint: unix:///run/containerd/containerd.sock')
END
    local runtime="--container-runtime=remote"
    runtime+=" --container-runtime-endpoint=unix:///run/containerd/containerd.sock"
    ((MINOR < 27)) || runtime=
    # Before the images are there a kubelet would wait longer and longer for each.
    cat >"$etc/kubelet" <<END
until [[ -e /etc/kubernetes/has-images ]]; do sleep 0.2; done
exec kubelet --config=/etc/kubernetes/kubelet.yaml --kubeconfig=/etc/kubernetes/kubelet.conf \
    --hostname-override=$name --node-ip=$addresses $runtime
END
    proxy_config "$name" iptables >"$etc/kube-proxy.yaml"
    cat >"$etc/kube-proxy" <<'END'
exec kube-proxy --config=/etc/kubernetes/kube-proxy.yaml
END
}

# proxy_config NODE MODE
proxy_config() {
    cat <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: { kubeconfig: /etc/kubernetes/proxy.conf }
mode: $2
clusterCIDR: $(both $POD_NETWORK $POD_NETWORK_V6)
hostnameOverride: $1
conntrack: { maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s }
END
}

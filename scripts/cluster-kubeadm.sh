# shellcheck shell=bash
# A cluster that kubeadm makes, with its own way of doing everything: static pods for the control
# plane, kube-proxy and CoreDNS as it deploys them, nodes that join with a token. Its etcd is the
# machine control's, because Debian's knows other flags than kubeadm gives. Source it after
# cluster-weft.sh.

# How a container starts whose manifest names the program.
readonly PROGRAMS_PATH='{ "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"] }'
readonly KUBEADM_CONTROL=leader KUBEADM_ADDRESS=172.30.0.3 KUBEADM_TOKEN=abcdef.0123456789abcdef

# kubeadm_images DIR OUT: what kubeadm would pull, under the names that it asks for.
kubeadm_images() {
    local dir=$1 out=$2 name program
    [[ -x $dir/bin/kubeadm && -x $dir/bin/coredns ]] ||
        die "$dir lacks kubeadm or CoreDNS: scripts/cluster --build DIR --source TREE --dns TREE"
    while read -r name; do
        program=${name##*/} program=${program%:*}
        case $program in
            etcd) ;;
            pause)
                program_image "$out/kubeadm-$program.tar" "$name" "$PAUSE" "$dir/node/bin/busybox"
                ;;
            coredns)
                program_image "$out/kubeadm-$program.tar" "$name" \
                    '{ "Entrypoint": ["/usr/local/bin/coredns"] }' "$dir/bin/$program"
                ;;
            kube-proxy)
                program_image "$out/kubeadm-$program.tar" "$name" "$PROGRAMS_PATH" \
                    "$dir/bin/$program" "$(base_layer "$dir" node)"
                ;;
            *)
                program_image "$out/kubeadm-$program.tar" "$name" "$PROGRAMS_PATH" \
                    "$dir/bin/$program"
                ;;
        esac
    done < <("$dir/bin/kubeadm" config images list --kubernetes-version "$(kubeadm_version "$dir")")
}

kubeadm_version() { "$1/bin/kubeadm" version -o short; }

# kubeadm_up DIR: init on one machine, join on the nodes.
kubeadm_up() {
    local dir=$1 number=0 node etc
    etc=$(machine_place control)/etc
    mkdir -p "$etc"
    cat >"$etc/etcd" <<END
exec etcd --data-dir /var/lib/etcd/data --unsafe-no-fsync \
    --listen-client-urls http://127.0.0.1:2379,http://$CONTROL_ADDRESS:2379 \
    --advertise-client-urls http://$CONTROL_ADDRESS:2379
END
    say "cluster: etcd"
    machine_up control "$CONTROL_ADDRESS/24" "$dir" etcd
    control_wired
    wait_until 20 "etcd" in_machine control etcdctl endpoint health
    say "cluster: kubeadm init"
    kubeadm_machine "$KUBEADM_CONTROL" "$KUBEADM_ADDRESS" "$dir"
    etc=$(machine_place "$KUBEADM_CONTROL")/etc
    kubeadm_config "$(kubeadm_version "$dir")" >"$etc/kubeadm.yaml"
    in_machine "$KUBEADM_CONTROL" kubeadm init --config /etc/kubernetes/kubeadm.yaml \
        --ignore-preflight-errors=all >"$RUN/kubeadm-init.log" 2>&1 ||
        die "kubeadm init: $(tail -n 15 "$RUN/kubeadm-init.log")"
    cp "$etc/admin.conf" "$(machine_place control)/etc/"
    for node in "${NODES[@]}"; do
        number=$((number + 1))
        say "cluster: kubeadm join, $node"
        kubeadm_machine "$node" "172.30.0.$number" "$dir"
        in_machine "$node" kubeadm join "$KUBEADM_ADDRESS:6443" --token "$KUBEADM_TOKEN" \
            --discovery-token-unsafe-skip-ca-verification --ignore-preflight-errors=all \
            --cri-socket unix:///run/containerd/containerd.sock >"$RUN/kubeadm-$node.log" 2>&1 ||
            die "kubeadm join: $(tail -n 15 "$RUN/kubeadm-$node.log")"
    done
}

# kubeadm_machine NAME ADDRESS DIR: a machine as its owner has prepared it: a runtime, the images,
# and a kubelet that waits for kubeadm.
kubeadm_machine() {
    local name=$1 address=$2 dir=$3 etc
    etc=$(machine_place "$name")/etc
    mkdir -p "$etc"
    printf '%s\n' "$CONTROL_ADDRESS" >"$etc/gateways"
    node_services "$etc" "$name" "$address"
    # As the drop-in of kubeadm's package for systemd.
    cat >"$etc/kubelet" <<END
until [[ -e /etc/kubernetes/has-images && -e /var/lib/kubelet/config.yaml ]]; do sleep 0.2; done
[[ ! -e /var/lib/kubelet/kubeadm-flags.env ]] || source /var/lib/kubelet/kubeadm-flags.env
exec kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
    --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml \
    --node-ip=$address \$KUBELET_KUBEADM_ARGS
END
    machine_up "$name" "$address/24" "$dir" containerd kubelet
    node_wired "$name"
    # kubeadm's CoreDNS does not start without somebody to ask for other names.
    in_machine "$name" bash -c "echo nameserver $OUTSIDE_ADDRESS >/etc/resolv.conf"
    load_images "$name"
}

kubeadm_config() {
    cat <<END
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{ token: $KUBEADM_TOKEN }]
localAPIEndpoint: { advertiseAddress: $KUBEADM_ADDRESS }
nodeRegistration: { criSocket: "unix:///run/containerd/containerd.sock", imagePullPolicy: Never }
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: $1
networking: { podSubnet: $POD_NETWORK, serviceSubnet: $SERVICE_NETWORK }
etcd: { external: { endpoints: ["http://$CONTROL_ADDRESS:2379"] } }
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
evictionHard: { memory.available: 50Mi }
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: { maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s }
END
}

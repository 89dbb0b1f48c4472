# shellcheck shell=bash
# The machines of scripts/cluster: processes in network, mount, UTS, IPC, PID and cgroup namespaces
# of their own, with a root of their own, on a bridge. Nothing in here has a name that the host
# sees, control groups aside: a machine's end takes its processes, mounts and devices with it.
# Source it after common.sh; it only defines.
#
#      node1 172.30.0.1      node2 172.30.0.2          control 172.30.0.254, .254 is the gateway
#           eth0 --------+--------- eth0 ----- ... -----[ eth0 ]  198.51.100.1, outside the cluster
#                        bridge of the machine "control"
#
# With --dual the same numbers at the end of fd00:30::, and outside fd00:198::1.

readonly OUTSIDE_ADDRESS=198.51.100.1
readonly OUTSIDE_ADDRESS_V6=fd00:198::1
readonly GROUPS_ROOT=/sys/fs/cgroup

CLUSTER=weft-cluster-$$
declare -A MACHINE # the first process of each machine, by name
LAUNCHERS=()

# machine_place NAME: its directory, with etc and log.
machine_place() { printf '%s/%s\n' "$RUN" "$1"; }

# machine_up NAME ADDRESSES DIR SERVICE...: starts a machine with these addresses, separated by
# commas; its services are files in etc by then.
machine_up() {
    local name=$1 addresses=$2 dir=$3 place launcher groups=()
    shift 3
    place=$(machine_place "$name")
    mkdir -p "$place"/{mnt,etc,log}
    mapfile -t groups < <(machine_groups "$name")
    # shellcheck disable=SC2016 # for that shell
    setpriv --pdeathsig KILL bash -euc '
        count=$1
        shift
        while ((count-- > 0)); do
            echo $$ >"$1/cgroup.procs"
            shift
        done
        exec unshare --cgroup --mount --uts --ipc --net --pid --fork --kill-child "$@"
    ' bash "${#groups[@]}" "${groups[@]}" \
        bash "$REPO/scripts/cluster-machine.sh" "$name" "$addresses" "$dir/node" "$place" \
        "$dir/bin" "$RUN/images" "$@" >"$place/log/machine.log" 2>&1 </dev/null &
    launcher=$!
    LAUNCHERS+=("$launcher")
    wait_until 10 "the first process of $name" first_child "$launcher" ||
        die "$name did not start: $(tail -n 3 "$place/log/machine.log")"
    MACHINE[$name]=$(first_child "$launcher")
}

# machine_groups NAME: makes a control group for it in each hierarchy of the host, and prints them.
machine_groups() {
    local hierarchy group
    awk '$3 == "cgroup" { print $2 }' /proc/mounts | while read -r hierarchy; do
        group=$hierarchy/$CLUSTER/$1
        mkdir -p "$group"
        # A group of processors begins without any.
        if [[ -e $group/cpuset.cpus ]]; then
            for file in cpuset.cpus cpuset.mems; do
                cat "$hierarchy/$file" >"$hierarchy/$CLUSTER/$file"
                cat "$hierarchy/$file" >"$group/$file"
            done
        fi
        printf '%s\n' "$group"
    done
}

# first_child PID: the only child of unshare.
first_child() {
    local children
    read -ra children <<<"$(cat "/proc/$1/task/$1/children")"
    [[ -n ${children[0]:-} ]] && printf '%s\n' "${children[0]}"
}

# in_machine NAME COMMAND...: with the machine's root, its processes and its network.
in_machine() {
    local name=$1
    shift
    nsenter --target "${MACHINE[$name]}" --mount --uts --ipc --net --pid --cgroup \
        env -i HOME=/root LANG=C.UTF-8 KUBECONFIG=/etc/kubernetes/admin.conf \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# control_wired: gives the machine of the control plane the bridge, under the name eth0, that its
# first process waits for.
control_wired() {
    nsenter --target "${MACHINE[control]}" --net bash -euc "
        ip link add eth0 type bridge
        ip address add $OUTSIDE_ADDRESS/32 dev lo
        ip address add $OUTSIDE_ADDRESS_V6/128 dev lo"
    wait_until 20 "the machine control" in_machine control test -e /run/up
}

# node_wired NAME: a cable between the node and the bridge.
node_wired() {
    ip link add eth0 netns "${MACHINE[$1]}" type veth peer name "$1" netns "${MACHINE[control]}"
    nsenter --target "${MACHINE[control]}" --net ip link set "$1" master eth0 up
    wait_until 20 "the machine $1" in_machine "$1" test -e /run/up
}

# machines_down: ends everything that was started here. Nothing in it may fail: it runs on the way
# out of a failure as well.
machines_down() {
    local pid name
    for name in "${!MACHINE[@]}"; do kill -9 "${MACHINE[$name]}" 2>/dev/null || true; done
    for pid in ${LAUNCHERS[@]+"${LAUNCHERS[@]}"}; do
        wait_until 10 "machine $pid to end" ended "$pid" || kill -9 "$pid" || true
        { wait "$pid"; } 2>/dev/null || true
    done
    MACHINE=()
    LAUNCHERS=()
    wait_until 20 "the control groups to be empty" groups_removed || true
}

ended() { ! kill -0 "$1" 2>/dev/null || [[ $(ps -o stat= -p "$1") == Z* ]]; }

# A group goes once its last process is reaped, the innermost first.
groups_removed() {
    local hierarchy
    for hierarchy in "$GROUPS_ROOT"/*/"$CLUSTER"; do
        [[ -d $hierarchy ]] || continue
        find "$hierarchy" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        [[ ! -d $hierarchy ]] || return 1
    done
}

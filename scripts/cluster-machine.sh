#!/usr/bin/env bash
# The first process of a machine of scripts/cluster, in namespaces of its own: makes the root,
# moves into it, and keeps the machine's services running. Everything that it writes is in memory,
# logs aside, and is gone with this process.
#
#   cluster-machine.sh NAME ADDRESSES ROOT PLACE PROGRAMS IMAGES SERVICE...
#
# PLACE is the machine's directory: mnt for the root, log and etc. A service is a file in etc that
# is run again whenever it ends, in the order given, each once the machine has its network.
set -euo pipefail

name=$1 addresses=$2 lower=$3 place=$4 programs=$5 images=$6
shift 6

mount_root() {
    local top=$place/mnt root=$place/mnt/root controllers
    mount -t tmpfs -o mode=755 machine "$top"
    mkdir "$top"/{upper,work,root}
    mount -t overlay -o "lowerdir=$lower,upperdir=$top/upper,workdir=$top/work" overlay "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    # Each hierarchy again, because a mount shows the namespace in which it was made.
    while read -r controllers; do
        mkdir "$root/sys/fs/cgroup/${controllers#name=}"
        mount -t cgroup -o "$controllers" cgroup "$root/sys/fs/cgroup/${controllers#name=}"
    done < <(awk -F: '$2 != "" { print $2 }' /proc/self/cgroup)
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    # An overlay can't be the upper part of an overlay.
    for directory in containerd kubelet etcd; do
        mkdir -p "$root/var/lib/$directory"
        mount -t tmpfs -o mode=755 tmpfs "$root/var/lib/$directory"
    done
    # A kubelet sets these, and they are the whole machine's.
    mkdir "$top/sysctl"
    for file in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
        kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
        cat "/proc/sys/$file" >"$top/sysctl/${file//\//.}"
        mount --bind "$top/sysctl/${file//\//.}" "$root/proc/sys/$file"
    done
    mkdir -p "$root"/{old,images,etc/kubernetes}
    mount --bind "$programs" "$root/usr/local/bin"
    mount --bind "$images" "$root/images"
    mount --bind "$place/etc" "$root/etc/kubernetes"
    mount --bind "$place/log" "$root/var/log"
    cd "$root"
    pivot_root . old
    umount --lazy /old
    rmdir /old
    # A kubelet hands mounts on to containers.
    mount --make-rshared /
}

# keep NAME: the service again and again; a person or a case ends it with pkill.
keep() {
    while :; do
        bash "/etc/kubernetes/$1" >>"/var/log/$1.log" 2>&1 || true
        echo "-- $1 ended" >>"/var/log/$1.log"
        sleep 1
    done
}

mount_root
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
hostname "$name"
echo "$name" >/etc/hostname
printf '127.0.0.1 localhost\n%s %s\n' "${addresses%%/*}" "$name" >/etc/hosts
md5sum <<<"$name $$ $(date +%N)" | cut -c 1-32 >/etc/machine-id
: >/etc/resolv.conf
ip link set lo up
until [[ -e /sys/class/net/eth0 ]]; do sleep 0.05; done
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
ip link set eth0 up
for address in ${addresses//,/ }; do ip address add "$address" dev eth0 nodad; done
[[ ! -e /etc/kubernetes/gateways ]] ||
    while read -r gateway; do ip route add default via "$gateway"; done </etc/kubernetes/gateways
for service in "$@"; do keep "$service" & done
touch /run/up
# Children that nobody waits for are this process's; the shell reaps them.
while :; do
    sleep 60 &
    wait $! || true
done

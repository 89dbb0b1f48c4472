#!/usr/bin/env bash
# Runs in a Debian that systemd has booted, with two versions of the package: installs, upgrades under
# traffic, removes and purges. Started by scripts/release and by a test; changes the whole system.
#
#   release-installed.sh OLD NEW
set -euo pipefail
old=$1 new=$2
readonly STORE=/var/lib/weft PEER=172.20.0.2

fail() {
    echo "FAILED: $*"
    journalctl --unit weftd --no-pager | tail -n 20
    exit 1
}

# soon WHAT COMMAND...
soon() {
    local what=$1 end=$((SECONDS + 60))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || fail "no $what within a minute"
        sleep 0.1
    done
}

# left: files and directories of the package, and what weftd makes.
left() {
    find /etc /opt /run /usr/bin /usr/lib/systemd /usr/lib/tmpfiles.d /usr/libexec /usr/share/doc \
        /usr/share/man /usr/share/bash-completion /usr/share/zsh /usr/share/fish /var/lib \
        \( -path /var/lib/dpkg -o -path /var/lib/apt \) -prune -o \
        \( -iname '*weft*' -o -iname '*flannel*' \) -print 2>/dev/null | sort
    ip -o link | grep -o 'flannel[^:@]*' || true
    nft list ruleset 2>/dev/null | grep -io 'flannel[-a-z]*' | sort -u || true
    systemctl list-unit-files --no-legend 'weft*'
}

peer_up() {
    ip netns add peer
    ip link add eth9 type veth peer name eth0 netns peer
    ip link set eth9 up
    ip address add 172.20.0.1/24 dev eth9
    ip -n peer link set lo up
    ip -n peer link set eth0 up
    ip -n peer address add "$PEER/24" dev eth0
    mkdir -p /tmp/peer
    # A copy, so that no other program than the unit's is replaced.
    cp /usr/bin/weftd /tmp/peer/node
    ip netns exec peer /tmp/peer/node --local-store="$STORE" --iface=eth0 \
        --iptables-forward-rules=false --subnet-file=/tmp/peer/subnet.env >/tmp/peer/log 2>&1 &
    peer=$!
    soon "lease of the peer" test -s /tmp/peer/subnet.env
}

# docker_up DROP_IN: a program that has nothing to do with weft, by Docker's name and with its drop-in.
docker_up() {
    local units=/run/systemd/system
    mkdir -p "$units/docker.service.d"
    printf '[Service]\nExecStart=/bin/false\n' >"$units/docker.service"
    sed 's/^ExecStart=dockerd .*/ExecStart=sleep infinity/' "$1" \
        >"$units/docker.service.d/weft.conf"
    systemctl daemon-reload
    systemctl enable --quiet weft-docker-opts
    systemctl start docker || fail "Docker does not start with weft"
    [[ -s /run/docker_opts.env ]] || fail "Docker was started without its options"
}

docker_down() {
    systemctl stop docker weft-docker-opts
    rm -r /run/systemd/system/docker.service*
    systemctl daemon-reload
}

# lost: of the pings in /tmp/pings, how many got an answer and how many none. What was on its way at
# the end does not count.
lost() {
    awk -F 'icmp_seq=' '/icmp_seq=/ { number = $2 + 0; seen[number] = 1
            if (number > last) last = number }
        END { for (number = 1; number <= last - 2; number++)
                if (number in seen) answered++; else lost++
            print answered + 0, lost + 0 }' /tmp/pings
}

before=$(left)
dpkg -i "$old" >/dev/null
for word in weftd:8 weft:1 weft-status:1; do
    [[ -s /usr/share/man/man${word#*:}/${word%:*}.${word#*:}.gz ]] || fail "no manual page $word"
done
bash -n /usr/share/bash-completion/completions/weft || fail "completions of bash"
[[ $(systemctl is-active weftd) == inactive ]] || fail "weftd was started by the installation"
[[ $(systemctl is-enabled weftd) == disabled ]] || fail "weftd was enabled by the installation"
[[ $(stat -c %a /etc/default/weftd) == 600 ]] || fail "the mode of /etc/default/weftd"
[[ $(stat -c %a "$STORE") == 755 ]] || fail "the mode of $STORE"

echo '{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}' >"$STORE/config"
echo 'FLANNELD_LOCAL_STORE=/var/lib/weft' >>/etc/default/weftd
echo 'FLANNELD_IFACE=eth9' >>/etc/default/weftd
peer_up
systemctl enable --quiet --now weftd || fail "weftd does not start"
far=$(sed -n 's/^FLANNEL_SUBNET=\(.*\)\.1\/.*/\1.0/p' /tmp/peer/subnet.env)
soon "answer through the tunnel" ping -n -c 1 -W 1 "$far"

first=$(systemctl show weftd -p MainPID --value)
# ping's socket holds some 170 answers, and ping itself loses what comes beyond them while it does
# not run. At this pace those are more seconds than any restart lasts.
ping -n -i 0.1 "$far" >/tmp/pings &
pinging=$!
sleep 1
dpkg -i "$new" >/dev/null
soon "weftd after the upgrade" systemctl is-active weftd
sleep 1
kill -INT "$pinging"
wait "$pinging" || true
second=$(systemctl show weftd -p MainPID --value)
[[ $first != "$second" ]] || fail "the upgrade did not restart weftd"
[[ $(readlink "/proc/$second/exe") == /usr/bin/weftd ]] || fail "an old program runs"
grep -q '^FLANNELD_IFACE=eth9$' /etc/default/weftd || fail "the upgrade lost the configuration"
read -r answered lost < <(lost)
((answered >= 10 && lost == 0)) || fail "upgrade: $answered pings answered, $lost lost"
echo "upgrade: $answered pings answered, $lost lost"

docker_up /usr/share/doc/weft/deploy/systemd/docker-weft.conf
docker=$(systemctl show docker -p MainPID --value)
dpkg -r weft >/dev/null
[[ ! -e /usr/bin/weftd && ! -e /proc/$second ]] || fail "weftd is still there"
[[ $(systemctl show docker -p MainPID --value) == "$docker" ]] || fail "the removal stopped Docker"
# As after a boot.
rm /run/docker_opts.env
systemctl restart docker || fail "Docker does not start without weft"
docker_down
[[ -e /etc/default/weftd ]] || fail "the removal took the configuration"
ip link show flannel0 >/dev/null 2>&1 && fail "the removal left the tunnel"
dpkg -i "$new" >/dev/null
systemctl start weftd
soon "answer through the tunnel" ping -n -c 1 -W 1 "$far"
systemctl stop weftd
weft cleanup >/dev/null
kill "$peer"
wait "$peer" || fail "the peer ended badly"
ip netns delete peer
rm -rf /tmp/peer
dpkg -P weft >/dev/null
after=$(left)
[[ $before == "$after" ]] || fail "the purge left: $(diff <(echo "$before") <(echo "$after"))"
echo "purge: nothing is left"
echo "== all is well"

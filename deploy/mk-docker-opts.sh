#!/usr/bin/env bash
# Turns weftd's subnet.env into options of the Docker daemon, as flannel's script of this name
# does: the same options, the same lines. Nothing that it reads is executed.
set -euo pipefail
export LC_ALL=C

usage() {
    cat >&2 <<'END'
usage: mk-docker-opts.sh [-f FILE] [-d FILE] [-i] [-c] [-m] [-k KEY]
  -f FILE  read the subnet from here (/run/flannel/subnet.env)
  -d FILE  write the options there (/run/docker_opts.env)
  -i       only one variable per option: DOCKER_OPT_BIP, DOCKER_OPT_IPMASQ, DOCKER_OPT_MTU,
           and with IPv6 DOCKER_OPT_FIXED_CIDR_V6 and DOCKER_OPT_IPV6
  -c       only one variable with all options; neither -i nor -c is both
  -k KEY   the name of the variable with all options (DOCKER_OPTS)
  -m       leave out --ip-masq
END
    exit 1
}

die() {
    echo "mk-docker-opts.sh: $*" >&2
    exit 1
}

# setting NAME: the last line of the subnet file that sets it, else the environment.
setting() {
    local name=$1 line value=${!1-}
    [[ -f $subnet_file ]] || {
        printf '%s' "$value"
        return
    }
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line#export }
        [[ $line == "$name="* ]] || continue
        value=${line#*=}
        case $value in
            \"*\") value=${value#\"} value=${value%\"} ;;
            \'*\') value=${value#\'} value=${value%\'} ;;
        esac
    done <"$subnet_file"
    printf '%s' "$value"
}

# network_of A.B.C.D/LENGTH: the same with the host's bits cleared; fails on anything else.
network_of() {
    local a b c d length part bits mask
    IFS=./ read -r a b c d length <<<"$1"
    for part in "$a" "$b" "$c" "$d"; do
        [[ $part =~ ^[0-9]{1,3}$ ]] && ((10#$part <= 255)) || return 1
    done
    [[ $length =~ ^[0-9]{1,2}$ ]] && ((10#$length <= 32)) || return 1
    bits=$(((10#$a << 24) | (10#$b << 16) | (10#$c << 8) | 10#$d))
    mask=$(((0xffffffff << (32 - 10#$length)) & 0xffffffff))
    bits=$((bits & mask))
    printf '%d.%d.%d.%d/%d' $((bits >> 24)) $((bits >> 16 & 255)) $((bits >> 8 & 255)) \
        $((bits & 255)) "$((10#$length))"
}

# is_ipv6 ADDRESS/LENGTH: as far as its characters tell; ip knows better below.
is_ipv6() {
    [[ $1 =~ ^[0-9A-Fa-f:]{2,39}/([0-9]{1,3})$ && $1 == *:*:* ]] && ((10#${BASH_REMATCH[1]} <= 128))
}

# A bridge with a subnet that this host reaches through another would draw its traffic.
# refuse_foreign_route 4|6 NETWORK
refuse_foreign_route() {
    local family=$1 network=$2 routes
    if ! command -v ip >/dev/null; then
        echo "mk-docker-opts.sh: no ip program: routes to $network were not looked for" >&2
        return
    fi
    routes=$(ip "-$family" route show exact "$network") || die "ip cannot tell the routes to $network"
    [[ $routes != *" via "* ]] ||
        die "$network is this host's subnet, yet routed elsewhere (${routes%%$'\n'*}): remove the route"
}

# quoted NAME VALUE: the line NAME="VALUE"; some values would end the quotes.
quoted() {
    [[ $2 != *[\"\`\$\\]* && $2 != *$'\n'* ]] ||
        die "the value of $1 has a quote, a backslash, \$ or a line break in it: not written"
    printf '%s="%s"\n' "$1" "$2"
}

subnet_file=/run/flannel/subnet.env
options_file=/run/docker_opts.env
combined_name=DOCKER_OPTS
individual=no combined=no masquerade=yes
while getopts f:d:icmk: option; do
    case $option in
        f) subnet_file=$OPTARG ;;
        d) options_file=$OPTARG ;;
        i) individual=yes ;;
        c) combined=yes ;;
        m) masquerade=no ;;
        k) combined_name=$OPTARG ;;
        *) usage ;;
    esac
done
[[ $individual$combined != nono ]] || individual=yes combined=yes
[[ $combined_name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "-k $combined_name is no variable's name"

subnet=$(setting FLANNEL_SUBNET)
subnet_v6=$(setting FLANNEL_IPV6_SUBNET)
mtu_bytes=$(setting FLANNEL_MTU)
ip_masq=$(setting FLANNEL_IPMASQ)
if [[ -n $subnet ]]; then
    network=$(network_of "$subnet") || die "FLANNEL_SUBNET is $subnet, no IPv4 address and length"
    refuse_foreign_route 4 "$network"
    # shellcheck disable=SC2034 # found by its name below, as the others
    DOCKER_OPT_BIP=--bip=$subnet
fi
if [[ -n $subnet_v6 ]]; then
    is_ipv6 "$subnet_v6" || die "FLANNEL_IPV6_SUBNET is $subnet_v6, no IPv6 address and length"
    refuse_foreign_route 6 "$subnet_v6"
    # shellcheck disable=SC2034
    DOCKER_OPT_IPV6=--ipv6 DOCKER_OPT_FIXED_CIDR_V6=--fixed-cidr-v6=$subnet_v6
fi
if [[ -n $mtu_bytes ]]; then
    [[ $mtu_bytes =~ ^[0-9]{1,5}$ ]] || die "FLANNEL_MTU is $mtu_bytes, no number"
    # shellcheck disable=SC2034
    DOCKER_OPT_MTU=--mtu=$mtu_bytes
fi
if [[ -n $ip_masq && $masquerade == yes ]]; then
    # One of the two masquerades, and never both.
    # shellcheck disable=SC2034
    case $ip_masq in
        true) DOCKER_OPT_IPMASQ=--ip-masq=false ;;
        false) DOCKER_OPT_IPMASQ=--ip-masq=true ;;
        *) die "FLANNEL_IPMASQ is $ip_masq, neither true nor false" ;;
    esac
fi

# DOCKER_OPT_ variables of the environment are options too; the expansion sorts the names.
lines='' all=${!combined_name-}
all=${all:+$all }
for name in ${!DOCKER_OPT_@}; do
    [[ $individual == no ]] || lines+=$(quoted "$name" "${!name}")$'\n'
    all+=" ${!name}"
done
[[ $combined == no ]] || lines+=$(quoted "$combined_name" "$all")$'\n'

# Whole or as it was; what is a link or no file, such as /dev/stdout, is written to.
if [[ -L $options_file || (-e $options_file && ! -f $options_file) ]]; then
    printf '%s' "$lines" >"$options_file"
    exit
fi
temporary=$(mktemp -- "$options_file.XXXXXX")
trap 'rm -f -- "$temporary"' EXIT
printf '%s' "$lines" >"$temporary"
chmod 644 -- "$temporary"
mv -f -- "$temporary" "$options_file"

# shellcheck shell=bash
# Shared by the scripts: where the repository is, how to speak, how to wait, where cargo is.
# Source it; it only defines.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export REPO

# Progress for people goes to stderr, so that stdout carries results only.
say() { printf '%s\n' "$*" >&2; }

die() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

need_root() {
    [[ $EUID -eq 0 ]] || die "$1 needs root; run it as root or with sudo -E"
}

# wait_until SECONDS WHAT COMMAND...: polls COMMAND until it succeeds. On an emulated machine
# SLOWNESS multiplies the limit.
wait_until() {
    local limit_s=$(($1 * ${SLOWNESS:-1})) what=$2 end
    shift 2
    end=$((SECONDS + limit_s))
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= end)); then
            say "gave up after $limit_s s waiting for $what"
            return 1
        fi
        sleep 0.05
    done
}

# weft_version: as Cargo.toml says.
weft_version() {
    sed -n '/^\[package\]/,/^\[/ s/^version = "\(.*\)"$/\1/p' "$REPO/Cargo.toml"
}

# rustup's default place is on the PATH of login shells only.
find_cargo() {
    command -v cargo >/dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    command -v cargo >/dev/null || die "cargo not found; install rustup from https://rustup.rs"
}

# release_programs ARGUMENT...: has cargo make what users install, in the current directory's project.
# weft-cni runs on the nodes themselves, whatever C library they have, and is linked statically.
release_programs() {
    cargo build --release --locked "$@" --bin weftd --bin weft &&
        cargo rustc --release --locked "$@" --bin weft-cni -- -C target-feature=+crt-static
}

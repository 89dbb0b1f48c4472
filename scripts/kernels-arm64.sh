# shellcheck shell=bash
# arm64 for scripts/kernels: programs compiled across, and in place of this machine's root one of
# Debian's packages, unpacked and not configured. Source it after kernels-fetch.sh; it only defines.

readonly ARM64_TARGET=aarch64-unknown-linux-gnu
# Where the guest sees this machine's files.
readonly ARM64_HOST=/host
# What scripts/kernels-guest.sh and the unit tests run; apt adds what these depend on. The C library
# is newer than the one that the programs are linked with here.
readonly ARM64_PACKAGES=(
    base-files bash busybox-static coreutils dash diffutils findutils grep iproute2 iputils-ping
    jq kmod libc-bin libgcc-s1 mount procps sed socat util-linux
)

# build_arm64: weftd, weft and the unit tests, into the directory that programs then names. A debug
# build, so that assertions are tried there too.
build_arm64() {
    local target=${CARGO_TARGET_DIR:-$REPO/target} tests
    programs=$target/$ARM64_TARGET/debug
    (
        cd "$REPO" &&
            rustup --quiet target add "$ARM64_TARGET" &&
            export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc &&
            # Emulated code is slow enough.
            export CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_TARGET_DIR=$target &&
            cargo build --locked --quiet --target "$ARM64_TARGET" --bins &&
            cargo test --locked --quiet --target "$ARM64_TARGET" --lib --no-run \
                --message-format json >"$target/unit-tests.json"
    ) || die "the build failed"
    tests=$(jq -r '.executable // empty' "$target/unit-tests.json")
    rm "$target/unit-tests.json"
    [[ -x $tests ]] || die "cargo made no unit tests: $tests"
    cp "$tests" "$programs/unit-tests"
}

# get_arm64 SUITE DIR PART: kernel, modules and initramfs, and the root in DIR/root.
get_arm64() {
    local suite=$1/arm64 part=$3 root=$3/root package
    say "kernels: fetching from Debian's $suite: a root"
    mkdir -p "$part/packages/partial" "$root$ARM64_HOST"
    apt_of "$suite" apt-get -qq --yes --no-install-recommends --download-only \
        -o "Dir::Cache::archives=$part/packages" install "${ARM64_PACKAGES[@]}" >&2 ||
        die "cannot fetch a root"
    for package in "$part"/packages/*.deb; do dpkg-deb --extract "$package" "$root"; done
    rm -r "$part/packages"
    get_kernel "$suite" "$part" linux-image-arm64 "$root/usr/bin/busybox" \
        host=/host "machine=/host$ARM64_HOST"
    mv "$part" "$2"
}

# boot_arm64 DIR CONSOLE VARIABLE...
boot_arm64() {
    emulate "${GUEST_LIMIT_S[arm64]}" "$1" "$2" \
        "console=ttyAMA0 LAB_INIT=$ARM64_HOST$REPO/scripts/kernels-guest.sh ${*:3}" \
        qemu-system-aarch64 -machine virt -cpu cortex-a72 \
        -virtfs "$(shared "$1/root" host)" -virtfs "$(shared / machine)"
}

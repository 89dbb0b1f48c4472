# shellcheck shell=bash
# The programs of a release, their manual pages and completions. Source it after common.sh; it only
# defines.

# The newest glibc that the programs may ask for. Debian 12 has 2.36, where a release is built.
readonly GLIBC=2.34
# Of one program, stripped.
readonly PROGRAM_BYTES_MAX=$((16 * 1024 * 1024))

# tool TARGET NAME: a program of binutils or gcc for TARGET.
tool() {
    if [[ $1 == "$(uname -m)"-* ]]; then echo "$2"; else echo "${1/-unknown/}-$2"; fi
}

# build_programs TARGET SCRATCH: the programs as cargo makes them, the same from the same sources
# wherever those and cargo's own directory lie. Prints the directory that they are in.
build_programs() {
    local target=$1 scratch=$2 home=${CARGO_HOME:-$HOME/.cargo} flags build_std=() linker
    # What build scripts generate lies in SCRATCH, whose name is another each time; of several that
    # fit the last counts. The linker's identifier leads a debugger from the program to its symbols.
    flags=(
        "--remap-path-prefix=$home=/cargo" "--remap-path-prefix=$REPO=/weft"
        "--remap-path-prefix=$scratch=/build" '-Clink-arg=-Wl,--build-id=sha1'
    )
    linker=CARGO_TARGET_${target^^}_LINKER
    linker=${linker//-/_}
    if [[ ! -e $(echo "$(rustc --print target-libdir --target "$target")"/libstd-*.rlib) ]]; then
        [[ -d ${WEFT_RUST_LIBRARY:-} ]] || die "no standard library for $target: rustup target add \
$target, or WEFT_RUST_LIBRARY names the directory library/ of this compiler's sources"
        build_std=('-Zbuild-std=std,panic_abort')
        flags+=("--remap-path-prefix=$WEFT_RUST_LIBRARY=/rust")
        # The compiler's own sources may use what is not stable; cargo builds nothing else by it.
        export RUSTC_BOOTSTRAP=1 __CARGO_TESTS_ONLY_SRC_ROOT=$WEFT_RUST_LIBRARY
    fi
    (
        unset RUSTC_WRAPPER RUSTC_WORKSPACE_WRAPPER RUSTFLAGS
        cd "$REPO" || exit
        CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && printf '%s' "${flags[*]}")
        CFLAGS="-ffile-prefix-map=$home=/cargo -ffile-prefix-map=$REPO=/weft \
-ffile-prefix-map=$scratch=/build"
        export CARGO_ENCODED_RUSTFLAGS CFLAGS "$linker=$(tool "$target" gcc)"
        release_programs "${build_std[@]}" --target "$target" --target-dir "$scratch" >&2
    ) || die "the programs cannot be built"
    printf '%s\n' "$scratch/$target/release"
}

# split_programs TARGET FROM TO: into TO/bin the programs without symbols, into TO/debug the symbols, where
# debuggers look for them.
split_programs() {
    local from=$2 to=$3 objcopy program id place bytes
    objcopy=$(tool "$1" objcopy)
    mkdir -p "$to/bin"
    for program in weftd weft weft-cni; do
        id=$(readelf --notes "$from/$program" | sed -n 's/.*Build ID: //p')
        [[ $id =~ ^[0-9a-f]{40}$ ]] || die "$program has no build ID"
        place=$to/debug/usr/lib/debug/.build-id/${id::2}/${id:2}.debug
        mkdir -p "${place%/*}"
        "$objcopy" --only-keep-debug --compress-debug-sections "$from/$program" "$place"
        chmod 644 "$place"
        "$objcopy" --strip-all "$from/$program" "$to/bin/$program"
        bytes=$(stat --format %s "$to/bin/$program")
        say "release: $program has $bytes bytes"
        ((bytes <= PROGRAM_BYTES_MAX)) || die "$program has more than $PROGRAM_BYTES_MAX bytes"
    done
}

# check_floor PROGRAM: fails if it needs a newer glibc, or another library.
check_floor() {
    local needs newest
    newest=$(readelf -W --version-info "$1" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
    newest=${newest#GLIBC_}
    [[ $(printf '%s\n' "$newest" "$GLIBC" | sort -V | tail -n 1) == "$GLIBC" ]] ||
        die "${1##*/} asks for glibc $newest; a release is built where it is $GLIBC or older"
    needs=$(readelf -W --dynamic "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vxE 'lib(c|m|gcc_s)\.so\.[0-9]+|ld-linux-[a-z0-9_-]+\.so\.[0-9]+' || true)
    [[ -z $needs ]] || die "${1##*/} needs other libraries: $needs"
    say "release: ${1##*/} needs glibc $newest"
}

# check_static PROGRAM: fails if it needs a loader, and so libraries, of the machine that it runs on.
check_static() {
    readelf -W --program-headers "$1" >"$1.headers"
    ! grep -q INTERP "$1.headers" || die "${1##*/} is not linked statically"
    rm "$1.headers"
}

# build_words BIN TO: manual pages and completions, by the programs in BIN.
build_words() {
    local bin=$1 to=$2
    mkdir -p "$to/man/man1" "$to/man/man8" "$to"/{bash,zsh,fish}
    "$bin/weft" man "$to/man/man1" >/dev/null
    daemon_page "$bin/weftd" >"$to/man/man8/weftd.8"
    "$bin/weft" completions bash >"$to/bash/weft"
    "$bin/weft" completions zsh >"$to/zsh/_weft"
    "$bin/weft" completions fish >"$to/fish/weft.fish"
}

# daemon_page WEFTD: weftd.8, with the options that it says it has.
daemon_page() {
    local options page
    # Go's form: an option and its value's name, then in the next line what it means.
    options=$("$1" --help 2>&1 | sed '1d; s/\\/\\e/g; s/-/\\-/g' | awk '
        /^  / && !/^    / { print ".TP"; sub(/^  \\-/, ""); name = $1; $1 = ""
            printf ".B \\-\\-%s%s\n", name, $0; next }
        { sub(/^[ \t]+/, ""); print }')
    page=$(<"$REPO/deploy/debian/weftd.8")
    page=${page//@VERSION@/$(weft_version)}
    printf '%s\n' "${page//@OPTIONS@/"$options"}"
}

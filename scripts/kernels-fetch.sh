# shellcheck shell=bash
# Kernels for scripts/kernels, from the packages of several Debian releases, none of which is
# installed. Source it after common.sh; it only defines. Whole or not there: what is fetched is
# put together in a folder PART, on the same file system, and gets its name DIR last.

readonly CACHE=${CARGO_TARGET_DIR:-$REPO/target}/kernels
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# apt_of SUITE[/ARCHITECTURE] COMMAND...: apt with nothing of this machine but its mirror of Debian.
apt_of() {
    local suite=${1%/*} architecture=amd64 place=$CACHE/apt-${1/\//-} mirror
    [[ $1 != */* ]] || architecture=${1#*/}
    shift
    if [[ ! -e $place/updated ]]; then
        mkdir -p "$place"/{etc/apt.conf.d,etc/preferences.d,state/lists/partial}
        mkdir -p "$place/cache/archives/partial"
        # shellcheck disable=SC2016 # apt's own variable
        mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
            'Origin: Debian' 'Label: Debian' | head -n 1)
        [[ -n $mirror ]] || die "apt knows no mirror of Debian; run apt-get update"
        printf 'deb [signed-by=%s] %s %s main\n' "$KEYRING" "$mirror" "$suite" \
            >"$place/etc/sources.list"
        # A mirror may be behind, and the oldest release is not always signed again in time.
        cat >"$place/apt.conf" <<END
Dir::Etc "$place/etc";
Dir::State "$place/state";
Dir::State::status "/dev/null";
Dir::Cache "$place/cache";
APT::Architecture "$architecture";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
Acquire::Check-Valid-Until "false";
END
        APT_CONFIG=$place/apt.conf apt-get -qq update ||
            die "no lists of Debian's $suite, $architecture"
        touch "$place/updated"
    fi
    APT_CONFIG=$place/apt.conf "$@"
}

# unpack SUITE[/ARCHITECTURE] DIR PACKAGE...: the files of these packages below DIR.
unpack() {
    local suite=$1 dir=$2 package
    shift 2
    say "kernels: fetching from Debian's $suite: $*"
    mkdir -p "$dir/packages"
    (cd "$dir/packages" && apt_of "$suite" apt-get -qq download "$@") || die "cannot fetch $*"
    for package in "$dir"/packages/*.deb; do dpkg-deb --extract "$package" "$dir"; done
    rm -r "$dir/packages"
}

# get_uml SUITE DIR PART: a root for linux.uml: the kernel, its C library, and places for what is
# mounted there; DIR/modules is a root for modprobe.
get_uml() {
    local suite=$1 part=$3
    unpack "$suite" "$part" user-mode-linux libc6 libgcc-s1
    [[ -e $part/lib64 ]] || ln -s usr/lib64 "$part/lib64"
    mkdir -p "$part"/{proc,dev,tmp,host,modules/lib}
    mv "$part/usr/lib/uml/modules" "$part/modules/lib/"
    depmod -b "$part/modules" "$(ls "$part/modules/lib/modules")"
    mv "$part" "$2"
}

# get_qemu SUITE DIR PART: kernel, modules, and an initramfs that mounts this machine's root.
get_qemu() {
    get_kernel "$1" "$3" linux-image-amd64 "$(command -v busybox)" host=/host
    mv "$3" "$2"
}

# get_kernel SUITE[/ARCHITECTURE] DIR PACKAGE BUSYBOX TAG=PLACE...: kernel, modules, and an
# initramfs that mounts what QEMU shares.
get_kernel() {
    local suite=$1 part=$2 image packages version
    image=$(apt_of "$suite" apt-cache depends "$3" | grep -o 'linux-image-[0-9].*')
    # Newer releases have the kernel and its modules in packages of their own.
    packages=$(apt_of "$suite" apt-cache depends "$image" |
        grep -oE 'linux-(binary|modules)-[0-9].*' || true)
    # shellcheck disable=SC2086 # a list
    unpack "$suite" "$part" "$image" $packages
    mkdir "$part/modules"
    mv "$part/lib" "$part/modules/" 2>/dev/null || mv "$part/usr/lib" "$part/modules/"
    version=$(ls "$part/modules/lib/modules")
    depmod -b "$part/modules" "$version"
    # In /boot, or beside the modules.
    find "$part" -name "vmlinuz*" -type f -exec mv {} "$part/vmlinuz" \;
    make_initramfs "$part" "$version" "${@:4}"
}

# make_initramfs DIR VERSION BUSYBOX TAG=PLACE...
make_initramfs() {
    local dir=$1 version=$2 root=$1/initramfs module name share
    mkdir -p "$root"/{proc,host}
    cp "$3" "$root/busybox"
    {
        echo '#!/busybox sh'
        modprobe -d "$dir/modules" -S "$version" -a --show-depends \
            virtio_pci virtio_rng 9pnet_virtio 9p |
            awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
            name=$(basename "${module%.ko*}").ko
            case $module in
                *.xz) xz -dc "$module" ;;
                *.zst) zstd -dqc "$module" ;;
                *) cat "$module" ;;
            esac >"$root/$name"
            echo "/busybox insmod /$name"
        done
        echo 'options=ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000'
        for share in "${@:4}"; do
            echo "/busybox mount -t 9p -o \$options ${share/=/ }"
        done
        echo '/busybox mount -t devtmpfs devtmpfs /host/dev'
        # shellcheck disable=SC2016 # from the kernel's command line
        echo 'exec /busybox switch_root /host "$LAB_INIT"'
    } >"$root/init"
    chmod +x "$root/init"
    (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$dir/initramfs.gz"
}

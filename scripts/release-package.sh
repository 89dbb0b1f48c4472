# shellcheck shell=bash
# What is installed from the programs of a release: the tree below /, as a Debian package and as an
# archive. Source it after release-build.sh; it only defines.

# install_tree BIN WORDS TREE: everything but what only a package manager reads.
install_tree() {
    local bin=$1 words=$2 tree=$3 file
    install -D -m 755 -t "$tree/usr/bin" "$bin"/{weftd,weft,weft-cni}
    install -D -m 755 -t "$tree/usr/libexec/weft" "$REPO/deploy/mk-docker-opts.sh"
    install -D -m 644 -t "$tree/usr/lib/systemd/system" "$REPO"/deploy/systemd/*.service
    install -D -m 644 "$REPO/deploy/debian/tmpfiles.conf" "$tree/usr/lib/tmpfiles.d/weft.conf"
    # It may hold the password of etcd.
    install -D -m 600 "$REPO/deploy/systemd/weftd.default" "$tree/etc/default/weftd"
    for file in "$words"/man/man?/*; do
        install -D -m 644 "$file" "$tree/usr/share/man/${file#"$words/man/"}"
        gzip -9n "$tree/usr/share/man/${file#"$words/man/"}"
    done
    install -D -m 644 -t "$tree/usr/share/bash-completion/completions" "$words/bash/weft"
    install -D -m 644 -t "$tree/usr/share/zsh/vendor-completions" "$words/zsh/_weft"
    install -D -m 644 -t "$tree/usr/share/fish/vendor_completions.d" "$words/fish/weft.fish"
    install_documents "$tree/usr/share/doc/weft"
}

# install_documents PLACE: the pages as they lie in the repository, so that their links work.
install_documents() {
    local place=$1 page
    for page in README.md SECURITY.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE \
        'docs/*.md' deploy/README.md; do
        # shellcheck disable=SC2086 # a pattern of one page or many
        (cd "$REPO" && install -D -m 644 --target-directory "$place/$(dirname "$page")" $page)
    done
    install -D -m 644 -t "$place/deploy/systemd" "$REPO/deploy/systemd/docker-weft.conf"
    install -D -m 644 -t "$place/deploy/kubernetes" "$REPO/deploy/kubernetes/weft.yml"
    install -D -m 644 -t "$place/deploy/prometheus" "$REPO"/deploy/prometheus/*
}

# same_times TREE: no file is younger than the release.
same_times() {
    find "$1" -newermt "@$SOURCE_DATE_EPOCH" \
        -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}

# debian_package TREE ARCHITECTURE MAINTAINER OUT: TREE becomes a package in the directory OUT, whose
# path is printed. WEFT_PACKAGE_COMPRESSION is for tests, which have no time for xz.
debian_package() {
    local tree=$1 architecture=$2 maintainer=$3 out=$4 script size
    printf 'weft (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' \
        "${PACKAGE_VERSION:-$(weft_version)}" "$maintainer" \
        "$(LC_ALL=C date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")" |
        gzip -9n >"$tree/usr/share/doc/weft/changelog.gz"
    rm "$tree/usr/share/doc/weft/LICENSE"
    install -m 644 "$REPO/deploy/debian/copyright" "$tree/usr/share/doc/weft/copyright"
    mkdir -p "$tree/DEBIAN"
    (cd "$tree" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
    install -m 644 -t "$tree/DEBIAN" "$REPO/deploy/debian/conffiles"
    for script in postinst prerm postrm; do
        install -m 755 -t "$tree/DEBIAN" "$REPO/deploy/debian/$script"
    done
    size=$(du --apparent-size --summarize --block-size=1K --exclude DEBIAN "$tree" | cut -f 1)
    sed -e "s/@VERSION@/${PACKAGE_VERSION:-$(weft_version)}/" -e "s/@ARCHITECTURE@/$architecture/" \
        -e "s/@SIZE@/$size/" -e "s/@GLIBC@/$GLIBC/" -e "s/@MAINTAINER@/$maintainer/" \
        "$REPO/deploy/debian/control" >"$tree/DEBIAN/control"
    same_times "$tree"
    dpkg-deb --root-owner-group -Z"${WEFT_PACKAGE_COMPRESSION:-xz}" --build "$tree" "$out" >&2
    printf '%s\n' "$out/weft_${PACKAGE_VERSION:-$(weft_version)}_$architecture.deb"
}

# archive TREE FILE TOP: a tar.xz, with TOP in front of each name.
archive() {
    same_times "$1"
    plain_archive "$1" "$3" | xz -T1 -6 >"$2"
}

# plain_archive TREE TOP: a tar, with TOP in front of each name, to standard output.
plain_archive() {
    tar -C "$1" --sort=name --owner=0 --group=0 --numeric-owner --format=gnu \
        --transform="flags=r;s,^\\.,$2," -cf - .
}

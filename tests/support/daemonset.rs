//! What flannel's DaemonSet makes of a node.

/// The container's view of its node, for `sh -c`: own `/etc/kube-flannel` and `/run`, both below
/// `$1`. `$2`, if it is there, is taken away. The rest is what runs in it.
pub(crate) const CONTAINER: &str = r#"set -e
    mkdir -p "$1/upper" "$1/run/flannel"
    mount -t tmpfs tmpfs "$1/upper"
    mkdir "$1/upper/u" "$1/upper/w"
    mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/upper/u,workdir=$1/upper/w" /etc
    mkdir -p /etc/kube-flannel
    cp "$1/net-conf.json" /etc/kube-flannel/
    mount --bind "$1/run" /run
    if [ -n "$2" ] && [ -d "$2" ]; then mount -t tmpfs tmpfs "$2"; fi
    shift 2
    exec "$@""#;

# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables of scripts/cluster and its other files
# Another version of weft in the cluster beside this one: built from its commit, with its own
# manifest. Source it after cluster-cases.sh; it only defines.

readonly OLD_IMAGE=weft:old
# The tree of the other version, once it is there.
OLD_TREE=

# old_version DIR COMMIT: its programs, kept in DIR/old for the next time, and its image in DIR/old.
old_version() {
    local dir=$1/old commit
    commit=$(git -C "$REPO" rev-parse --verify --quiet "$2^{commit}") ||
        die "--old $2: there is no such commit"
    OLD_TREE=$dir/$commit
    if [[ ! -e $OLD_TREE.tar ]]; then
        say "cluster: weft of $2"
        mkdir -p "$OLD_TREE"
        git -C "$REPO" archive "$commit" | tar -C "$OLD_TREE" -x
        (cd "$OLD_TREE" && CARGO_TARGET_DIR=$dir/target cargo build --quiet --release --locked --bins)
        of_old weft_layer "$dir/target/release" "$OLD_TREE.layer"
        image "$OLD_TREE.tar" "$OLD_IMAGE" "$(of_old weft_config)" \
            "$(base_layer "$1" image)" "$OLD_TREE.layer"
        rm "$OLD_TREE.layer"
    fi
    cp --reflink=auto "$OLD_TREE.tar" "$RUN/images/weft-old.tar"
}

# of_old COMMAND...: with what the other version has in its repository.
of_old() {
    local REPO=$OLD_TREE
    "$@"
}

# manifest_of old|new: with the backend of the round.
manifest_of() {
    case $1 in
        new) manifest "$BACKEND" ;;
        old) of_old manifest "$BACKEND" | sed "s,image: weft:.*,image: $OLD_IMAGE," ;;
    esac
}

# apply_version old|new: over the other one's DaemonSet, or where Kubernetes refuses that, because a
# selector can't be changed, in its place.
apply_version() {
    if ! manifest_of "$1" | kubectl apply -f -; then
        kubectl -n "$NAMESPACE" delete "$DAEMONS" && manifest_of "$1" | kubectl apply -f - || return 1
    fi
    rolled_out "$ROLLOUT_S"
}

# Whether an update from one to the other starts a node's new pod first, and may replace the other.
updates_without_loss() { has_surge && grep -q maxSurge "$OLD_TREE/deploy/kubernetes/weft.yml"; }

# run_version NODE old|new: that version there, whatever the other node has.
run_version() {
    # With this strategy nothing moves by itself.
    strategy OnDelete && manifest_of "$2" | kubectl apply -f - && strategy OnDelete || return 1
    kubectl -n "$NAMESPACE" delete pod "$(weft_pod "$1")" || return 1
    wait_until 90 "the $2 weft on $1" runs_version "$1" "$2"
}

# strategy TYPE: of the DaemonSet's updates.
strategy() {
    kubectl -n "$NAMESPACE" patch "$DAEMONS" --type=merge \
        -p "{\"spec\":{\"updateStrategy\":{\"type\":\"$1\",\"rollingUpdate\":null}}}"
}

# runs_version NODE old|new: and it is ready.
runs_version() {
    local image=$OLD_IMAGE
    [[ $2 == old ]] || image=weft:$(weft_version)
    kubectl -n "$NAMESPACE" get pod "$(weft_pod "$1")" -o json |
        jq -e --arg image "$image" '.spec.containers[0].image == $image and
            all(.status.containerStatuses[]; .ready)'
}

# Pods reach each other both ways, by Service too, and neither version sees anything wrong.
both_are_well() {
    local node
    case_ping_across && case_tcp_across && case_udp_across && case_service_tcp || return 1
    for node in "${NODES[@]}"; do
        wait_until 30 "weftd of $node to be ready" version_is_ready "$node" || {
            on_weft "$node" weft status
            return 1
        }
        on_weft "$node" weft peers || return 1
    done
}

version_is_ready() {
    on_weft "$1" weft status -o json | jq -e '.verdict.state == "ready"'
}

# Old to new and back under traffic, and both at once, each on either node.
case_two_versions() {
    local seen kept=0
    [[ -n $OLD_TREE ]] || {
        SEEN="left out: needs --old COMMIT"
        return 0
    }
    updates_without_loss || local MAY_LOSE=yes
    pods_down
    apply_version old && pods_up && both_are_well || return 1
    under_traffic apply_version new || kept=1
    seen="to new: $SEEN"
    both_are_well || return 1
    under_traffic apply_version old || kept=1
    seen+="; back: $SEEN"
    both_are_well || return 1
    if manifest_of new | kubectl apply --dry-run=server -f - >/dev/null 2>&1; then
        run_version "${NODES[0]}" new && runs_version "${NODES[1]}" old && both_are_well &&
            run_version "${NODES[1]}" new && run_version "${NODES[0]}" old &&
            runs_version "${NODES[1]}" new && both_are_well || kept=1
        strategy RollingUpdate
        seen+="; beside each other"
    else
        seen+="; never beside each other, for the selectors differ"
    fi
    apply_version new && both_are_well || kept=1
    SEEN=$seen
    return "$kept"
}

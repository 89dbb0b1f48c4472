# The libraries in the programs as CycloneDX 1.5. The input is `cargo metadata`; $inside, a list
# of "NAME VERSION", is what `cargo tree` says is compiled into them, which leaves out macros, build
# scripts and tests; $sums has Cargo.lock's sums by the same names; $time is when, as text.

def reference: "pkg:cargo/\(.name)@\(.version)";
def component: {
    type: "library", "bom-ref": reference, name, version,
    description: ((.description // "") | gsub("\\s+"; " ") | ltrimstr(" ") | rtrimstr(" ")),
    hashes: [$sums["\(.name) \(.version)"] | select(.) | { alg: "SHA-256", content: . }],
    licenses: [.license | select(.) | { expression: gsub("/"; " OR ") }],
    purl: reference,
    externalReferences: [.repository | select(.) | { type: "vcs", url: . }]
} | with_entries(select(.value != [] and .value != ""));

.resolve.root as $root
| (.packages | map(select("\(.name) \(.version)" | IN($inside[]))) | INDEX(.id)) as $packages
| {
    bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
    metadata: {
        timestamp: $time,
        component: ($packages[$root] | component | .type = "application")
    },
    components: [$packages[] | select(.id != $root) | component] | sort_by(.name, .version),
    dependencies: [.resolve.nodes[] | select($packages[.id])
        | { ref: ($packages[.id] | reference),
            dependsOn: [.deps[] | $packages[.pkg] | select(.) | reference] | unique }]
        | sort_by(.ref)
}

# Short names for what scripts/test runs in one go; the scripts explain themselves with --help.

default:
    @just --list

# Install what is missing on Debian 12
setup:
    scripts/setup

# Two hosts, two pods, real traffic
demo *arguments:
    scripts/demo {{arguments}}

# The whole suite; --fast for the part that needs no root
test *arguments:
    scripts/test {{arguments}}

# Planes side by side
bench *arguments:
    scripts/bench {{arguments}}

# Ten minutes at 70 % of what the plane carries; nothing may be lost
soak seconds="600" *arguments:
    scripts/bench --soak {{seconds}} {{arguments}}

# Measure, keep the run in benches/record/ and show it in README.md and docs/performance.md
bench-record *arguments:
    scripts/bench --record {{arguments}}

# Format everything
fmt:
    cargo fmt

# Lints as the build machine sees them
lint:
    cargo clippy --locked --all-targets -- -D warnings

# Module map, sizes, leftovers, and documents against the code
tidy:
    cargo test --locked --test tidy

# Documentation of the code
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

# Licences, bans and advisories of the dependencies; needs cargo-deny
deny:
    cargo deny check

# Committed fuzz inputs through the fuzz bodies, on the stable toolchain
fuzz-replay:
    cargo test --locked --test pure fuzz_replay

# Fuzz targets, all or those named; needs cargo-fuzz
fuzz *arguments:
    ./scripts/fuzz {{arguments}}

# Tests in network namespaces; needs root
netns:
    cargo test --locked --test host

# Short names for the scripts; each explains itself with --help.

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

# Format everything
fmt:
    cargo fmt

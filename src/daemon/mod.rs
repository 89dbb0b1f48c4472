//! Wiring of weftd: start order, signals, health, exit codes.

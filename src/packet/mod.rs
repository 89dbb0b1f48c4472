//! Views and edits of IPv4, TCP, UDP and ICMP bytes: parse, checksum, TTL, error messages.

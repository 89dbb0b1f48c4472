//! Where leases live: etcd, or a directory of files.

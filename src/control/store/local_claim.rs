//! Claims on PublicIPs in a local store: `DIR/weft/nodes/<PublicIP>`, a file that names the node
//! and that its daemon keeps locked. The lock ends with the process, however it ends.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::warn;

use super::local_files::{failed, read_bounded};
use crate::config::lock_file::{self, LockFile};
use crate::control::error::StoreError;
use crate::control::identity::NodeIdentity;
use crate::failure::with_causes;

/// More than any claim has.
const CLAIM_BYTES_MAX: usize = 4096;

/// The claims of this process; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct FileClaims(Arc<Mutex<Locks>>);

#[derive(Debug, Default)]
struct Locks {
    /// Nobody claims anything without.
    node: Option<(NodeIdentity, PathBuf)>,
    /// More than one while a move is under way.
    locks: BTreeMap<Ipv4Addr, LockFile>,
}

impl FileClaims {
    pub(super) fn of(node: NodeIdentity, directory: PathBuf) -> Self {
        let held = Locks { node: Some((node, directory)), ..Locks::default() };
        Self(Arc::new(Mutex::new(held)))
    }

    /// Claims `public_ip`, unless another process has it. A directory that cannot be written is no
    /// reason not to carry packets. Blocks.
    pub(super) fn claim(&self, public_ip: Ipv4Addr) -> Result<(), StoreError> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((node, directory)) = &held.node else { return Ok(()) };
        if held.locks.contains_key(&public_ip) {
            return Ok(());
        }
        match lock(node, directory, public_ip) {
            Ok(file) => {
                held.locks.insert(public_ip, file);
            }
            Err(error @ StoreError::Duplicate { .. }) => return Err(error),
            Err(error) => {
                held.node = None;
                warn!(
                    "Cannot claim PublicIP {public_ip}: {}. Another node with the same PublicIP \
                     would not be noticed; continuing without a claim",
                    with_causes(&error)
                );
            }
        }
        Ok(())
    }

    /// Who claims `public_ip` now, in words. Blocks.
    pub(super) fn holder(
        directory: &Path,
        public_ip: Ipv4Addr,
    ) -> Result<Option<String>, StoreError> {
        let path = directory.join(public_ip.to_string());
        let lock = |source| failed("lock", &path, source);
        if !path.try_exists().map_err(lock)? || lock_file::try_lock(&path).map_err(lock)?.is_some()
        {
            return Ok(None);
        }
        let found = read_bounded(&path, CLAIM_BYTES_MAX).ok().flatten().unwrap_or_default();
        Ok(Some(NodeIdentity::from_json(&found).unwrap_or_default().describe(false)))
    }

    /// The own entry shows `public_ip`: the old address is free for others.
    pub(super) fn leave_all_but(&self, public_ip: Ipv4Addr) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.locks.retain(|held, _| *held == public_ip);
    }
}

fn lock(
    node: &NodeIdentity,
    directory: &Path,
    public_ip: Ipv4Addr,
) -> Result<LockFile, StoreError> {
    fs::create_dir_all(directory).map_err(|source| failed("create", directory, source))?;
    let path = directory.join(public_ip.to_string());
    let write = |source| failed("write", &path, source);
    let locked = lock_file::try_lock(&path).map_err(|source| failed("lock", &path, source))?;
    let Some(file) = locked else {
        let found = read_bounded(&path, CLAIM_BYTES_MAX).ok().flatten().unwrap_or_default();
        let holder = NodeIdentity::from_json(&found).unwrap_or_default();
        let holder = holder.describe(holder.is_same_as(node));
        return Err(StoreError::Duplicate { public_ip, holder });
    };
    file.write(&node.to_json()).map_err(write)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_ends_with_process_and_follows_address() {
        let files = tempfile::tempdir().unwrap();
        let start = |hostname: &str| {
            let (hostname, boot_id) = (hostname.to_owned(), "boot".to_owned());
            let node = NodeIdentity { hostname, machine_id: None, boot_id };
            FileClaims::of(node, files.path().join("weft/nodes"))
        };
        let [first, second, third] = [1, 2, 3].map(|last| Ipv4Addr::new(192, 0, 2, last));
        let a = start("node-a");
        a.claim(first).unwrap();
        a.claim(first).unwrap();
        let b = start("node-b");
        let refusal = b.claim(first).unwrap_err().to_string();
        assert!(refusal.contains("node-a"), "the refusal does not say who: {refusal}");
        b.claim(second).unwrap();
        let refusal = a.claim(second).unwrap_err().to_string();
        assert!(refusal.contains("node-b"), "the refusal does not say who: {refusal}");
        b.claim(third).unwrap();
        a.claim(second).expect_err("the entry shows the address of before");
        b.leave_all_but(third);
        a.claim(second).expect("the address that node-b left is free");
        drop(a);
        b.claim(second).expect("the address of a node that is gone is free");
    }

    #[test]
    fn unusable_claim_directory_does_not_stop_start() {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("weft"), "a file in the way").unwrap();
        let claims = FileClaims::of(NodeIdentity::default(), files.path().join("weft/nodes"));
        claims.claim(Ipv4Addr::LOCALHOST).expect("a warning, and no more");
    }
}

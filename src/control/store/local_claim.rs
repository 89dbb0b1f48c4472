//! Claims on PublicIPs in a local store: `DIR/weft/nodes/<PublicIP>`, a file that names the node
//! and that its daemon keeps locked. The lock ends with the process, however it ends. Every
//! function here blocks.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::local_files::failed;
use crate::config::lock_file::{self, LockFile};
use crate::config::whole_file;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::NodeIdentity;

/// More than any claim has.
const CLAIM_BYTES_MAX: u64 = 4096;

/// The claims of a node.
pub(super) struct FileClaims {
    node: NodeIdentity,
    directory: PathBuf,
    /// What is claimed; while a move is under way, what was claimed before as well.
    locks: Mutex<Vec<(Ipv4Addr, LockFile)>>,
}

impl FileClaims {
    pub(super) fn new(node: NodeIdentity, directory: PathBuf) -> Self {
        Self { node, directory, locks: Mutex::default() }
    }

    /// Claims `public_ip`, unless another process has it. What was claimed before goes with the
    /// second call, when the own entry has had time to tell the new address.
    pub(super) fn claim(&self, public_ip: Ipv4Addr) -> StoreResult<()> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.iter().any(|(held, _)| *held == public_ip) {
            locks.retain(|(held, _)| *held == public_ip);
            return Ok(());
        }
        let directory = &self.directory;
        fs::create_dir_all(directory).map_err(|source| failed("create", directory, source))?;
        let path = directory.join(public_ip.to_string());
        let locked = lock_file::try_lock(&path).map_err(|source| failed("lock", &path, source))?;
        let Some(file) = locked else {
            let holder = named_in(&path);
            let holder = holder.describe(holder.is_same_as(&self.node));
            return Err(StoreError::Duplicate { public_ip, holder });
        };
        let written = file.write(&self.node.to_json());
        written.map_err(|source| failed("write", &path, source))?;
        locks.push((public_ip, file));
        Ok(())
    }
}

/// Who claims `public_ip` in `directory` now, in words.
pub(super) fn holder(directory: &Path, public_ip: Ipv4Addr) -> StoreResult<Option<String>> {
    let path = directory.join(public_ip.to_string());
    let lock = |source| failed("lock", &path, source);
    if !path.try_exists().map_err(lock)? || lock_file::try_lock(&path).map_err(lock)?.is_some() {
        return Ok(None);
    }
    Ok(Some(named_in(&path).describe(false)))
}

fn named_in(path: &Path) -> NodeIdentity {
    let found = whole_file::read(path, CLAIM_BYTES_MAX).ok().flatten().unwrap_or_default();
    NodeIdentity::from_json(&found).unwrap_or_default()
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
            FileClaims::new(node, files.path().join("weft/nodes"))
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
        b.claim(third).unwrap();
        a.claim(second).expect("the address that node-b left is free");
        drop(a);
        b.claim(second).expect("the address of a node that is gone is free");
    }
}

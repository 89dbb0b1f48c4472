//! Claims on PublicIPs in a local store: `DIR/weft/nodes/<PublicIP>`, a file that names the node
//! and that its daemon keeps locked. The lock ends with the process, however it ends.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::local_files::Files;
use crate::config::lock_file::{self, LockFile};
use crate::config::whole_file::{self, failed};
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::NodeIdentity;
use crate::control::own_thread::on_own_thread;
use crate::failure::lock;

/// More than any claim has.
const CLAIM_BYTES_MAX: u64 = 4096;

/// The claims of a node.
pub(super) struct FileClaims {
    /// Nobody claims anything without.
    pub(super) node: Option<NodeIdentity>,
    files: Files,
    locks: Mutex<Arc<Mutex<Locks>>>,
}

/// What is claimed; while a move is under way, what was claimed before as well.
type Locks = Vec<(IpAddr, LockFile)>;

impl FileClaims {
    pub(super) fn new(files: &Files) -> Self {
        Self { node: None, files: files.clone(), locks: Mutex::default() }
    }

    /// Claims `address` for as long as this process lives, unless another has it. What was
    /// claimed before goes with the second call, when the own entry has had time to tell the new
    /// address.
    pub(super) async fn claim(&self, address: IpAddr, _ttl: Duration) -> StoreResult<()> {
        let Some(node) = self.node.clone() else { return Ok(()) };
        let locks = Arc::clone(&lock(&self.locks));
        let claim = move |files: &Files| {
            let mut locks = lock(&locks);
            let directory = files.claims_path();
            // Somebody may have removed claims. A store that is not there lacks all of them.
            if files.subnets_path().is_dir() {
                let is_replaced = |(held, file): &(IpAddr, LockFile)| {
                    file.is_replaced(&directory.join(held.to_string()))
                };
                locks.retain(|lock| !is_replaced(lock));
            }
            if locks.iter().any(|(held, _)| *held == address) {
                locks.retain(|(held, _)| *held == address);
                return Ok(());
            }
            fs::create_dir_all(&directory)
                .map_err(|source| failed("create", &directory, source))?;
            let path = directory.join(address.to_string());
            let locked = lock_file::try_lock(&path);
            let Some(file) = locked.map_err(|source| failed("lock", &path, source))? else {
                let holder = named_in(&path);
                let holder = holder.describe(holder.is_same_as(&node));
                return Err(StoreError::Duplicate { address, holder });
            };
            file.write(&node.to_json()).map_err(|source| failed("write", &path, source))?;
            locks.push((address, file));
            Ok(())
        };
        self.files.apart(claim).await
    }

    /// Gives up what is claimed. A thread that is still claiming does it for nobody.
    pub(super) async fn release(&self, _is_up: bool) {
        let locks = std::mem::take(&mut *lock(&self.locks));
        // The directory's server is asked to unlock.
        on_own_thread(move || drop(locks)).await.ok();
    }

    /// Whether an earlier run of this node, since it was booted, was the last to claim `address`.
    pub(super) async fn is_ours(&self, address: IpAddr) -> StoreResult<bool> {
        let Some(node) = self.node.clone() else { return Ok(false) };
        let is_ours = move |files: &Files| {
            let path = files.claims_path().join(address.to_string());
            Ok(is_held(&path)? == Some(false) && named_in(&path) == node)
        };
        self.files.apart(is_ours).await
    }

    /// Who claims `address` now, in words.
    pub(super) async fn holder(&self, address: IpAddr) -> StoreResult<Option<String>> {
        let holder = move |files: &Files| {
            let path = files.claims_path().join(address.to_string());
            let is_held = is_held(&path)? == Some(true);
            Ok(is_held.then(|| named_in(&path).describe(false)))
        };
        self.files.apart(holder).await
    }
}

/// Whether a daemon that runs has the claim at `path`; `None` if there is none.
fn is_held(path: &Path) -> StoreResult<Option<bool>> {
    let lock = |source| failed("lock", path, source);
    if !path.try_exists().map_err(lock)? {
        return Ok(None);
    }
    Ok(Some(lock_file::try_lock(path).map_err(lock)?.is_none()))
}

fn named_in(path: &Path) -> NodeIdentity {
    let found = whole_file::read(path, CLAIM_BYTES_MAX).ok().flatten().unwrap_or_default();
    NodeIdentity::from_json(&found).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_in(directory: &Path, hostname: &str) -> FileClaims {
        let (hostname, boot_id) = (hostname.to_owned(), "boot".to_owned());
        let node = Some(NodeIdentity { hostname, machine_id: None, boot_id });
        let files = Files::new(directory.to_owned());
        files.prepare().unwrap();
        FileClaims { node, ..FileClaims::new(&files) }
    }

    async fn claim(claims: &FileClaims, last: u8) -> StoreResult<()> {
        claims.claim([192, 0, 2, last].into(), Duration::ZERO).await
    }

    #[tokio::test]
    async fn a_claim_whose_file_was_removed_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let start = |hostname: &str| start_in(directory.path(), hostname);
        let (a, b) = (start("node-a"), start("node-b"));
        claim(&a, 1).await.unwrap();
        let path = directory.path().join("weft/nodes/192.0.2.1");
        fs::remove_file(&path).unwrap();
        claim(&a, 1).await.unwrap();
        let refusal = claim(&b, 1).await.unwrap_err().to_string();
        assert!(refusal.contains("node-a"), "the refusal does not say who: {refusal}");
        fs::remove_file(&path).unwrap();
        claim(&b, 1).await.unwrap();
        let refusal = claim(&a, 1).await.unwrap_err().to_string();
        assert!(refusal.contains("node-b"), "the refusal does not say who: {refusal}");
        // The store is not mounted for a while.
        let away = directory.path().with_extension("away");
        fs::rename(directory.path(), &away).unwrap();
        claim(&b, 1).await.unwrap();
        assert!(!directory.path().exists(), "a store was made where there is none");
        fs::rename(&away, directory.path()).unwrap();
        claim(&a, 1).await.expect_err("given up while the store was away");
    }

    #[tokio::test]
    async fn claim_ends_with_process_and_follows_address() {
        let directory = tempfile::tempdir().unwrap();
        let start = |hostname: &str| start_in(directory.path(), hostname);
        let a = start("node-a");
        claim(&a, 1).await.unwrap();
        claim(&a, 1).await.unwrap();
        let b = start("node-b");
        let refusal = claim(&b, 1).await.unwrap_err().to_string();
        assert!(refusal.contains("node-a"), "the refusal does not say who: {refusal}");
        claim(&b, 2).await.unwrap();
        let refusal = claim(&a, 2).await.unwrap_err().to_string();
        assert!(refusal.contains("node-b"), "the refusal does not say who: {refusal}");
        claim(&b, 3).await.unwrap();
        claim(&a, 2).await.expect_err("the entry shows the address of before");
        claim(&b, 3).await.unwrap();
        claim(&a, 2).await.expect("the address that node-b left is free");
        let is_ours =
            async |claims: &FileClaims| claims.is_ours([192, 0, 2, 2].into()).await.unwrap();
        assert!(!is_ours(&start("node-a")).await, "it is still claimed");
        drop(a);
        assert!(is_ours(&start("node-a")).await, "what an earlier run has left");
        assert!(!is_ours(&b).await, "what another node has left");
        claim(&b, 2).await.expect("the address of a node that is gone is free");
        b.release(true).await;
        claim(&start("node-c"), 2).await.expect("what was given up is free");
        claim(&b, 2).await.expect("it may be claimed again");
    }
}

//! What this process may: enough open files before it takes anything over, and once it serves, no
//! right that its work does not need.

use std::convert::Infallible;
use std::future::pending;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::backend_kind::BackendKind;
use crate::config::options::{Options, StoreOptions};
use crate::config::whole_file;
use crate::control::own_thread::on_own_thread;
use crate::failure::{rights_are_given_up, with_causes};
use crate::rights::{self, Writable};
use crate::status::{Kept, SubnetFile};

/// A worker has less than ten files open, and the rest of weftd some fifty: enough for one.
const OPEN_FILES_MIN: u64 = 64;
/// And for twenty.
pub(crate) const OPEN_FILES_ENOUGH: u64 = 256;

/// Raises how many files this process may have open if that are few, as Go does for flanneld. What
/// still is too few would leave a node without peers.
pub(super) fn raise_open_files() -> Result<()> {
    if let Some(higher) = higher(getrlimit(Resource::Nofile))? {
        setrlimit(Resource::Nofile, higher).context("cannot raise the limit of open files")?;
    }
    Ok(())
}

fn higher(limit: Rlimit) -> Result<Option<Rlimit>> {
    let most = limit.maximum.map_or(OPEN_FILES_ENOUGH, |most| most.min(OPEN_FILES_ENOUGH));
    ensure!(
        most >= OPEN_FILES_MIN,
        "weftd needs {OPEN_FILES_MIN} open files, and may have {most}: raise the limit to \
         {OPEN_FILES_ENOUGH} (LimitNOFILE=, ulimit -n)"
    );
    let is_low = limit.current.is_some_and(|now| now < most);
    Ok(is_low.then_some(Rlimit { current: Some(most), ..limit }))
}

/// What this process may still write, once it has given up the rest.
static WRITABLE: OnceLock<Writable> = OnceLock::new();

/// Leaves the control plane the rights that its work needs, and no more, as soon as the subnet file
/// is there, and the rules were set or could not be: for the first of them iptables may have to
/// load modules of the kernel. With an operator's own commands as backend it keeps them, for those
/// may need anything.
pub(super) async fn keep(
    backend: BackendKind,
    options: &Options,
    mut rules: watch::Receiver<Kept>,
    mut subnet_file: watch::Receiver<SubnetFile>,
) -> Infallible {
    // Where the senders are dropped, the whole daemon is, with this future.
    rules.wait_for(|rules| rules.settled).await.ok();
    subnet_file.wait_for(|file| file.written).await.ok();
    // A run that goes on after a take-over that failed comes here again.
    if !backend.runs_commands() && WRITABLE.get().is_none() {
        apply(options).await;
    }
    pending().await
}

async fn apply(options: &Options) {
    let paths = written(options);
    let open = move || {
        let (writable, missing) = Writable::open(&paths);
        (writable.only(), writable, missing)
    };
    // The directory of a local store may be another host's, which does not answer.
    let opened = on_own_thread(open.clone()).await;
    let (only, writable, missing) = opened.unwrap_or_else(|_no_thread| open());
    for (path, errno) in missing {
        warn!("weftd can't write {} until it is restarted: {errno}", path.display());
    }
    WRITABLE.set(writable).ok();
    // This thread, and what it starts from now on. What the start did on other threads ends with
    // what it did: no thread waits for more work.
    match rights::keep_for_control().and_then(|()| only?.limit()) {
        Ok(true) => {}
        Ok(false) => debug!("this kernel has no Landlock: weftd may write as its user may"),
        Err(error) => warn!("weftd keeps rights that it doesn't need: {}", with_causes(&error)),
    }
    rights_are_given_up();
}

/// The directories in which weftd, and the programs that it runs, write.
fn written(options: &Options) -> Vec<PathBuf> {
    let files = [&options.subnet_file, &options.status_socket];
    let mut directories = files.map(|path| whole_file::directory_of(path).to_path_buf()).to_vec();
    if let StoreOptions::Local(directory) = &options.store {
        directories.push(directory.clone());
    }
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_open_files_become_enough_or_are_refused() {
        let limit = |current, maximum| Rlimit { current, maximum };
        for (maximum, raised) in [(Some(64), 64), (Some(256), 256), (Some(9999), 256), (None, 256)]
        {
            let higher = higher(limit(Some(12), maximum)).unwrap();
            assert_eq!(higher, Some(limit(Some(raised), maximum)));
        }
        for (current, maximum) in [(Some(256), Some(9999)), (Some(64), Some(64)), (None, None)] {
            assert_eq!(higher(limit(current, maximum)).unwrap(), None, "{current:?}");
        }
        let error = higher(limit(Some(12), Some(63))).unwrap_err().to_string();
        assert!(["63", "64"].iter().all(|figure| error.contains(figure)), "{error}");
    }
}

//! What weftd gives up once it serves: the rights that its work does not need.

use std::convert::Infallible;
use std::fs::File;
use std::future::pending;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use crate::config::options::{Options, StoreOptions};
use crate::netfilter::reconciler::RuleState;
use crate::rights;

/// Whether this process has given them up.
static APPLIED: AtomicBool = AtomicBool::new(false);

/// Leaves the control plane the rights that its work needs, and no more, as soon as the rules were
/// set or could not be: for the first of them iptables may have to load modules of the kernel. With
/// an operator's own commands as backend it keeps them, for those may need anything.
pub(super) async fn keep(
    backend: &str,
    options: &Options,
    mut rules: watch::Receiver<RuleState>,
) -> Infallible {
    // Its sender goes with the daemon, and so does this.
    rules.wait_for(|rules| rules.is_settled).await.ok();
    // A run that goes on after a take-over that failed comes here again.
    if backend != "extension" && !APPLIED.swap(true, Ordering::Relaxed) {
        apply(options);
    }
    pending().await
}

fn apply(options: &Options) {
    let lock = iptables_lock();
    if options.rules.masquerade || options.rules.forward {
        make(&lock);
    }
    let written: Arc<[PathBuf]> = written(options, lock).into();
    limit(&written);
    // What the start did with files, it did on threads that have all rights and may live on. Each
    // of as many tasks that wait for each other gets one of those, or a new one.
    let threads = waiting_threads();
    let all_run = Arc::new(Barrier::new(threads));
    for _ in 0..threads {
        let (all_run, written) = (Arc::clone(&all_run), Arc::clone(&written));
        drop(spawn_blocking(move || {
            all_run.wait();
            limit(&written);
        }));
    }
}

/// Limits the calling thread, and what it starts from now on.
fn limit(written: &[PathBuf]) {
    match rights::keep_for_control().and_then(|()| rights::write_below(written)) {
        Ok(true) => {}
        Ok(false) => debug!("this kernel has no Landlock: weftd may write as its user may"),
        Err(error) => {
            warn!("weftd keeps rights that it doesn't need: {:#}", anyhow::Error::from(error));
        }
    }
}

/// Threads of tokio's for work that blocks; none that the kernel does not show.
fn waiting_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "tokio-rt-worker").count()
}

/// The file that iptables locks, on its own tables, while it changes rules.
fn iptables_lock() -> PathBuf {
    let named = std::env::var_os("XTABLES_LOCKFILE").map(PathBuf::from);
    named.unwrap_or_else(|| PathBuf::from("/run/xtables.lock"))
}

/// Makes the lock as iptables would, with the first change that it makes: that may be a repair,
/// when it is allowed to write the file but not to make it.
fn make(lock: &Path) {
    let opened = File::options().create(true).append(true).mode(0o600).open(lock);
    if let Err(error) = opened {
        debug!(%error, "cannot make {}", lock.display());
    }
}

/// Where weftd, and the programs that it runs, write.
fn written(options: &Options, lock: PathBuf) -> Vec<PathBuf> {
    let files = [&options.subnet_file, &options.status_socket].map(|path| path.parent());
    let store = match &options.store {
        StoreOptions::Local(directory) => Some(directory.as_path()),
        StoreOptions::Etcd(_) => None,
        #[cfg(feature = "kube")]
        StoreOptions::Kube(_) => None,
    };
    let directories = files.into_iter().chain([store]).flatten().map(Path::to_path_buf);
    directories.chain([lock]).collect()
}

//! What weftd gives up once it serves: the rights that its work does not need.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use crate::config::options::{Options, StoreOptions};
use crate::rights;

/// Whether this process has given them up.
static APPLIED: AtomicBool = AtomicBool::new(false);

/// Leaves the control plane the rights that its work needs, and no more, unless the backend runs an
/// operator's own commands, which may need anything.
pub(super) fn apply(backend: &str, options: &Options) {
    // A run that goes on after a take-over that failed comes here again.
    if backend == "extension" || APPLIED.swap(true, Ordering::Relaxed) {
        return;
    }
    let written: Arc<[PathBuf]> = written(options).into();
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

/// The directories in which weftd, and the programs that it runs, write.
fn written(options: &Options) -> Vec<PathBuf> {
    let files = [&options.subnet_file, &options.status_socket].map(|path| path.parent());
    let lock = std::env::var_os("XTABLES_LOCKFILE").map(PathBuf::from);
    let lock = lock.as_deref().and_then(Path::parent);
    let store = match &options.store {
        StoreOptions::Local(directory) => Some(directory.as_path()),
        StoreOptions::Etcd(_) => None,
        #[cfg(feature = "kube")]
        StoreOptions::Kube(_) => None,
    };
    files.into_iter().chain([lock, store]).flatten().map(Path::to_path_buf).collect()
}

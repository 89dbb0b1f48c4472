//! What weftd gives up once it serves: the rights that its work does not need.

use std::convert::Infallible;
use std::fs::File;
use std::future::pending;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, OnceLock};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use crate::config::options::{Options, StoreOptions};
use crate::failure::rights_are_given_up;
use crate::netfilter::reconciler::RuleState;
use crate::rights::{self, Writable};

/// What this process may still write, once it has given up the rest.
static WRITABLE: OnceLock<Writable> = OnceLock::new();

/// Leaves the control plane the rights that its work needs, and no more, as soon as the subnet file
/// is there, and the rules were set or could not be: for the first of them iptables may have to
/// load modules of the kernel. With an operator's own commands as backend it keeps them, for those
/// may need anything.
pub(super) async fn keep(
    backend: &str,
    options: &Options,
    mut rules: watch::Receiver<RuleState>,
    mut subnet_file: watch::Receiver<bool>,
) -> Infallible {
    // Their senders go with the daemon, and so does this.
    let uses_lock = rules.wait_for(|rules| rules.is_settled).await.is_ok_and(|now| now.uses_lock);
    subnet_file.wait_for(|is_written| *is_written).await.ok();
    // A run that goes on after a take-over that failed comes here again.
    if backend != "extension" && WRITABLE.get().is_none() {
        apply(options, uses_lock);
    }
    pending().await
}

fn apply(options: &Options, uses_lock: bool) {
    if uses_lock {
        make_iptables_lock();
    }
    let (writable, missing) = Writable::open(&written(options));
    for (path, errno) in missing {
        warn!("weftd can't write {} until it is restarted: {errno}", path.display());
    }
    let writable = WRITABLE.get_or_init(|| writable);
    limit(writable);
    rights_are_given_up();
    // What the start did with files, it did on threads that have all rights and may live on. Each
    // of as many tasks that wait for each other gets one of those, or a new one.
    let threads = waiting_threads();
    let all_run = Arc::new(Barrier::new(threads));
    for _ in 0..threads {
        let all_run = Arc::clone(&all_run);
        drop(spawn_blocking(move || {
            all_run.wait();
            limit(writable);
        }));
    }
}

/// Limits the calling thread, and what it starts from now on.
fn limit(writable: &Writable) {
    match rights::keep_for_control().and_then(|()| writable.limit()) {
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

/// Makes the file that iptables locks while it changes rules, as iptables would with the first
/// change: that may be a repair, which is allowed to read the file but not to make it.
fn make_iptables_lock() {
    let named = std::env::var_os("XTABLES_LOCKFILE").map(PathBuf::from);
    let path = named.unwrap_or_else(|| PathBuf::from("/run/xtables.lock"));
    let made = File::options().create(true).append(true).mode(0o600).open(&path);
    if let Err(error) = made {
        warn!(
            "cannot make {}, without which iptables can't repair its rules: {error}",
            path.display()
        );
    }
}

/// The directories in which weftd, and the programs that it runs, write.
fn written(options: &Options) -> Vec<PathBuf> {
    let files = [&options.subnet_file, &options.status_socket];
    let directories = files.into_iter().filter_map(|path| path.parent()).map(|directory| {
        // Of a bare name.
        if directory.as_os_str().is_empty() { Path::new(".") } else { directory }
    });
    let store = match &options.store {
        StoreOptions::Local(directory) => Some(directory.as_path()),
        StoreOptions::Etcd(_) => None,
        #[cfg(feature = "kube")]
        StoreOptions::Kube(_) => None,
    };
    directories.chain(store).map(Path::to_path_buf).collect()
}

//! What weftd gives up once it serves: the rights that its work does not need.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{debug, warn};

use crate::config::options::{Options, StoreOptions};
use crate::rights::{self, RightsError};

/// Whether this process has given them up.
static APPLIED: AtomicBool = AtomicBool::new(false);

/// Leaves the control plane the rights that its work needs, and no more, unless the backend runs an
/// operator's own commands, which may need anything.
pub(super) fn apply(backend: &str, options: &Options) {
    // A run that goes on after a take-over that failed comes here again.
    if backend == "extension" || APPLIED.swap(true, Ordering::Relaxed) {
        return;
    }
    match limit(&written(options)) {
        Ok(true) => {}
        Ok(false) => debug!("this kernel has no Landlock: weftd may write as its user may"),
        Err(error) => {
            warn!("weftd keeps rights that it doesn't need: {:#}", anyhow::Error::from(error));
        }
    }
}

fn limit(written: &[PathBuf]) -> Result<bool, RightsError> {
    rights::keep_for_control()?;
    rights::write_below(written)
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

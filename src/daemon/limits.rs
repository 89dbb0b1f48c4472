//! What weftd gives up once it serves: the rights that its work does not need.

use std::convert::Infallible;
use std::future::pending;
use std::path::PathBuf;
use std::sync::OnceLock;

use tokio::sync::watch;
use tracing::{debug, warn};

use crate::backend_kind::BackendKind;
use crate::config::options::{Options, StoreOptions};
use crate::config::whole_file;
use crate::failure::{rights_are_given_up, with_causes};
use crate::rights::{self, Writable};
use crate::status::{Kept, SubnetFile};

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
        apply(options);
    }
    pending().await
}

fn apply(options: &Options) {
    let (writable, missing) = Writable::open(&written(options));
    for (path, errno) in missing {
        warn!("weftd can't write {} until it is restarted: {errno}", path.display());
    }
    let writable = WRITABLE.get_or_init(|| writable);
    // This thread, and what it starts from now on. What the start did on other threads ends with
    // what it did: no thread waits for more work.
    match rights::keep_for_control().and_then(|()| writable.limit()) {
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

//! Keeps copies of the tunnel's descriptors with the service manager, which passes them to the next
//! weftd (sd_notify(3) with FDSTORE=1, sd_listen_fds(3)). Packets that arrive while no weftd runs
//! wait in the queues of these descriptors.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::warn;

use crate::backend::handover::Offered;
use crate::control::changes::next_change;
use crate::daemon::notify;
use crate::failure::LogOnce;
use crate::sys::inherited;

/// The name of all of them there. The backend finds out which is the device and which a socket.
const NAME: &str = "weft-tunnel";

/// Pause before a service manager whose queue was full is told again.
const RETRY: Duration = Duration::from_secs(1);

/// Takes the descriptors that the service manager has passed to this process. Call it before
/// anything else opens a file.
pub(super) fn passed() -> Vec<OwnedFd> {
    let [pid, count, names] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"]
        .map(|name| std::env::var(name).unwrap_or_default());
    if pid != std::process::id().to_string() {
        return Vec::new();
    }
    let Ok(count) = count.parse() else { return Vec::new() };
    // If one isn't open, the variables are not from a service manager.
    let taken = inherited::take(count).unwrap_or_default();
    let named = taken.into_iter().zip(names.split(':'));
    named.filter(|(_, name)| *name == NAME).map(|(descriptor, _)| descriptor).collect()
}

/// Keeps the service manager's copies up to date with the tunnel's descriptors, for ever.
pub(super) async fn keep_stored(mut offered: watch::Receiver<Offered>) -> Infallible {
    let mut is_stored = false;
    let mut logged = LogOnce::default();
    loop {
        let offer = offered.borrow_and_update().clone();
        let is_done = store(&offer, &mut is_stored).inspect_err(|error| {
            logged.once(&error.to_string(), |error| {
                warn!(
                    "a restart would lose packets: the service manager can't be given the \
                     tunnel's descriptors: {error}; retrying"
                );
            });
        });
        // Kept open here, they would keep a device alive that the backend has to make again.
        drop(offer);
        let pause = if is_done.is_ok() { Duration::MAX } else { RETRY };
        timeout(pause, next_change(&mut offered)).await.ok();
    }
}

fn store(offer: &Offered, is_stored: &mut bool) -> std::io::Result<()> {
    let remove = || notify::send(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}"), &[]);
    match offer {
        Offered::Inherited => Ok(()),
        Offered::Nothing | Offered::Place => {
            remove()?;
            *is_stored = false;
            Ok(())
        }
        Offered::Tunnel(descriptors) => {
            if std::mem::replace(is_stored, true) {
                remove()?;
            }
            // It ignores copies of what it has already. FDPOLL=0: it must not poll them, because
            // each packet would wake it.
            let message = format!("FDSTORE=1\nFDNAME={NAME}\nFDPOLL=0");
            descriptors
                .chunks(notify::AT_ONCE_MAX)
                .try_for_each(|some| notify::send(&message, some))
        }
    }
}

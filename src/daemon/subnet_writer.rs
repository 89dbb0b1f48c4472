//! Keeps `subnet.env` up to date: written at start and again when the overlay's MTU changes, and
//! retried for as long as the disk refuses. A file that is there stays whole meanwhile.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::backend::status::PlaneState;
use crate::config::network::NetworkConfig;
use crate::config::options::Options;
use crate::config::subnet_file::SubnetFile;
use crate::control::changes::next_change;
use crate::control::own_thread::on_own_thread;
use crate::control::run::Held;
use crate::failure::{LogOnce, with_causes};
use crate::host::listing::Listing;
use crate::host::pod_links::{gateways, wider};
use crate::status::SubnetFile as Written;

/// Pause between two tries to write the subnet file; disks that were full get room in minutes.
const RETRY: Duration = Duration::from_secs(5);

/// The writer of one subnet file.
pub(super) struct SubnetWriter<'a> {
    path: &'a Path,
    file: SubnetFile,
    written: watch::Sender<Written>,
    told: LogOnce,
}

impl<'a> SubnetWriter<'a> {
    /// Will keep the file that says that pods of the subnets that are `held` reach all of the
    /// network, and tries to write it at once, before readiness is reported.
    pub(super) fn new(
        options: &'a Options,
        network: &NetworkConfig,
        held: &Held,
        mtu_bytes: u32,
    ) -> Self {
        let (networks, subnets) = (network.networks(), held.subnets());
        let (path, masquerade) = (&options.subnet_file, options.rules.masquerade);
        let file = SubnetFile { networks, subnets, mtu_bytes, masquerade };
        let written = watch::Sender::default();
        let mut writer = Self { path, file, written, told: LogOnce::default() };
        writer.note(&file.write(path).map_err(anyhow::Error::from));
        writer
    }

    /// Whether what is on the disk is true, and each change of that.
    pub(super) fn state(&self) -> watch::Receiver<Written> {
        self.written.subscribe()
    }

    /// Retries until the file is written, and writes it again whenever the plane's MTU changes.
    /// Names the pods that take longer packets.
    pub(super) async fn keep(mut self, mut plane: watch::Receiver<PlaneState>) -> Infallible {
        warn_of_wide_pods(self.file).await;
        loop {
            let mtu_bytes = plane.borrow_and_update().mtu_bytes;
            if mtu_bytes != self.file.mtu_bytes || !self.written.borrow().written {
                self.file.mtu_bytes = mtu_bytes;
                let (path, file) = (self.path.to_owned(), self.file);
                // A disk that is out of order can keep a write for seconds; the lease must not
                // wait.
                let written = on_own_thread(move || Ok(file.write(&path)?)).await;
                self.note(&written.map_err(anyhow::Error::from).flatten());
                warn_of_wide_pods(self.file).await;
            }
            let pause = if self.written.borrow().written { Duration::MAX } else { RETRY };
            timeout(pause, next_change(&mut plane)).await.ok();
        }
    }

    fn note(&mut self, result: &anyhow::Result<()>) {
        self.written.send_modify(|state| {
            state.written = result.is_ok();
            state.failures += u64::from(result.is_err());
        });
        match result {
            Ok(()) => {
                self.told.forget();
                info!("Wrote subnet file to {}", self.path.display());
            }
            Err(error) => self.told.once(&with_causes(error.as_ref()), |text| {
                let seconds = RETRY.as_secs();
                warn!("Failed to write subnet file: {text}; retrying every {seconds} s");
            }),
        }
    }
}

/// Pods keep the MTU that they were started with, perhaps with another backend.
async fn warn_of_wide_pods(file: SubnetFile) {
    let SubnetFile { subnets, mtu_bytes, .. } = file;
    // `weft check` says it as well.
    let Ok(host) = Listing::with_default_routes(subnets.families()).await else { return };
    if let Some(wider) = wider(&host.links, &gateways(&host, subnets), mtu_bytes) {
        warn!(
            "{wider}: what these pods send may be too long; give the container runtime \
             FLANNEL_MTU of subnet.env, and start them anew"
        );
    }
}

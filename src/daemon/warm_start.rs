//! Offline start: while the store cannot be reached, a start uses the cache that the last run left
//! beside the subnet file. `control::cache` validates it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use tracing::warn;

use crate::config::network::NetworkConfig;
use crate::config::options::Options;
use crate::config::subnet_file::Previous;
use crate::config::whole_file;
use crate::control::cache::{self, Expected, Known};
use crate::control::clock;
use crate::control::error::StoreError;
use crate::daemon::cache_writer::cache_path;
use crate::daemon::configured::Configured;
use crate::host::interface::{ExternalInterface, discover};
use crate::route::{Families, Prefixes};

/// How long a start that could use the cache waits for the store first. Traffic is promised within
/// a second, part of which is needed for device, address and route. A healthy store answers within
/// 100 ms, and a start that did not wait long enough is confirmed a moment later.
const PATIENCE: Duration = Duration::from_millis(500);

/// The cache of the last run, if it can be used.
#[derive(Debug)]
pub(super) struct WarmStart {
    path: PathBuf,
    /// A valid cache, or why it is not. Nothing if switched off, at the first start of this host,
    /// and once it was used or refused.
    offer: Option<anyhow::Result<Remembered>>,
}

/// A valid cache.
#[derive(Debug)]
pub(super) struct Remembered {
    /// The network configuration.
    pub(super) plan: Configured,
    /// The interface that carries the tunnel, as of now.
    pub(super) external: ExternalInterface,
    /// Lease and peers.
    pub(super) known: Known,
}

impl WarmStart {
    /// Reads and validates the cache. Logs nothing yet: it may not be needed.
    pub(super) async fn prepare(options: &Options, previous: &Previous) -> Self {
        let path = cache_path(&options.subnet_file);
        let offer = match (options.start_from_cache, previous.networks, previous.subnets) {
            (true, Some(networks), Some(subnets)) => Some(recall(options, networks, subnets).await),
            (_, _, _) => None,
        };
        Self { path, offer }
    }

    /// How long to wait for the store to answer.
    pub(super) fn patience(&self) -> Duration {
        if matches!(self.offer, Some(Ok(_))) { PATIENCE } else { Duration::MAX }
    }

    /// The cache, if it is usable, now that the store can't be reached because of `why`. It has to
    /// match `config`, if that is known. Logs once that it is used, or why not.
    pub(super) fn take(&mut self, why: &str, config: Option<&NetworkConfig>) -> Option<Remembered> {
        let path = self.path.display();
        let refused = match self.offer.take()? {
            Ok(remembered) if config.is_none_or(|config| *config == remembered.plan.network) => {
                let Known { as_of_unix, own, peers, .. } = &remembered.known;
                warn!(
                    "The store cannot be reached ({why}); starting from the cache {path} of {}: \
                     subnet {}, {} peers. They are stale until the store confirms them",
                    clock::format_rfc3339(*as_of_unix),
                    own.subnets,
                    peers.len()
                );
                return Some(remembered);
            }
            Ok(_) => anyhow::anyhow!("the network configuration in it is not the store's"),
            Err(error) => error,
        };
        warn!("Not starting from the cache {path}: {refused:#}; waiting for the store ({why})");
        None
    }
}

async fn recall(
    options: &Options,
    networks: Prefixes,
    subnets: Prefixes,
) -> anyhow::Result<Remembered> {
    let bytes = whole_file::read_private(&cache_path(&options.subnet_file), cache::BYTES_MAX)?;
    let Some(bytes) = bytes else { bail!("there is none") };
    let mut interface = options.interface.clone();
    // The families that hosts have addresses of depend on the backend, which the cache says.
    if networks.v4().is_none() {
        interface.families = Families::of_v6(None, ());
    }
    let mut external = discover(&interface).await?;
    let (store, now_unix) = (&options.store.identity(), clock::unix_seconds());
    let address = external.node_address();
    let cache = cache::parse(&bytes, &Expected { store, networks, subnets, address, now_unix })?;
    let plan =
        Configured::new(cache.config).context("the network configuration in it cannot be used")?;
    if plan.families() != interface.families {
        interface.families = plan.families();
        external = discover(&interface).await?;
    }
    Ok(Remembered { plan, external, known: cache.known })
}

/// Whether the store could not be reached, as opposed to one that answered with an error.
pub(super) fn is_unreachable(error: &anyhow::Error) -> bool {
    let store_error = error.chain().find_map(|cause| cause.downcast_ref::<StoreError>());
    store_error.is_some_and(|error| !error.store_answered())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::error::AcquireError;
    use crate::control::lease::{Lease, LeaseAttributes, Lifetime};
    use crate::host::interface::ExternalAddress;

    fn config(text: &str) -> NetworkConfig {
        NetworkConfig::parse(text.as_bytes()).unwrap()
    }

    fn usable() -> WarmStart {
        let subnets: Prefixes = "10.5.1.0/24".parse().unwrap();
        let address = Ipv4Addr::new(192, 0, 2, 1);
        let own = Lease {
            subnets,
            key: subnets.key(),
            attributes: LeaseAttributes::udp(address),
            revision: 0,
            created_revision: 0,
            lifetime: Lifetime::Leased { id: 0, expires_unix: None },
        };
        let networks = "10.5.0.0/16".parse().unwrap();
        let known = Known {
            as_of_unix: 1,
            revision: 1,
            cluster: 1,
            networks,
            own,
            ends_unix: None,
            peers: std::sync::Arc::default(),
        };
        let plan = Configured::new(config(r#"{"Network":"10.5.0.0/16"}"#)).unwrap();
        let addresses = Families::of_v4(ExternalAddress::of(address, None), None);
        let name = "eth0".to_owned();
        let external = ExternalInterface { name, index: 2, addresses, mtu_bytes: 1500 };
        let offer = Some(Ok(Remembered { plan, external, known }));
        WarmStart { path: "/run/flannel/subnet.env.cache".into(), offer }
    }

    #[test]
    fn cache_is_used_once_with_its_configuration_only() {
        let mut warm = usable();
        assert_eq!(warm.patience(), PATIENCE);
        assert!(warm.take("it is off", None).is_some());
        assert!(warm.take("it is off", None).is_none(), "started twice");
        assert_eq!(warm.patience(), Duration::MAX, "waits too little without a cache");
        let same = config(r#"{"Network":"10.5.0.0/16"}"#);
        assert!(usable().take("it is off", Some(&same)).is_some());
        let other = config(r#"{"Network":"10.5.0.0/16","SubnetLen":25}"#);
        assert!(usable().take("it is off", Some(&other)).is_none(), "uses an old network");
    }

    #[test]
    fn only_store_without_answer_is_unreachable() {
        let down = || StoreError::Unavailable { operation: "listing", detail: String::new() };
        let no_config = StoreError::NoConfig("/config".to_owned());
        assert!(is_unreachable(&down().into()));
        assert!(is_unreachable(&AcquireError::from(down()).into()), "no subnet is another reason");
        assert!(!is_unreachable(&no_config.into()), "an empty store has answered");
        assert!(!is_unreachable(&AcquireError::Contended(1).into()));
    }
}

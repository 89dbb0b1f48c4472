//! Compares the store's network configuration with the one that this node uses. A new one is not
//! applied while the daemon runs, because every pod could lose its address: log and status report
//! it.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::config::network::{NetworkConfig, shown};
use crate::control::backoff::Backoff;
use crate::control::manager::SubnetManager;
use crate::failure::with_causes;

/// Between two readings of a file: as often as the kubelet brings a ConfigMap's news.
const FILE_PERIOD: Duration = Duration::from_secs(60);
/// Between two readings of one that was missing.
const MISSING_PERIOD: Duration = Duration::from_secs(5);
/// Longest text of a backend's settings that is shown.
const SHOWN_CHARS_MAX: usize = 200;

/// What differs in the store's configuration from the one in use, if anything does. An error if it
/// is not there or not readable, for this reason: what runs goes on, a start would wait.
type Compared = Result<Option<String>, String>;

/// Reads the configuration again after each listing: a store that lost its data, was replaced or
/// was edited shows at the next one. The file beside a store that is seldom listed is read again
/// each minute.
pub(super) struct ConfigCheck<'a> {
    manager: &'a SubnetManager,
    /// The configuration in use; nothing is compared without.
    used: Option<NetworkConfig>,
    /// Whether it is from the cache, and the store has not been asked yet.
    from_cache: bool,
    /// Whether it was read before the last listing.
    is_listed: bool,
    /// What was last logged, to log it once.
    logged: Compared,
    /// When to read the file beside the store, if there is one.
    due: Option<Instant>,
    under_way: Option<BoxFuture<'a, Compared>>,
}

impl<'a> ConfigCheck<'a> {
    /// For the configuration that `manager` uses, which may be `from_cache`. If it is not, it was
    /// read a moment ago, and the first listing is no reason to read it again.
    pub(super) fn new(manager: &'a SubnetManager, from_cache: bool) -> Self {
        let used = manager.used_config.get().cloned();
        let (logged, under_way) = (Ok(None), None);
        let due = manager.store.leased().is_none().then(|| next_reading(manager));
        Self { manager, used, from_cache, is_listed: from_cache, logged, due, under_way }
    }

    /// Everything was listed: asks for the configuration, beside all that goes on.
    pub(super) fn begin(&mut self) {
        let is_due = std::mem::replace(&mut self.is_listed, true);
        if let Some(used) = self.used.clone().filter(|_| is_due) {
            self.under_way = Some(Box::pin(compare(self.manager, used)));
        }
    }

    /// Waits for the configuration, and logs what changed. Never ends if it was not
    /// requested and will not be.
    pub(super) async fn done(&mut self) {
        let Some(under_way) = &mut self.under_way else {
            let Some(due) = self.due else { return std::future::pending().await };
            sleep_until(due).await;
            self.due = Some(next_reading(self.manager));
            return self.begin();
        };
        let found = under_way.await;
        self.under_way = None;
        let is_first = std::mem::take(&mut self.from_cache);
        let unreadable = found.as_ref().err();
        let is_file = self.manager.store.leased().is_none();
        self.due = match unreadable {
            Some(_) => Some(Instant::now() + MISSING_PERIOD),
            None => is_file.then(|| next_reading(self.manager)),
        };
        {
            let mut state = self.manager.status.edit();
            state.restart_needed = matches!(found, Ok(Some(_)));
            let next = "this node goes on with the last one, and a restart would wait";
            state.config_missing = unreadable.map(|why| format!("{why}; {next}"));
        }
        if found == self.logged && !is_first {
            return;
        }
        match &found {
            Ok(None) => {
                let whose = if is_first { "the cache" } else { "this node again" };
                info!("The store has the network configuration of {whose}");
            }
            Ok(Some(other)) => warn!(
                "The network configuration in the store {other}; going on with the old one. To \
                 apply the new one, restart weftd and then the pods of this host"
            ),
            Err(why) => warn!(
                "Couldn't fetch network config: {why}; going on with the last one. A restart of \
                 weftd would wait for it"
            ),
        }
        self.logged = found;
    }
}

fn next_reading(manager: &SubnetManager) -> Instant {
    Instant::now() + FILE_PERIOD.min(manager.timing.relist_period)
}

/// Reads until the store answers: a listing that comes first asks anew.
async fn compare(manager: &SubnetManager, used: NetworkConfig) -> Compared {
    let mut backoff = Backoff::default();
    let bytes = loop {
        match manager.network_config().await {
            Ok(bytes) => break bytes,
            Err(error) if error.store_answered() => return Err(with_causes(&error)),
            // The lease machine reports outages.
            Err(_) => sleep(backoff.next_wait()).await,
        }
    };
    let found = NetworkConfig::parse(&bytes).map_err(|error| with_causes(&error))?;
    Ok(difference(&used, &found))
}

/// What differs in `found` from `used`, for an operator; `None` if nothing does.
fn difference(used: &NetworkConfig, found: &NetworkConfig) -> Option<String> {
    let (network, used_network) = (found.network, used.network);
    if network != used_network {
        return Some(format!(
            "is now for {network}, and not for {used_network}, in which this node has its subnet"
        ));
    }
    let (used, found) = (used.to_json(), found.to_json());
    let mut changed = Vec::new();
    for key in ["SubnetLen", "SubnetMin", "SubnetMax", "EnableNFTables", "Backend"] {
        if found[key] != used[key] {
            let found = if key == "Backend" { shown(&found[key]) } else { found[key].clone() };
            let text = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
            let shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
            changed.push(format!("{key} {shown}"));
        }
    }
    (!changed.is_empty()).then(|| format!("has changed: it now says {}", changed.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> NetworkConfig {
        NetworkConfig::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn every_changed_setting_is_named() {
        let used = config(r#"{"Network":"10.5.0.0/16"}"#);
        let differs = |text: &str| difference(&used, &config(text));
        assert_eq!(differs(r#"{ "Network": "10.5.0.0/16", "SubnetLen": 24 }"#), None);
        for (text, words) in [
            (r#"{"Network":"10.9.0.0/16"}"#, "10.9.0.0/16"),
            (r#"{"Network":"10.5.0.0/16","SubnetLen":25}"#, "SubnetLen 25"),
            (r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.9.0"}"#, "SubnetMin 10.5.9.0"),
            (r#"{"Network":"10.5.0.0/16","EnableNFTables":true}"#, "EnableNFTables true"),
            (r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":9}}"#, "\"Port\":9"),
            (
                r#"{"Network":"10.5.0.0/16","Backend":{"Type":"a","aCommand":"curl s3cret"}}"#,
                "\"aCommand\":\"curl ***\"",
            ),
        ] {
            let told = differs(text).expect("a configuration that changed goes unnoticed");
            assert!(told.contains(words), "an operator is not told {words}: {told}");
        }
    }
}

//! Compares the store's network configuration with the one that this node uses. A new one is not
//! applied while the daemon runs, because every pod could lose its address: log and status report
//! it.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use serde_json::{Map, Value};

use crate::config::network::{NetworkConfig, shown};
use crate::control::backoff::{BACKOFF, Backoff};
use crate::control::error::StoreError;
use crate::control::manager::SubnetManager;
use crate::control::store::Leased;
use crate::failure::with_causes;

/// Between two readings of a file: as often as the kubelet brings a ConfigMap's news.
const FILE_PERIOD: Duration = Duration::from_secs(60);
/// Between two readings of one that is missing, or is not what runs: until it is set right, and no
/// longer. A thousand nodes read one key 200 times a second then.
const WRONG_PERIOD: Duration = Duration::from_secs(5);
/// Longest text of a backend's settings that is shown.
const SHOWN_CHARS_MAX: usize = 200;

/// What differs in the store's configuration from the one in use, if anything does. An error if it
/// is not there or not readable, for this reason: what runs goes on, a start would wait or fail.
type Compared = Result<Option<String>, String>;

impl SubnetManager {
    /// Reads the configuration again when it `may_be_changed`: a store that lost its data, was
    /// replaced or was edited shows at the next listing. A file, the local store's as well, is read
    /// again each minute. What is in use may be `from_cache`; if it is not,
    /// it was read a moment ago, and the first listing is no reason to read it again.
    pub(super) async fn check_config(
        &self,
        from_cache: bool,
        may_be_changed: &Notify,
    ) -> Infallible {
        let Some(used) = self.used_config.get() else { return std::future::pending().await };
        let is_file = !matches!(self.store.leased(), Some(Leased::Etcd(_)));
        let file_period = FILE_PERIOD.min(self.timing.relist_period);
        let usual_pause = if is_file { file_period } else { Duration::MAX };
        let (mut is_first, mut logged, mut pause) = (from_cache, Ok(None), usual_pause);
        if !from_cache {
            may_be_changed.notified().await;
        }
        loop {
            timeout(pause, may_be_changed.notified()).await.ok();
            let found = compare(self, used).await;
            let unreadable = found.as_ref().err();
            pause = if found == Ok(None) { usual_pause } else { WRONG_PERIOD };
            let mut state = self.status.edit();
            state.restart_needed = matches!(found, Ok(Some(_)));
            let next = "this node goes on with the last one; mend it before a restart of weftd";
            state.config_missing = unreadable.map(|why| format!("{why}; {next}"));
            drop(state);
            if found != logged || is_first {
                tell(&found, is_first);
            }
            (logged, is_first) = (found, false);
        }
    }
}

fn tell(found: &Compared, is_first: bool) {
    match found {
        Ok(None) => {
            let whose = if is_first { "before" } else { "this node again" };
            info!("The store has the network configuration of {whose}");
        }
        Ok(Some(other)) => warn!(
            "The network configuration in the store {other}; going on with the old one. To apply \
             the new one, restart weftd and then the pods of this host"
        ),
        Err(why) => warn!(
            "Couldn't fetch network config: {why}; going on with the last one. Mend it before a \
             restart of weftd"
        ),
    }
}

/// Reads until the store answers.
async fn compare(manager: &SubnetManager, used: &NetworkConfig) -> Compared {
    let mut backoff = Backoff::between(BACKOFF);
    let bytes = loop {
        match manager.store.config().await {
            Ok(bytes) => break bytes,
            // The lease machine reports outages.
            Err(StoreError::Unavailable { .. }) => sleep(backoff.next_wait()).await,
            Err(error) => return Err(with_causes(&error)),
        }
    };
    let found = NetworkConfig::parse(&bytes).map_err(|error| with_causes(&error))?;
    Ok(difference(used, &found))
}

/// What differs in `found` from `used`, for an operator; `None` if nothing does.
fn difference(used: &NetworkConfig, found: &NetworkConfig) -> Option<String> {
    let (network, used_network) = (found.networks(), used.networks());
    if network != used_network {
        return Some(format!(
            "is now for {network}, and not for {used_network}, in which this node has its subnet"
        ));
    }
    let (used, found) = (used.to_json(), found.to_json());
    let mut changed = Vec::new();
    let keys = [&used, &found].into_iter().filter_map(Value::as_object).flat_map(Map::keys);
    for key in keys.collect::<BTreeSet<_>>() {
        let found = &found[key];
        if *found != used[key] {
            let found = if key == "Backend" { shown(found) } else { found.clone() };
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

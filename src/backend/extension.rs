//! The extension backend: the operator's commands set up the way to each other host. Runs them,
//! never through a shell, and tries again those that fail.

mod command;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::backend::ground::of_type;
use crate::backend::network::Setup;
use crate::backend::status::{Teller, Ways};
use crate::config::network::ExtensionBackendConfig;
use crate::control::lease::{LeaseAttributes, Peers, RawJson, ValueError};
use crate::host::interface::ExternalInterface;
use crate::route::Prefix;

use self::command::{Variables, quote, run};

pub use self::command::CommandError;

/// The type in a lease.
const TYPE: &str = "extension";

/// Commands that run at once: one that hangs must not keep all other hosts waiting.
const COMMANDS_MAX: usize = 8;

/// Pauses before a command that failed is tried again, doubled each time.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The extension backend cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ExtensionError {
    /// A command at the start is needed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Its output is published with the lease.
    #[error("the output of PreStartupCommand is no use for a lease")]
    Output(#[from] ValueError),
}

/// One other host, as its commands are told.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Peer {
    public_ip: Ipv4Addr,
    data: String,
}

/// What is set up for one subnet, and what should be.
#[derive(Debug, Default)]
struct Entry {
    wanted: Option<Peer>,
    applied: Option<Peer>,
    /// When to try again, and the pause after that, if the last try failed.
    retry: Option<(Instant, Duration)>,
}

/// A running extension backend.
#[derive(Debug)]
pub struct ExtensionNetwork {
    settings: ExtensionBackendConfig,
    teller: Teller,
    entries: BTreeMap<Prefix, Entry>,
}

/// Runs the command before the start; what it prints is what the node says of itself.
pub(super) async fn introduce(
    settings: &ExtensionBackendConfig,
    external: &ExternalInterface,
) -> Result<LeaseAttributes, ExtensionError> {
    let data = match &settings.pre_startup {
        Some(command) => {
            let output = run_and_tell(command, &Variables::new(), "").await?;
            Some(json_string(&output).map_err(ValueError::Malformed)?)
        }
        None => {
            info!("No pre startup command configured - skipping");
            None
        }
    };
    let attributes = LeaseAttributes::of(TYPE, external.public_address, data);
    attributes.to_json()?;
    Ok(attributes)
}

/// `text` as a JSON string, with the escapes that Go adds for browsers' sake.
fn json_string(text: &str) -> serde_json::Result<RawJson> {
    let mut json = serde_json::to_string(text)?;
    for letter in ['<', '>', '&', '\u{2028}', '\u{2029}'] {
        json = json.replace(letter, &format!("\\u{:04x}", u32::from(letter)));
    }
    RawJson::from_text(json)
}

impl ExtensionNetwork {
    /// Runs the command after the start.
    pub async fn start(
        setup: &Setup,
        settings: ExtensionBackendConfig,
    ) -> Result<Self, ExtensionError> {
        match &settings.post_startup {
            Some(command) => {
                let variables = vec![
                    ("NETWORK", setup.network.to_string()),
                    ("SUBNET", setup.subnet.to_string()),
                    ("PUBLIC_IP", setup.attributes.public_ip.to_string()),
                    ("IPV6SUBNET", String::new()),
                    ("PUBLIC_IPV6", String::new()),
                ];
                run_and_tell(command, &variables, "").await?;
            }
            None => info!("No post startup command configured - skipping"),
        }
        let description = format!("extension: commands over {}", setup.external.name);
        let teller = Teller::new(description, setup.external.mtu_bytes, setup);
        Ok(Self { settings, teller, entries: BTreeMap::new() })
    }

    pub(super) fn teller(&self) -> &Teller {
        &self.teller
    }

    /// Follows the leases. What the commands did stays when this is dropped.
    pub async fn run(&mut self, mut leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let mut is_news = false;
        loop {
            if is_news || leases.has_changed().unwrap_or(false) {
                let peers = Arc::clone(&leases.borrow_and_update());
                self.update(&peers);
            }
            self.work().await;
            self.tell();
            if self.entries.values().any(|entry| entry.is_due(Instant::now())) {
                continue;
            }
            let next = self.entries.values().filter_map(|entry| Some(entry.retry?.0)).min();
            let retry = async {
                match next {
                    Some(at) => sleep(at.saturating_duration_since(Instant::now())).await,
                    None => std::future::pending().await,
                }
            };
            is_news = tokio::select! {
                changed = leases.changed() => {
                    if changed.is_err() {
                        // The control plane has ended; everything stays as it is.
                        std::future::pending::<()>().await;
                    }
                    true
                }
                () = retry => false,
            };
        }
    }

    fn update(&mut self, peers: &Peers) {
        for entry in self.entries.values_mut() {
            entry.wanted = None;
        }
        let mut unusable = 0;
        for (subnet, public_ip, attributes) in of_type(peers, TYPE, &self.teller) {
            let Some(data) = data_of(attributes) else {
                unusable += 1;
                continue;
            };
            let entry = self.entries.entry(subnet).or_default();
            entry.wanted = Some(Peer { public_ip, data });
        }
        if unusable > 0 && self.teller.counters.unusable.get() != unusable as u64 {
            warn!("{unusable} leases of extension nodes have data that is no string; ignored");
        }
        self.teller.counters.unusable.set(unusable);
    }

    /// Runs commands for a few hosts that are due.
    async fn work(&mut self) {
        let (settings, now) = (&self.settings, Instant::now());
        let due = self.entries.iter_mut().filter(|(_, entry)| entry.is_due(now));
        let runs = due.take(COMMANDS_MAX).map(async |(subnet, entry)| {
            let outcome = entry.apply(settings, *subnet).await;
            (entry, outcome)
        });
        for (entry, outcome) in join_all(runs).await {
            let Err(failure) = outcome else {
                entry.retry = None;
                continue;
            };
            self.teller.counters.failures.add(1);
            let pause = entry.retry.map_or(RETRY.0, |(_, pause)| pause);
            error!("{failure}; trying again in {} s", pause.as_secs());
            entry.retry = Some((Instant::now() + pause, (pause * 2).min(RETRY.1)));
        }
        self.entries.retain(|_, entry| entry.wanted.is_some() || entry.applied.is_some());
    }

    fn tell(&self) {
        let applied = self
            .entries
            .iter()
            .filter_map(|(subnet, entry)| Some((*subnet, entry.applied.as_ref()?)));
        let ways: Ways = applied.map(|(subnet, peer)| (subnet, peer.public_ip)).collect();
        let failed = self.entries.values().filter(|entry| entry.retry.is_some()).count();
        self.teller.counters.programmed.set(ways.len());
        self.teller.counters.failed.set(failed);
        self.teller.ways(ways);
    }
}

impl Entry {
    fn is_due(&self, now: Instant) -> bool {
        self.wanted != self.applied && self.retry.is_none_or(|(at, _)| at <= now)
    }

    /// Takes away what was set up for other values, and sets up what is wanted.
    async fn apply(
        &mut self,
        settings: &ExtensionBackendConfig,
        subnet: Prefix,
    ) -> Result<(), CommandError> {
        if let Some(old) = self.applied.clone() {
            let removed = run_for(settings.subnet_remove.as_ref(), subnet, &old).await;
            // A host that is there under other values must be reached, whatever the old ones left.
            if let Err(failure) = removed {
                if self.wanted.is_none() {
                    return Err(failure);
                }
                warn!("{failure}; going on with the new values");
            }
            self.applied = None;
        }
        let Some(wanted) = self.wanted.clone() else { return Ok(()) };
        run_for(settings.subnet_add.as_ref(), subnet, &wanted).await?;
        self.applied = Some(wanted);
        Ok(())
    }
}

async fn run_for(
    command: Option<&String>,
    subnet: Prefix,
    peer: &Peer,
) -> Result<(), CommandError> {
    let Some(command) = command else { return Ok(()) };
    let variables = vec![("SUBNET", subnet.to_string()), ("PUBLIC_IP", peer.public_ip.to_string())];
    run_and_tell(command, &variables, &peer.data).await.map(drop)
}

async fn run_and_tell(
    command: &str,
    variables: &Variables,
    stdin: &str,
) -> Result<String, CommandError> {
    let output = run(command, variables, stdin).await?;
    info!("Ran command: {command} Output: {}", quote(&output));
    Ok(output)
}

/// The string that a node published; `None` if it published something else.
fn data_of(attributes: &LeaseAttributes) -> Option<String> {
    match &attributes.backend_data {
        None => Some(String::new()),
        Some(data) => serde_json::from_str(data.0.get()).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lease_is_flannels_to_the_byte() {
        let data = json_string("a \"b\" <c> & d\n").unwrap();
        let lease = LeaseAttributes::of(TYPE, Ipv4Addr::new(1, 2, 3, 4), Some(data));
        let flannels = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"extension","#,
            r#""BackendData":"a \"b\" \u003cc\u003e \u0026 d\n"}"#
        );
        assert_eq!(String::from_utf8(lease.to_json().unwrap()).unwrap(), flannels);
        assert_eq!(data_of(&lease).as_deref(), Some("a \"b\" <c> & d\n"));
        let none = LeaseAttributes::of(TYPE, Ipv4Addr::new(1, 2, 3, 4), None);
        assert_eq!(data_of(&none).as_deref(), Some(""));
        let number = RawJson::from_text("7".to_owned()).unwrap();
        let odd = LeaseAttributes { backend_data: Some(number), ..none };
        assert_eq!(data_of(&odd), None);
    }
}

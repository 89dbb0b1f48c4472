//! One charon, as long as the connection to it lasts: has it load the connections that are wanted,
//! and reads what it has agreed on with their peers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::config::network::IpsecBackendConfig;
use crate::control::clock::unix_seconds;
use crate::route::Prefix;
use crate::status::IpsecPeer;

use super::client::{Client, Result, ViciError};
use super::connections::{Connection, EspPlane, associations, forget, is_of};
use super::vici::Request;

/// charon gives up a peer that refuses it, and none tells it to try again. Long enough for an
/// exchange that is under way.
const AGAIN: Duration = Duration::from_secs(30);

/// Connections by name.
pub(super) type Connections = BTreeMap<String, Connection>;

#[derive(Debug)]
pub(super) struct Session {
    client: Client,
    pub(super) version: String,
    pub(super) plane: EspPlane,
    /// What this session has loaded. What another has left may have other keys and algorithms.
    loaded: Connections,
    /// When charon was last told to try.
    tried: BTreeMap<String, Instant>,
}

/// What came of a comparison.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// What charon said of connections that it does not take.
    pub(super) refused: BTreeMap<String, ViciError>,
    /// What is agreed on, by the names of connections.
    pub(super) associations: BTreeMap<String, IpsecPeer>,
    /// Connections that somebody else has removed.
    pub(super) repaired: usize,
}

impl Session {
    pub(super) async fn new(mut client: Client) -> Result<Self> {
        client.ask(Request::register("child-updown")).await?;
        let version = client.ask(Request::command("version")).await?;
        let stats = client.ask(Request::command("stats")).await?;
        let version = version.text("version").unwrap_or("of unknown version").to_owned();
        let plane = EspPlane::of(&stats);
        Ok(Self { client, version, plane, loaded: BTreeMap::new(), tried: BTreeMap::new() })
    }

    /// Waits until what is agreed on changes, or charon ends. Cancel-safe.
    pub(super) async fn news(&self) {
        self.client.news().await;
    }

    /// Makes charon's connections in `networks` the `wanted` ones, of which there may be more if
    /// nothing is removed. An error says that charon has to be connected to anew.
    pub(super) async fn reconcile(
        &mut self,
        wanted: &Connections,
        networks: &[Prefix],
        removes: bool,
        settings: &IpsecBackendConfig,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let found = self.connections().await?;
        for name in found.iter().filter(|name| removes && is_of(name, networks)) {
            if !wanted.contains_key(name) {
                self.forget(name).await?;
            }
        }
        for (name, connection) in wanted {
            let is_as_wanted = self.loaded.get(name) == Some(connection);
            if is_as_wanted && found.contains(name) {
                continue;
            }
            outcome.repaired += usize::from(is_as_wanted);
            self.loaded.remove(name);
            match self.load(connection, settings).await {
                Ok(()) => {
                    self.loaded.insert(name.clone(), *connection);
                    self.tried.insert(name.clone(), Instant::now());
                }
                Err(error) => {
                    outcome.refused.insert(name.clone(), error.unless_refused()?);
                }
            }
        }
        let listing = self.client.list("list-sas", "list-sa").await?;
        outcome.associations = associations(&listing, unix_seconds());
        self.tried.retain(|name, _| wanted.contains_key(name));
        let is_agreed = |name: &str| {
            outcome.associations.get(name).is_some_and(|it| it.installed_unix.is_some())
        };
        for (name, tried) in self.tried.iter_mut().filter(|(name, _)| !is_agreed(name)) {
            if tried.elapsed() >= AGAIN
                && let Some(connection) = self.loaded.get(name)
            {
                *tried = Instant::now();
                refusable(self.client.ask(connection.initiate()).await)?;
            }
        }
        Ok(outcome)
    }

    /// Has charon forget all connections in `networks`; the names, and how many are left.
    pub(super) async fn clear(&mut self, networks: &[Prefix]) -> Result<(Vec<String>, usize)> {
        let (ours, others): (Vec<_>, Vec<_>) =
            self.connections().await?.into_iter().partition(|name| is_of(name, networks));
        for name in &ours {
            self.forget(name).await?;
        }
        Ok((ours, others.len()))
    }

    async fn connections(&mut self) -> Result<Vec<String>> {
        let listing = self.client.list("list-conns", "list-conn").await?;
        let names = listing.iter().flat_map(|it| it.sections()).map(|(name, _)| name.to_owned());
        Ok(names.collect())
    }

    async fn load(&mut self, connection: &Connection, settings: &IpsecBackendConfig) -> Result {
        self.client.ask(connection.share(settings)).await?;
        self.client.ask(connection.load(settings, self.plane)).await.map(drop)
    }

    async fn forget(&mut self, name: &str) -> Result {
        self.loaded.remove(name);
        for request in forget(name) {
            // It has none of these.
            refusable(self.client.ask(request).await)?;
        }
        Ok(())
    }
}

/// The outcome of what may be refused.
fn refusable<T>(outcome: Result<T>) -> Result {
    match outcome {
        Ok(_) => Ok(()),
        Err(error) => error.unless_refused().map(drop),
    }
}

//! The extension backend: the operator's commands set up the way to each other host. Runs them,
//! never through a shell, and retries those that fail.

pub(super) mod command;
mod hosts;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::OptionFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::sleep_until;
use tracing::{error, info, warn};

use crate::backend::error::StartResult;
use crate::backend::family::CarriedFamily;
use crate::backend::setup::{INTERFACE_PERIOD, Setup, addresses};
use crate::backend::status::Reporter;
use crate::backend_kind::BackendKind;
use crate::config::network::{CommandLine, ExtensionBackendConfig};
use crate::control::changes::next_value;
use crate::control::lease::{LeaseAttributes, Peers, RawJson, ValueError};
use crate::host::follower::{Following, HostFollower};
use crate::host::interface::ExternalInterface;
use crate::route::{Families, Prefix, Prefixes};

use self::command::{CommandError, RUN_TIME_MAX, Variables, quote, run};
use self::hosts::{Hosts, Peer, Task};

const KIND: BackendKind = BackendKind::Extension;

/// Commands that run at once: one that hangs must not keep all other hosts waiting.
const COMMANDS_MAX: usize = 8;

/// Delay between a finished command and the report: a starting cluster is one event, and
/// a report costs a walk over all hosts.
const REPORT_DELAY: Duration = Duration::from_millis(100);

/// A running extension backend.
pub struct ExtensionBackend {
    settings: ExtensionBackendConfig,
    host: HostFollower,
    pub(super) reporter: Reporter,
    hosts: Hosts,
}

/// Runs the pre-startup command, whose output the node publishes with its lease.
pub(super) async fn introduce(
    settings: &ExtensionBackendConfig,
    external: &ExternalInterface,
) -> StartResult<LeaseAttributes> {
    let data = match &settings.pre_startup {
        Some(command) => {
            let output = run_and_log(command, &Variables::new(), "").await?;
            Some(json_string(&output).map_err(ValueError::Malformed)?)
        }
        None => {
            info!("No pre startup command configured - skipping");
            None
        }
    };
    let attributes = LeaseAttributes { backend_data: data, ..addresses(KIND, external) };
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

impl ExtensionBackend {
    /// Runs the post-startup command.
    pub async fn start(setup: &Setup, settings: ExtensionBackendConfig) -> StartResult<Self> {
        match &settings.post_startup {
            Some(command) => {
                let LeaseAttributes { public_ip, public_ipv6, .. } = setup.attributes;
                let v4 = setup.subnets.v4().zip(public_ip);
                let mut variables = addresses_of(v4, setup.subnets.v6().zip(public_ipv6));
                variables.extend([
                    ("NETWORK", shown(setup.networks.v4())),
                    ("IPV6NETWORK", shown(setup.networks.v6())),
                ]);
                run_and_log(command, &variables, "").await?;
            }
            None => info!("No post startup command configured - skipping"),
        }
        let reporter = Reporter::new(setup);
        reporter.state(|state| state.description = describe(&setup.external));
        let following = setup.following(Vec::new(), INTERFACE_PERIOD);
        let networks_v6 = setup.networks_v6();
        let host = HostFollower::new(Following { networks_v6, ..following })?;
        Ok(Self { settings, host, reporter, hosts: Hosts::default() })
    }

    /// Follows the leases and the interface. What the commands did stays when this is dropped; one
    /// that runs is killed.
    pub async fn run(&mut self, leases: watch::Receiver<Arc<Peers>>) -> Infallible {
        let Self { settings, host, reporter, hosts } = self;
        tokio::select! {
            never = follow_interface(settings, host, reporter) => never,
            never = follow_leases(settings, hosts, reporter, leases) => never,
        }
    }
}

fn describe(external: &ExternalInterface) -> String {
    format!("extension: commands over {}", external.name)
}

async fn follow_interface(
    settings: &ExtensionBackendConfig,
    host: &mut HostFollower,
    reporter: &Reporter,
) -> Infallible {
    let has_start_commands = settings.pre_startup.is_some() || settings.post_startup.is_some();
    loop {
        let before = own_addresses(host.external());
        host.next().await;
        let external = host.external();
        reporter.follow(external, external.mtu_bytes);
        let wrong = host.lost_address().cloned().or_else(|| host.lost_v6_address());
        reporter.state(|state| (state.description, state.wrong) = (describe(external), wrong));
        let now = own_addresses(external);
        for (address, before) in now.iter().zip(&before).filter(|_| has_start_commands) {
            if address != before {
                warn!(
                    "The commands of the start are not run again for the new address {address}: \
                     if they set something up for {before}, restart weftd"
                );
            }
        }
        host.finish(true);
    }
}

/// As many as at the start.
fn own_addresses(external: &ExternalInterface) -> Vec<IpAddr> {
    let v4 = external.v4().map(|v4| v4.address.into());
    v4.into_iter().chain(external.v6().map(|v6| v6.address.into())).collect()
}

async fn follow_leases(
    settings: &ExtensionBackendConfig,
    hosts: &mut Hosts,
    reporter: &Reporter,
    mut leases: watch::Receiver<Arc<Peers>>,
) -> Infallible {
    let mut running = FuturesUnordered::new();
    let mut report_at = None;
    loop {
        while running.len() < COMMANDS_MAX
            && let Some(task) = hosts.begin(Instant::now())
        {
            running.push(perform(settings, task));
        }
        // With every slot taken, a host that is due waits for a command to end.
        let retry_at = hosts.next_retry().filter(|_| running.len() < COMMANDS_MAX).map(Into::into);
        tokio::select! {
            peers = next_value(&mut leases) => hosts.want(wanted(&peers, reporter)),
            Some((task, applied, failure)) = running.next() => {
                let pause = hosts.end(&task, applied, Instant::now());
                if let Some(failure) = failure {
                    reporter.count(|done| done.failures += 1);
                    error!("{failure}; retrying in {} s", pause.as_secs());
                }
                report_at.get_or_insert_with(|| (Instant::now() + REPORT_DELAY).into());
            }
            Some(()) = OptionFuture::from(retry_at.map(sleep_until)) => {}
            Some(()) = OptionFuture::from(report_at.map(sleep_until)) => {
                report_at = None;
                reporter.hosts(hosts.applied(), hosts.done(), hosts.failed());
            }
        }
    }
}

fn wanted(peers: &Peers, reporter: &Reporter) -> BTreeMap<Prefixes, Peer> {
    let (mut wanted, mut unusable) = (BTreeMap::new(), 0);
    for lease in reporter.of_kind(peers, KIND) {
        let addresses = Families::new(Ipv4Addr::peer(lease), Ipv6Addr::peer(lease));
        match addresses.zip(data_of(&lease.attributes)) {
            Some((addresses, data)) => {
                wanted.insert(lease.subnets.first(), Peer { addresses, data });
            }
            None => unusable += 1,
        }
    }
    reporter.count(|done| {
        if std::mem::replace(&mut done.leases_unusable, unusable) != unusable && unusable > 0 {
            warn!("{unusable} leases of extension nodes have data that is no string; ignored");
        }
    });
    wanted
}

/// Gives what is set up for the subnet after it, and what went wrong.
async fn perform(
    settings: &ExtensionBackendConfig,
    task: Task,
) -> (Task, Option<Peer>, Option<CommandError>) {
    let Task { from, to, .. } = &task;
    if let Some(old) = from
        && let Err(failure) = run_for(settings.subnet_remove.as_ref(), old).await
    {
        if to.is_none() {
            let applied = from.clone();
            return (task, applied, Some(failure));
        }
        // A host that is there under other values must be reached, whatever the old ones left.
        warn!("{failure}; going on with the new values");
    }
    let failure = match to {
        Some(new) => run_for(settings.subnet_add.as_ref(), new).await.err(),
        None => None,
    };
    let applied = if failure.is_some() { None } else { to.clone() };
    (task, applied, failure)
}

async fn run_for(command: Option<&CommandLine>, peer: &Peer) -> Result<(), CommandError> {
    let Some(command) = command else { return Ok(()) };
    let variables = addresses_of(peer.addresses.v4(), peer.addresses.v6());
    run_and_log(command, &variables, &peer.data).await.map(drop)
}

/// A node's subnets and addresses, in flannel's words; empty of a family that it has not.
fn addresses_of(
    v4: Option<(Prefix, Ipv4Addr)>,
    v6: Option<(Prefix<Ipv6Addr>, Ipv6Addr)>,
) -> Variables {
    let ((subnet, public_ip), (subnet_v6, public_ipv6)) = (v4.unzip(), v6.unzip());
    vec![
        ("SUBNET", shown(subnet)),
        ("PUBLIC_IP", shown(public_ip)),
        ("IPV6SUBNET", shown(subnet_v6)),
        ("PUBLIC_IPV6", shown(public_ipv6)),
    ]
}

fn shown(value: Option<impl Display>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

async fn run_and_log(
    command: &CommandLine,
    variables: &Variables,
    stdin: &str,
) -> Result<String, CommandError> {
    let output = run(command, variables, stdin, RUN_TIME_MAX).await?;
    info!("Ran command: {command} Output: {}", quote(&output));
    Ok(output)
}

/// The string that a node published; `None` if it published something else.
fn data_of(attributes: &LeaseAttributes) -> Option<String> {
    let data = attributes.backend_data.as_ref();
    data.map_or_else(|| Some(String::new()), |data| serde_json::from_str(data.0.get()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_equals_flannels_byte_for_byte() {
        let data = json_string("a \"b\" <c> & d\n").unwrap();
        let lease = LeaseAttributes::of(KIND, Ipv4Addr::new(1, 2, 3, 4), Some(data));
        let flannels = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"extension","#,
            r#""BackendData":"a \"b\" \u003cc\u003e \u0026 d\n"}"#
        );
        assert_eq!(String::from_utf8(lease.to_json().unwrap()).unwrap(), flannels);
        assert_eq!(data_of(&lease).as_deref(), Some("a \"b\" <c> & d\n"));
        let none = LeaseAttributes::of(KIND, Ipv4Addr::new(1, 2, 3, 4), None);
        assert_eq!(data_of(&none).as_deref(), Some(""));
        let number = RawJson::from_text("7".to_owned()).unwrap();
        let odd = LeaseAttributes { backend_data: Some(number), ..none };
        assert_eq!(data_of(&odd), None);
    }
}

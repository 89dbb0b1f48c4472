//! `weft lease`: the leases in the store itself, with weftd or without it.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use crate::backend::flaws::flaws;
use crate::config::flags::{self, Outcome};
use crate::config::options::StoreOptions;
use crate::control::clock::format_rfc3339;
use crate::control::lease::{Lease, Lifetime};
use crate::control::manager::SubnetManager;
use crate::control::rejected::Rejected;
use crate::control::snapshot::Snapshot;
use crate::route::Prefixes;
use crate::status::SCHEMA;
use crate::tool::arguments::{LeaseCommand, Output, StoreArguments};
use crate::tool::ask::wait_for;
use crate::tool::table;

const HEADINGS: [&str; 5] = ["SUBNET", "PUBLIC IP", "BACKEND", "KIND", "UNTIL"];

/// Does what was asked for; returns what to print.
pub(super) fn run(command: LeaseCommand) -> anyhow::Result<String> {
    wait_for(answer(command))?
}

async fn answer(command: LeaseCommand) -> anyhow::Result<String> {
    match command {
        LeaseCommand::List { store, output } => {
            let store = open(&store).await?;
            let snapshot = store.entries().await?;
            if snapshot.leases.is_empty() && snapshot.rejected.is_empty() {
                // An empty list may be that of a place where nobody keeps leases.
                store.network_config().await?;
            }
            Ok(match output {
                Some(Output::Json) => format!("{:#}\n", list_json(&snapshot)),
                None => list(&snapshot),
            })
        }
        LeaseCommand::Show { what, store } => show(&open(&store).await?.entries().await?, &what),
        LeaseCommand::Reserve { subnets, address, store } => {
            open(&store).await?.reserve(subnets, address).await?;
            Ok(format!("{subnets} is reserved for {address}, which takes it at its next start\n"))
        }
        LeaseCommand::Release { subnets, node_is_gone, store } => {
            let lease = open(&store).await?.release(subnets, node_is_gone).await?;
            Ok(format!("{subnets} of {} is free\n", lease.attributes.node_address()))
        }
    }
}

/// The store that a weftd with these flags, and with the variables of this environment, would use.
async fn open(store: &StoreArguments) -> anyhow::Result<SubnetManager> {
    let words = std::iter::once(OsString::from("weftd")).chain(store.flags.iter().cloned());
    let options = match flags::parse(words, &|name| std::env::var_os(name)) {
        Outcome::Run(options, warnings) => {
            for warning in warnings {
                writeln!(io::stderr(), "weft: {warning}").ok();
            }
            options
        }
        Outcome::End(text, _) => bail!("{}", text.trim_end()),
    };
    if let StoreOptions::Local(directory) = &options.store
        && let Err(error) = directory.join("config").metadata()
    {
        // Opened, it would be made.
        bail!("{} is no local store: its `config`: {error}", directory.display());
    }
    SubnetManager::connect(&options.store, None).await.context("the store cannot be used")
}

fn list(snapshot: &Snapshot) -> String {
    let mut leases: Vec<_> = snapshot.leases.iter().collect();
    leases.sort_by_key(|lease| lease.subnets);
    let rows: Vec<_> = leases.iter().map(|lease| row(lease)).collect();
    let mut text = table::render(&HEADINGS, &rows, |_, _, shown| shown.to_owned());
    for lease in leases {
        text.extend(flaws(lease).iter().map(|why| format!("unusable: {:?}: {why}\n", lease.key)));
    }
    for Rejected { key, detail, .. } in &snapshot.rejected {
        text += &format!("no lease: {key:?}: {detail}\n");
    }
    text
}

fn row(lease: &Lease) -> Vec<String> {
    let (kind, expires_unix) = kind_and_end(lease);
    // A lease that names none is of udp, which without IPv4 has data of IPv6; a reservation is of
    // whatever its node runs.
    let backend = Some(&lease.attributes.backend_type);
    let has_data = lease.attributes.backend_v6_data.is_some();
    let backend = backend.filter(|it| lease.v4().is_some() || has_data || !it.is_udp());
    vec![
        lease.subnets.to_string(),
        lease.attributes.node_address().to_string(),
        backend.map_or_else(|| "-".to_owned(), ToString::to_string),
        kind.to_owned(),
        expires_unix.map_or_else(|| "-".to_owned(), format_rfc3339),
    ]
}

fn kind_and_end(lease: &Lease) -> (&'static str, Option<u64>) {
    match lease.lifetime {
        Lifetime::Reservation => ("reservation", None),
        Lifetime::Leased { expires_unix, .. } => ("lease", expires_unix),
    }
}

fn list_json(snapshot: &Snapshot) -> Value {
    let rejected = snapshot.rejected.iter().map(|Rejected { key, reason, detail, .. }| {
        json!({ "key": key, "reason": reason.name(), "detail": detail })
    });
    json!({
        "schema": SCHEMA,
        "leases": snapshot.leases.iter().map(|it| lease_json(it)).collect::<Value>(),
        "rejected": rejected.collect::<Value>(),
    })
}

fn lease_json(lease: &Lease) -> Value {
    let (kind, expires_unix) = kind_and_end(lease);
    json!({
        "subnet": lease.v4().map(|subnet| subnet.to_string()),
        "ipv6_subnet": lease.subnets.v6().map(|subnet| subnet.to_string()),
        "key": lease.key,
        "kind": kind,
        "expires_unix": expires_unix,
        "revision": lease.revision,
        "value": lease.attributes,
        "unusable": flaws(lease),
    })
}

fn show(snapshot: &Snapshot, what: &str) -> anyhow::Result<String> {
    let subnets: Option<Prefixes> = what.parse().ok();
    let is_it = |lease: &&Arc<Lease>| {
        subnets.is_some_and(|subnets| subnets.is_part_of(lease.subnets))
            || lease.attributes.node_address().to_string() == what
            || lease.attributes.public_ipv6.is_some_and(|it| it.to_string() == what)
    };
    let lease = snapshot.leases.iter().find(is_it);
    let lease = lease.ok_or_else(|| anyhow!("the store has no lease of {what}"))?;
    let mut json = lease_json(lease);
    json["schema"] = SCHEMA.into();
    Ok(format!("{json:#}\n"))
}

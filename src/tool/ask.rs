//! Asks a running weftd.

use std::path::Path;

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::daemon::status::fetch_unix;
use crate::status::SCHEMA;

/// What weftd answers: as it came, and as far as this tool knows it.
pub(super) fn ask<T: DeserializeOwned>(socket: &Path, target: &str) -> anyhow::Result<(Value, T)> {
    let bytes = fetch_unix(socket, target)?;
    let answer: Value =
        serde_json::from_slice(&bytes).context("weftd answered something else than JSON")?;
    let known = T::deserialize(&answer).with_context(|| {
        let theirs = &answer["schema"];
        format!("weftd speaks schema {theirs}, this tool {SCHEMA}: use the weft of its release")
    })?;
    Ok((answer, known))
}

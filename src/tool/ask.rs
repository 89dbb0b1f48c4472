//! Asks a running weftd.

use std::path::Path;
use std::{fs, io};

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;

use crate::daemon::status::fetch_unix;
use crate::status::SCHEMA;

/// Runs `work` to its end. What it leaves behind, such as a resolver, is not waited for.
pub(super) fn wait_for<F: Future>(work: F) -> io::Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let output = runtime.block_on(work);
    runtime.shutdown_background();
    Ok(output)
}

/// Whether the process `pid` is in this one's network namespace; nothing if that can't be told. A
/// socket's file is the same in all of them.
pub(super) fn shares_network(pid: u32) -> Option<bool> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    Some(namespace(&pid.to_string())? == namespace("self")?)
}

/// The process behind `socket`; of another pid namespace it is not known.
pub(super) fn pid_behind(socket: &Path) -> io::Result<Option<u32>> {
    let stream = wait_for(UnixStream::connect(socket))??;
    // Of another pid namespace it is 0.
    let pid = stream.peer_cred()?.pid().and_then(|pid| pid.try_into().ok());
    Ok(pid.filter(|pid| *pid > 0))
}

/// What weftd answers, as text.
pub(super) fn page(socket: &Path, target: &str) -> anyhow::Result<String> {
    Ok(String::from_utf8_lossy(&fetch_unix(socket, target)?).into_owned())
}

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

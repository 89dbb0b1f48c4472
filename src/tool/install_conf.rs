//! `weft install-conf`: copies a configuration file atomically, for the container that prepares a
//! node: a runtime that reads the directory meanwhile sees the old file or the new one.

use std::path::Path;

use anyhow::Context;
use rustix::fs::Mode;

use crate::config::whole_file;

/// The kubelet, the container runtime and people read it.
const MODE: Mode = Mode::from_raw_mode(0o644);

/// Far beyond any network configuration list or system call profile.
const BYTES_MAX: u64 = 1 << 20;

/// Reads, checks and places `source` at `destination`; gives one line for the log of the container.
pub(super) fn copy(source: &Path, destination: &Path) -> anyhow::Result<String> {
    let bytes = whole_file::read(source, BYTES_MAX)?;
    let bytes = bytes.with_context(|| format!("there is no {}", source.display()))?;
    // A damaged file in place would take the node's network away; the old one stays instead.
    serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
        .with_context(|| format!("{} is not copied: it is not JSON", source.display()))?;
    whole_file::write_for_others(destination, &bytes, MODE)?;
    Ok(format!("{} is in place, from {}\n", destination.display(), source.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_is_replaced_whole_and_world_readable() {
        let directory = tempfile::tempdir().unwrap();
        let (source, destination) =
            (directory.path().join("cni-conf.json"), directory.path().join("net.d/10.conflist"));
        fs::write(&source, r#"{"name":"cbr0"}"#).unwrap();
        let line = copy(&source, &destination).unwrap();
        assert!(line.contains("10.conflist"), "{line}");
        fs::write(&source, r#"{"name":"cbr1"}"#).unwrap();
        copy(&source, &destination).unwrap();
        assert_eq!(fs::read_to_string(&destination).unwrap(), r#"{"name":"cbr1"}"#);
        let mode = fs::metadata(&destination).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644);
        let names = fs::read_dir(destination.parent().unwrap()).unwrap().count();
        assert_eq!(names, 1, "something was left beside the file");
        // Installers leave the directories of CNI to other users; only root can.
        if std::os::unix::fs::chown(destination.parent().unwrap(), Some(1000), None).is_ok() {
            copy(&source, &destination).unwrap();
        }
    }

    #[test]
    fn missing_or_broken_source_keeps_old_file() {
        let directory = tempfile::tempdir().unwrap();
        let (source, destination) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&destination, "{}").unwrap();
        let error = copy(&source, &destination).unwrap_err().to_string();
        assert!(error.contains(&source.display().to_string()), "{error}");
        fs::write(&source, r#"{"name":"#).unwrap();
        assert!(copy(&source, &destination).unwrap_err().to_string().contains("not JSON"));
        assert_eq!(fs::read_to_string(&destination).unwrap(), "{}");
    }
}

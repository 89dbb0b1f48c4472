//! The file of this host's private key: flannel's, so that each reads what the other has made, and
//! peers know the host by one key.

use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::rand::{GetRandomFlags, getrandom};
use tracing::{info, warn};
use zeroize::Zeroizing;

use crate::config::whole_file::{self, FileError};
use crate::wireguard::keys::{KEY_BYTES, KeyError, PrivateKey};

/// As flannel's.
const FILE_MODE: Mode = Mode::from_raw_mode(0o400);
/// A key has 44 characters, and whoever has made the file by hand a few line ends.
const FILE_BYTES_MAX: u64 = 64;

/// This host has no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It can't be read or made, or others may have written it.
    #[error(transparent)]
    File(#[from] FileError),
    /// Something else is in it, which is not repeated.
    #[error(
        "{path} holds no WireGuard key: {source}; delete it to have a new one made, or name \
         another file in WIREGUARD_KEY_FILE",
        path = path.display()
    )]
    NoKey {
        /// The file.
        path: PathBuf,
        /// What a key would be.
        source: KeyError,
    },
    /// The kernel has nothing to make one of.
    #[error("the kernel gives no random bytes for a key")]
    Random(#[source] rustix::io::Errno),
}

/// The key in the file at `path`, which is made if it is missing.
pub(super) fn read_or_make(path: &Path) -> Result<PrivateKey, KeyFileError> {
    if let Some(text) = whole_file::read_private(path, FILE_BYTES_MAX)?.map(Zeroizing::new) {
        warn_if_readable(path);
        let text = std::str::from_utf8(&text).map_err(|_binary| KeyError);
        let key = text.and_then(|text| text.trim().parse());
        return key.map_err(|source| KeyFileError::NoKey { path: path.to_owned(), source });
    }
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    // Whole, for 256 bytes or less are never cut short (getrandom(2)).
    getrandom(&mut *bytes, GetRandomFlags::empty()).map_err(KeyFileError::Random)?;
    let key = PrivateKey::from_random(*bytes);
    whole_file::write(path, key.to_base64().as_bytes(), FILE_MODE)?;
    info!("made a WireGuard key in {}; its public key is {}", path.display(), key.public());
    Ok(key)
}

/// Whoever has read it can pose as this node: nothing stops working, so it is only told.
fn warn_if_readable(path: &Path) {
    let Ok(status) = rustix::fs::stat(path) else { return };
    let mode = Mode::from_raw_mode(status.st_mode);
    if mode.intersects(Mode::RGRP | Mode::ROTH) {
        warn!(
            "{path} may be read by others (mode {:o}), and whoever has read it can pose as this \
             node: chmod 0400 {path}; if that may have happened, delete it and restart weftd, \
             which makes another key",
            mode.as_raw_mode(),
            path = path.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_key_is_made_once_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("flannel/wgkey");
        let key = read_or_make(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o400, "others may read the key");
        assert_eq!(fs::read_to_string(&path).unwrap(), *key.to_base64(), "as flanneld reads it");
        assert_eq!(read_or_make(&path).unwrap(), key, "peers would have to learn another");
        fs::remove_file(&path).unwrap();
        assert_ne!(read_or_make(&path).unwrap(), key, "keys are no secret");
    }

    #[test]
    fn a_file_that_is_no_key_or_perhaps_of_others_is_refused_and_not_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wgkey");
        for text in ["", "dwdtCnMYpX08FsFyUbJmRd9", "\u{e9}"] {
            fs::write(&path, text).unwrap();
            let error = read_or_make(&path).unwrap_err();
            assert!(matches!(error, KeyFileError::NoKey { .. }), "{error}");
            let error = crate::failure::with_causes(&error);
            assert!(!error.contains("dwdt"), "a secret is shown: {error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "somebody's file is overwritten");
        }
        let key = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\n";
        fs::write(&path, key).unwrap();
        assert_eq!(read_or_make(&path).unwrap(), key.parse().unwrap());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(read_or_make(&path).is_err(), "others may have put a key there that they know");
        let link = directory.path().join("link");
        symlink(directory.path().join("target"), &link).unwrap();
        assert!(read_or_make(&link).is_err(), "a link is followed");
    }
}

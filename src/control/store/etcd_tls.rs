//! TLS certificates for etcd: read again when their files change, and their errors with advice.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use etcd_client::{Certificate, Identity, TlsOptions};

use crate::config::options::EtcdOptions;
use crate::control::clock::format_rfc3339;

/// Why the etcd options cannot work, whatever the cluster does.
#[derive(Debug, thiserror::Error)]
pub enum EtcdOptionsError {
    /// No endpoint was given.
    #[error("--etcd-endpoints is empty; name at least one URL such as http://127.0.0.1:2379")]
    NoEndpoints,
    /// An endpoint is no URL.
    #[error("--etcd-endpoints: {endpoint:?} is no usable URL: {detail}")]
    BadEndpoint {
        /// As given.
        endpoint: String,
        /// What is wrong.
        detail: String,
    },
    /// A certificate or key file cannot be read.
    #[error("cannot read {0}, needed to reach etcd")]
    File(String, #[source] std::io::Error),
}

/// Detects a change of the certificate files without reading them. Follows symbolic links, which is
/// how Kubernetes rotates what it mounts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Stamp(Vec<Option<FileStamp>>);

/// Device, inode, size, and time of the last change.
type FileStamp = ((u64, u64), u64, (i64, i64));

impl Stamp {
    /// As the files of `options` are now. A file that is missing has a stamp as well.
    pub(super) fn of(options: &EtcdOptions) -> Self {
        let client = options.client_certificate.as_ref();
        let files = [
            options.ca_file.as_deref(),
            client.map(|client| client.certificate_file.as_path()),
            client.map(|client| client.key_file.as_path()),
        ];
        Self(files.into_iter().flatten().map(file_stamp).collect())
    }
}

fn file_stamp(path: &Path) -> Option<FileStamp> {
    let found = std::fs::metadata(path).ok()?;
    Some(((found.dev(), found.ino()), found.size(), (found.mtime(), found.mtime_nsec())))
}

/// The options of TLS from the files as they are now. Without `--etcd-cafile` the system's
/// authorities vouch for the server, as for flanneld.
pub(super) fn tls_options(options: &EtcdOptions) -> Result<TlsOptions, EtcdOptionsError> {
    let mut tls = match &options.ca_file {
        Some(ca_file) => TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca_file)?)),
        None => TlsOptions::new().with_native_roots(),
    };
    if let Some(client) = &options.client_certificate {
        let certificate = read(&client.certificate_file)?;
        tls = tls.identity(Identity::from_pem(certificate, read(&client.key_file)?));
    }
    Ok(tls)
}

fn read(path: &Path) -> Result<Vec<u8>, EtcdOptionsError> {
    std::fs::read(path).map_err(|error| EtcdOptionsError::File(path.display().to_string(), error))
}

/// What an operator has to do about `detail`, if it is a complaint of TLS. The client wraps these
/// errors in types that it does not show, so their text is what there is.
pub(super) fn advice(detail: &str) -> Option<String> {
    if let Some(at) = unix_time_after(detail, "certificate is not valid after ") {
        return Some(format!(
            "the certificate of this etcd member expired at {at} (notAfter); give the member a \
             new one"
        ));
    }
    if let Some(at) = unix_time_after(detail, "certificate is not valid before ") {
        return Some(format!(
            "the certificate of this etcd member begins at {at} (notBefore); set the clock of \
             this host or of the one that issued it"
        ));
    }
    if detail.contains("invalid peer certificate: UnknownIssuer") {
        return Some(
            "neither --etcd-cafile nor, without it, the system's certificates hold the authority \
             of this etcd member"
                .to_owned(),
        );
    }
    // Without a cause it is the client's word for files that it could not use.
    if detail.split(": ").all(|part| part == "transport error") {
        return Some(
            "the files of --etcd-cafile, --etcd-certfile and --etcd-keyfile hold no usable \
             certificates, or the key belongs to another certificate"
                .to_owned(),
        );
    }
    // The member's own words about our certificate: an alert of TLS.
    detail.contains("received fatal alert: ").then(|| {
        "this etcd member refuses the client certificate; renew --etcd-certfile and \
         --etcd-keyfile, which are read again at the next try"
            .to_owned()
    })
}

fn unix_time_after(text: &str, marker: &str) -> Option<String> {
    let (_, rest) = text.split_once(marker)?;
    let digits = rest.split(|character: char| !character.is_ascii_digit()).next()?;
    digits.parse().ok().map(format_rfc3339)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::ClientCertificate;

    #[test]
    fn only_expired_certificate_is_reported_with_date() {
        let expired = "transport error: invalid peer certificate: certificate expired: \
                       verification time 1795253306 (UNIX), but certificate is not valid after \
                       1795166906 (86400 seconds ago)";
        let advice_text = advice(expired).unwrap();
        assert!(advice_text.contains("2026-11-20T09:28:26Z (notAfter)"), "{advice_text}");
        let early = "certificate not valid yet: verification time 1795253306 (UNIX), but \
                     certificate is not valid before 1795253307 (1 seconds in future)";
        assert!(advice(early).unwrap().contains("2026-11-21T09:28:27Z (notBefore)"));
        let refused = advice("received fatal alert: CertificateExpired").unwrap();
        assert!(refused.contains("--etcd-certfile"), "{refused}");
        assert!(advice("transport error: transport error").unwrap().contains("--etcd-keyfile"));
        for other in
            ["", "transport error: Connection refused", "certificate is not valid after some time"]
        {
            assert_eq!(advice(other), None, "{other:?}");
        }
    }

    #[test]
    fn any_change_of_a_file_changes_the_stamp() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["ca", "certificate", "key"] {
            std::fs::write(path(name), name).unwrap();
        }
        let client =
            ClientCertificate { certificate_file: path("certificate"), key_file: path("key") };
        let options = EtcdOptions {
            endpoints: Vec::new(),
            prefix: String::new(),
            ca_file: Some(path("ca")),
            client_certificate: Some(client),
            credentials: None,
        };
        let before = Stamp::of(&options);
        assert_eq!(before, Stamp::of(&options), "the same files look rotated");
        std::fs::write(path("key"), "another key").unwrap();
        let rewritten = Stamp::of(&options);
        assert_ne!(rewritten, before, "a rewritten file goes unnoticed");
        std::fs::write(path("new"), "ca").unwrap();
        std::fs::rename(path("new"), path("ca")).unwrap();
        let replaced = Stamp::of(&options);
        assert_ne!(replaced, rewritten, "a file of the same length goes unnoticed");
        std::fs::remove_file(path("certificate")).unwrap();
        assert_ne!(Stamp::of(&options), replaced, "a missing file goes unnoticed");
    }
}

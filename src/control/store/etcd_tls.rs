//! TLS certificates for etcd: read anew for each connection, and their errors with advice.

use std::path::Path;

use etcd_client::{Certificate, Identity, TlsOptions};

use crate::config::options::EtcdOptions;
use crate::control::clock::format_rfc3339;
use crate::control::error::ConnectError;

/// The options of TLS from the files as they are now. Without `--etcd-cafile` the system's
/// authorities vouch for the server, as for flanneld.
pub(super) fn tls_options(options: &EtcdOptions) -> Result<TlsOptions, ConnectError> {
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

fn read(path: &Path) -> Result<Vec<u8>, ConnectError> {
    std::fs::read(path).map_err(|error| {
        ConnectError(format!("cannot read {}, needed to reach etcd: {error}", path.display()))
    })
}

/// What an operator has to do about `detail`, if it is a complaint of TLS. The client wraps these
/// errors in types that it does not show, so their text is what there is.
pub(super) fn advice(detail: &str) -> Option<String> {
    let at = |marker| unix_time_after(detail, marker);
    Some(if let Some(at) = at("certificate is not valid after ") {
        format!(
            "the certificate of this etcd member expired at {at} (notAfter); give the member a \
             new one"
        )
    } else if let Some(at) = at("certificate is not valid before ") {
        format!(
            "the certificate of this etcd member begins at {at} (notBefore); set the clock of \
             this host or of the one that issued it"
        )
    } else if detail.contains("invalid peer certificate: UnknownIssuer") {
        "neither --etcd-cafile nor, without it, the system's certificates hold the authority of \
         this etcd member"
            .to_owned()
    } else if detail.split(": ").all(|part| part == "transport error") {
        // Without a cause it is the client's word for files that it could not use.
        "the files of --etcd-cafile, --etcd-certfile and --etcd-keyfile hold no usable \
         certificates, or the key belongs to another certificate"
            .to_owned()
    } else if is_about_ours(detail) {
        "this etcd member wants a client certificate that it accepts: give --etcd-certfile and \
         --etcd-keyfile, or renew them; they are read again at the next try"
            .to_owned()
    } else {
        return None;
    })
}

/// Whether it is the member's own word about our certificate: such an alert of TLS (RFC 8446, 6.2).
fn is_about_ours(detail: &str) -> bool {
    let alert = detail.split_once("received fatal alert: ").map(|(_, alert)| alert);
    alert.is_some_and(|alert| alert.contains("Certificate") || alert.contains("UnknownCA"))
}

fn unix_time_after(text: &str, marker: &str) -> Option<String> {
    let (_, rest) = text.split_once(marker)?;
    let digits = rest.split(|character: char| !character.is_ascii_digit()).next()?;
    digits.parse().ok().map(format_rfc3339)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

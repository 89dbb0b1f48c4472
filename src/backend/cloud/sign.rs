//! Signatures of the clouds: AWS's SigV4 and Tencent's TC3 for POST requests with a body, which
//! differ in words only, and Alibaba's of RPC requests. Pure.
//!
//! Over ring, which is here for WireGuard and TLS: the crates that sign for AWS bring another set
//! of hashes and an XML writer (reqsign), or ask for a newer compiler than weft does (aws-sigv4).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::{digest, hmac};

/// What differs between SigV4 and TC3.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scheme<'a> {
    /// The algorithm's name.
    pub(super) algorithm: &'static str,
    /// What the secret is prefixed with.
    pub(super) secret_prefix: &'static str,
    /// The time, as the string to sign has it.
    pub(super) time: &'a str,
    /// What the key is derived for, from the day on; the last is the scheme's own word.
    pub(super) scope: &'a [&'a str],
}

/// The `Authorization` of a POST to `/` with these headers, in lower case and sorted.
pub(super) fn authorization(
    scheme: &Scheme<'_>,
    (key_id, secret): (&str, &str),
    headers: &BTreeMap<&str, String>,
    body: &[u8],
) -> String {
    let signed = headers.keys().copied().collect::<Vec<_>>().join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let request = format!("POST\n/\n\n{lines}\n{signed}\n{}", sha256(body));
    let Scheme { algorithm, secret_prefix, time, scope } = scheme;
    let credential = scope.join("/");
    let to_sign = format!("{algorithm}\n{time}\n{credential}\n{}", sha256(request.as_bytes()));
    let mut key = format!("{secret_prefix}{secret}").into_bytes();
    for part in *scope {
        key = hmac_sha256(&key, part.as_bytes());
    }
    let signature = hex(&hmac_sha256(&key, to_sign.as_bytes()));
    format!(
        "{algorithm} Credential={key_id}/{credential}, SignedHeaders={signed}, \
         Signature={signature}"
    )
}

/// The `Signature` parameter of Alibaba's RPC requests with these parameters, for a `method`.
pub(super) fn rpc_signature(
    method: &str,
    parameters: &BTreeMap<&str, String>,
    secret: &str,
) -> String {
    let to_sign = format!("{method}&%2F&{}", encoded(&query(parameters)));
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, format!("{secret}&").as_bytes());
    STANDARD.encode(hmac::sign(&key, to_sign.as_bytes()))
}

/// `name=value&...`, in the order of the names.
pub(super) fn query<'a>(parameters: impl IntoIterator<Item = (&'a &'a str, &'a String)>) -> String {
    let pairs = parameters.into_iter();
    let pairs = pairs.map(|(name, value)| format!("{}={}", encoded(name), encoded(value)));
    pairs.collect::<Vec<_>>().join("&")
}

/// Percent encoding with RFC 3986's unreserved characters as they are.
pub(super) fn encoded(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                all.push(byte.into());
            }
            // Writing to a String can't fail.
            _ => write!(all, "%{byte:02X}").unwrap_or_default(),
        }
    }
    all
}

fn hmac_sha256(key: &[u8], message: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), message).as_ref().to_vec()
}

fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `post-x-www-form-urlencoded` of AWS's own suite for signers.
    #[test]
    fn aws_s_published_request_has_the_published_signature() {
        let scheme = Scheme {
            algorithm: "AWS4-HMAC-SHA256",
            secret_prefix: "AWS4",
            time: "20150830T123600Z",
            scope: &["20150830", "us-east-1", "service", "aws4_request"],
        };
        let headers = BTreeMap::from([
            ("content-type", "application/x-www-form-urlencoded".to_owned()),
            ("host", "example.amazonaws.com".to_owned()),
            ("x-amz-date", "20150830T123600Z".to_owned()),
        ]);
        let key = ("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY");
        assert_eq!(
            authorization(&scheme, key, &headers, b"Param1=value1"),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date, \
             Signature=ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"
        );
    }

    /// The example of Tencent's page about signature method v3, whose secret is asterisks.
    #[test]
    fn tencent_s_published_request_has_the_published_signature() {
        let scheme = Scheme {
            algorithm: "TC3-HMAC-SHA256",
            secret_prefix: "TC3",
            time: "1551113065",
            scope: &["2019-02-25", "cvm", "tc3_request"],
        };
        let headers = BTreeMap::from([
            ("content-type", "application/json; charset=utf-8".to_owned()),
            ("host", "cvm.tencentcloudapi.com".to_owned()),
            ("x-tc-action", "describeinstances".to_owned()),
        ]);
        let stars = "*".repeat(32);
        let body = concat!(
            r#"{"Limit": 1, "Filters": [{"Values": ["\u672a\u547d\u540d"], "#,
            r#""Name": "instance-name"}]}"#
        )
        .as_bytes();
        let found = authorization(&scheme, (&format!("AKID{stars}"), &stars), &headers, body);
        let signature = "10b1a37a7301a02ca19a647ad722d5e43b4b3cff309d421d85b46093f6ab6c4f";
        assert!(found.ends_with(&format!("Signature={signature}")), "{found}");
    }

    /// The example of Alibaba's page about signatures of RPC requests.
    #[test]
    fn alibaba_s_published_request_has_the_published_signature() {
        let parameters = [
            ("AccessKeyId", "testid"),
            ("Action", "DescribeRegions"),
            ("Format", "XML"),
            ("SignatureMethod", "HMAC-SHA1"),
            ("SignatureNonce", "3ee8c1b8-83d3-44af-a94f-4e0ad82fd6cf"),
            ("SignatureVersion", "1.0"),
            ("Timestamp", "2016-02-23T12:46:24Z"),
            ("Version", "2014-05-26"),
        ];
        let parameters = parameters.map(|(name, value)| (name, value.to_owned())).into();
        let of = |method| rpc_signature(method, &parameters, "testsecret");
        assert_eq!(of("GET"), "OLeaidS1JvxuMvnyHOwuJ+uX5qY=");
        assert_ne!(of("POST"), of("GET"));
    }

    #[test]
    fn what_is_reserved_is_encoded() {
        assert_eq!(encoded("a-_.~Z9"), "a-_.~Z9");
        assert_eq!(encoded("a b+/=*é"), "a%20b%2B%2F%3D%2A%C3%A9");
    }
}

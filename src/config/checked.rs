//! What checks of flags, variables and the network's configuration have in common: their error,
//! secrets, how URLs are read, and what is a host's address, which goes for leases as well.

use std::ffi::OsString;
use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use hyper::Uri;
use zeroize::{Zeroize, ZeroizeOnDrop};

/// Why the values of the flags stop a start.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct OptionError(pub(super) String);

/// What a check of flags or variables gives.
pub(super) type Result<T> = std::result::Result<T, OptionError>;

/// A text that is never shown, and that its memory doesn't keep.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop, derive_more::Debug)]
#[debug("***")]
pub struct Secret(pub String);

/// Looks up a variable of the environment.
pub type Variable<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Reads the URL of a server, which may be below a path, as behind a proxy, if it `may_have_path`.
/// A user of the server is for `user_flags` to tell: a complaint about one in the URL does not
/// repeat it, because a password may be in there.
pub(super) fn url(flag: &str, text: &str, may_have_path: bool, user_flags: &str) -> Result<String> {
    if text.contains('@') {
        return Err(refused(flag, format!("a URL must not hold a user: use {user_flags} instead")));
    }
    let wrong = |why: &str| {
        let text = without_secrets(text);
        Err(refused(flag, format!("{text:?} {why}: write http://host:port or https://host:port")))
    };
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let Ok(url) = whole.parse::<Uri>() else { return wrong("is not a URL") };
    let scheme = url.scheme_str();
    if scheme != Some("http") && scheme != Some("https") {
        return wrong("is not an http or https URL");
    }
    let Some(authority) = url.authority().filter(|authority| !authority.host().is_empty()) else {
        return wrong("names no host");
    };
    // The part after the host is a port or nothing: hyper keeps a colon with a bad number.
    let after_host = &authority.as_str()[authority.host().len()..];
    if !after_host.is_empty() && authority.port_u16().is_none_or(|port| port == 0) {
        return wrong("has a bad port");
    }
    let has_path = url.path() != "/" && !may_have_path;
    if has_path || url.query().is_some() {
        return wrong("has a path or a query");
    }
    Ok(whole)
}

/// `url` without user and query, in which there may be a password or a token.
pub fn without_secrets(url: &str) -> String {
    let (rest, query) = match url.split_once('?') {
        Some((rest, _)) => (rest, "?***"),
        None => (url, ""),
    };
    let (scheme, rest) = rest.split_once("://").map_or(("", rest), |(scheme, rest)| (scheme, rest));
    let colon = if scheme.is_empty() { "" } else { "://" };
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}{colon}{host}{query}")
}

/// In Go an empty text is the same as a flag left out.
pub(super) fn optional(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Reads `text` as a value that is `described` so.
pub(super) fn parsed<T: FromStr>(flag: &'static str, text: &str, described: &str) -> Result<T> {
    text.parse().map_err(|_said_so| refused(flag, format!("{text:?} is not {described}")))
}

/// The `problem` says which value, what is wrong, and what would be right.
pub(super) fn refused(flag: &str, problem: impl Display) -> OptionError {
    OptionError(format!("{flag}: {problem}"))
}
/// Whether a datagram to `address` can reach one other host.
pub fn is_host_address(address: IpAddr) -> bool {
    let is_none = match address {
        IpAddr::V4(address) => address.octets()[0] == 0 || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unspecified() || address.to_ipv4_mapped().is_some(),
    };
    !(is_none || address.is_loopback() || address.is_multicast())
}

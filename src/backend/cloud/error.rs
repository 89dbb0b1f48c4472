//! Why a cloud did not do what it was asked, in one line: what its error codes mean, and what an
//! operator has to do. Pure.

use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;

/// Longest part of a provider's own words that is shown.
const SHOWN_CHARACTERS_MAX: usize = 200;
/// The same of a text that is somebody else's, by which that one is recognised.
const BEGINNING_CHARACTERS_MAX: usize = 60;
/// More than this between two clocks is told: AWS refuses requests that are five minutes off.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(5 * 60);

/// What an error code comes down to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Too many requests, of this node or of all of the account, or the service is overloaded.
    Throttled,
    /// The credentials are valid, but do not allow this.
    Denied,
    /// The credentials are not valid.
    Credentials,
    /// The request's time is not the provider's.
    Clock,
    /// There is no room for another route.
    Quota,
    /// Something else, which the provider's words explain.
    Other,
}

/// A request that came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloudError {
    /// Nobody answered, or not completely.
    #[error("{operation}: {host} does not answer: {why}")]
    NoAnswer {
        /// What was asked for.
        operation: String,
        /// Of whom.
        host: String,
        /// What happened instead.
        why: String,
    },
    /// The provider refused.
    #[error("{operation} was refused ({code}){}{clocks}", shown(*cause, permission, message))]
    Refused {
        /// What was asked for.
        operation: String,
        /// The provider's code.
        code: String,
        /// What that comes down to.
        cause: Cause,
        /// What allows the operation.
        permission: String,
        /// The provider's own words.
        message: String,
        /// That this host's clock and the provider's are far apart, if they are.
        clocks: Box<str>,
    },
    /// What is there can't be used, and why.
    #[error("{0}")]
    Unusable(String),
}

impl CloudError {
    /// The provider's answer to `operation`, which `permission` allows.
    pub fn refused(
        (operation, permission): (&str, &str),
        status: u16,
        code: &str,
        message: &str,
    ) -> Self {
        let [code, message] = [code, message].map(visible);
        Self::Refused {
            operation: operation.to_owned(),
            cause: cause(status, &code, &message),
            code: if code.is_empty() { format!("HTTP {status}") } else { code },
            permission: permission.to_owned(),
            message,
            clocks: Box::default(),
        }
    }

    /// The same with what the answer's `Date` shows. Some providers take a wrong clock for wrong
    /// credentials.
    pub fn by_date(mut self, date: Option<&str>, now: Timestamp) -> Self {
        if let Self::Refused { cause, clocks, .. } = &mut self
            && let Some(found) = clocks_apart(date, now)
        {
            *clocks = found.into();
            if *cause == Cause::Credentials {
                *cause = Cause::Clock;
            }
        }
        self
    }

    /// Something answered `operation` with this status and a `text` that `whom` does not write.
    pub fn of_stranger(operation: &str, whom: &str, status: u16, text: &str) -> Self {
        Self::Unusable(format!(
            "{operation}: what answers (HTTP {status}) is not {whom}: {}. Is there a proxy, or a \
             page to log in at, on the way?",
            beginning(text)
        ))
    }

    /// The metadata service's answer to `operation`, which is none of those that it has.
    pub fn of_metadata(operation: &str, status: u16) -> Self {
        Self::Refused {
            operation: operation.to_owned(),
            code: format!("HTTP {status}"),
            cause: if is_throttling(status) { Cause::Throttled } else { Cause::Other },
            permission: String::new(),
            message: "the service is in trouble, or does not let weftd ask".to_owned(),
            clocks: Box::default(),
        }
    }

    /// Whether another request would fare no better at present.
    pub fn asks_for_a_pause(&self) -> bool {
        match self {
            Self::NoAnswer { .. } => true,
            Self::Refused { cause, .. } => *cause == Cause::Throttled,
            Self::Unusable(_) => false,
        }
    }

    /// The provider's code, if it refused.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } => Some(code),
            Self::NoAnswer { .. } | Self::Unusable(_) => None,
        }
    }
}

/// How a text begins that nobody understands. Of one without marks of HTML or XML nothing is shown:
/// it may be credentials that are cut short.
fn beginning(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() {
        return "it is empty".to_owned();
    }
    if !text.starts_with('<') {
        return format!("its {} bytes can't be read", text.len());
    }
    let shown = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown = shown.chars().filter(|it| !it.is_control());
    format!("it begins with {:?}", shown.take(BEGINNING_CHARACTERS_MAX).collect::<String>())
}

/// That these are far apart.
fn clocks_apart(date: Option<&str>, now: Timestamp) -> Option<String> {
    // What HTTP writes as GMT, mail may.
    let theirs = DateTimeParser::new().parse_timestamp(date?).ok()?;
    let apart = theirs.duration_since(now).unsigned_abs();
    (apart > CLOCKS_APART_MAX).then(|| {
        format!(
            ". By this host's clock it is {now:.0}, by that of the answer {theirs:.0}: set this \
             host's (chronyc, timedatectl)"
        )
    })
}

/// The first line, as far as it is shown, without what a terminal would obey.
pub(super) fn visible(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.chars().filter(|it| !it.is_control()).take(SHOWN_CHARACTERS_MAX).collect()
}

pub(super) fn is_throttling(status: u16) -> bool {
    [429, 503].contains(&status)
}

/// What codes of any of the providers come down to.
fn cause(status: u16, code: &str, message: &str) -> Cause {
    let has = |words: &[&str]| words.iter().any(|word| code.contains(word));
    let is_late = message.contains("Signature expired") || message.contains("Signature not yet");
    let clock =
        ["RequestExpired", "Skewed", "SignatureExpire", "IllegalTimestamp", "InvalidTimeStamp"];
    // Tencent's; its RequestLimitExceeded is another.
    let is_limit = code == "LimitExceeded" || code.starts_with("LimitExceeded.");
    if is_late || has(&clock) {
        Cause::Clock
    } else if is_limit || has(&["RouteLimitExceeded", "Quota", "quotaExceeded", "QUOTA_EXCEEDED"]) {
        Cause::Quota
    } else if has(&["RequestLimit", "Throttl", "rateLimitExceeded", "RateLimitExceeded"])
        || is_throttling(status)
    {
        Cause::Throttled
    } else if code == "SignatureNonceUsed" {
        // The next request has another nonce.
        Cause::Other
    } else if has(&["UnauthorizedOperation", "AccessDenied", "Forbidden", "NoPermission"]) {
        Cause::Denied
    } else if has(&["AuthFailure", "InvalidClientTokenId", "Signature", "ExpiredToken"])
        || has(&["InvalidAccessKeyId", "InvalidSecurityToken", "UnrecognizedClient"])
        || has(&["invalid_grant", "InvalidIdentityToken"])
        || status == 401
    {
        Cause::Credentials
    } else if status == 403 {
        Cause::Denied
    } else {
        Cause::Other
    }
}

/// What to do, and what the provider says. Of credentials it may repeat a part, so nothing is said.
fn shown(cause: Cause, permission: &str, message: &str) -> String {
    match cause {
        Cause::Throttled => ": too many requests at present; weftd asks again later".to_owned(),
        Cause::Denied if message.is_empty() => {
            format!(": the credentials lack the permission {permission}")
        }
        Cause::Denied => {
            format!(": the credentials lack the permission {permission}. The cloud says: {message}")
        }
        Cause::Credentials => {
            ": the credentials are not valid: check key, token or role".to_owned()
        }
        Cause::Clock => ": the clock of this host is wrong, or the credentials are old; set the \
                         clock (chronyc, timedatectl)"
            .to_owned(),
        Cause::Quota => format!(
            ": the route table takes no more routes: raise the quota, lease larger subnets to \
             fewer nodes, or choose another backend. The cloud says: {message}"
        ),
        Cause::Other if message.is_empty() => ", without a text that says why".to_owned(),
        Cause::Other => format!(": {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_down_to_what_an_operator_can_do() {
        for (status, code, expected) in [
            (503, "RequestLimitExceeded", Cause::Throttled),
            (400, "Throttling.User", Cause::Throttled),
            (429, "", Cause::Throttled),
            (403, "userRateLimitExceeded", Cause::Throttled),
            (200, "RequestLimitExceeded", Cause::Throttled),
            (400, "SignatureNonceUsed", Cause::Other),
            (200, "LimitExceeded", Cause::Quota),
            (200, "QUOTA_EXCEEDED", Cause::Quota),
            (503, "", Cause::Throttled),
            (403, "UnauthorizedOperation", Cause::Denied),
            (403, "Forbidden.RAM", Cause::Denied),
            (200, "AuthFailure.UnauthorizedOperation", Cause::Denied),
            (403, "", Cause::Denied),
            (401, "AuthFailure", Cause::Credentials),
            (404, "InvalidAccessKeyId.NotFound", Cause::Credentials),
            (200, "AuthFailure.SecretIdNotFound", Cause::Credentials),
            (400, "SignatureDoesNotMatch", Cause::Credentials),
            (400, "RequestExpired", Cause::Clock),
            (200, "AuthFailure.SignatureExpire", Cause::Clock),
            (400, "InvalidTimeStamp.Expired", Cause::Clock),
            (400, "RouteLimitExceeded", Cause::Quota),
            (400, "QuotaExceeded.RouteEntry", Cause::Quota),
            (403, "quotaExceeded", Cause::Quota),
            (400, "InvalidRouteTableID.NotFound", Cause::Other),
        ] {
            assert_eq!(cause(status, code, ""), expected, "{status} {code}");
        }
        let late = "Signature expired: 20150830T123600Z is now earlier than 20150830T124300Z";
        assert_eq!(cause(403, "SignatureDoesNotMatch", late), Cause::Clock);
    }

    #[test]
    fn a_refusal_is_one_line_with_the_permission_and_without_secrets() {
        let of = ("CreateRoute", "ec2:CreateRoute");
        let words = "Encoded\nYou";
        let denied = CloudError::refused(of, 403, "UnauthorizedOperation", words);
        let text = denied.to_string();
        assert!(text.ends_with(words.lines().next().unwrap()), "a deny is not told: {text}");
        assert!(text.contains("ec2:CreateRoute") && !text.contains('\n'), "{text}");
        let echoed = "The Canonical String should have been x-amz-security-token:s3cret";
        let text = CloudError::refused(of, 403, "SignatureDoesNotMatch", echoed).to_string();
        assert!(text.contains("SignatureDoesNotMatch") && !text.contains("s3cret"), "{text}");
        let hostile = CloudError::refused(of, 400, "\u{1b}[2J", "\u{1b}[31m").to_string();
        assert!(!hostile.contains('\u{1b}'), "a terminal would obey: {hostile:?}");
    }

    #[test]
    fn clocks_that_are_far_apart_are_told_and_explain_wrong_credentials() {
        let now: Timestamp = "2026-11-29T20:00:00Z".parse().unwrap();
        let of = |code: &str, date| {
            let error = CloudError::refused(("CreateRoute", "ec2:CreateRoute"), 401, code, "m");
            error.by_date(date, now).to_string()
        };
        let late = of("AuthFailure", Some("Sun, 29 Nov 2026 20:10:00 GMT"));
        for part in ["2026-11-29T20:00:00Z", "2026-11-29T20:10:00Z", "chronyc"] {
            assert!(late.contains(part), "the clock is not told: {late}");
        }
        let early = of("UnauthorizedOperation", Some("Sun, 29 Nov 2026 19:54:59 GMT"));
        assert!(early.contains("ec2:CreateRoute") && early.contains("19:54:59"), "{early}");
        for date in [Some("Sun, 29 Nov 2026 20:05:00 GMT"), Some("yesterday"), None] {
            let text = of("AuthFailure", date);
            assert!(text.contains("check key") && !text.contains("clock"), "{date:?}: {text}");
        }
    }

    #[test]
    fn what_is_not_the_api_is_told_by_its_beginning_and_shows_no_secret() {
        let of = |text| CloudError::of_stranger("CreateRoute", "EC2", 200, text).to_string();
        let page = of("\n<html>\n<body>Please \u{1b}[2Jlog in</body></html>");
        assert!(page.contains("not EC2") && page.contains("<html> <body>Please"), "{page}");
        assert!(!page.contains('\u{1b}'), "a terminal would obey: {page:?}");
        assert!(of("").contains("empty"));
        assert!(!of(r#"{"SecretAccessKey":"s3cret"#).contains("s3cret"));
        let silent = CloudError::refused(("CreateRoute", ""), 500, "", "").to_string();
        assert!(!silent.ends_with(": "), "it breaks off: {silent:?}");
    }
}

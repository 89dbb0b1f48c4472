//! Why a cloud did not do what it was asked, in one line: what its error codes mean, and what an
//! operator has to do. Pure.

/// Longest part of a provider's own words that is shown.
const SHOWN_CHARACTERS_MAX: usize = 200;

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
    #[error("{operation} was refused ({code}){}", shown(*cause, permission, message))]
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
        }
    }

    /// The metadata service's answer to `operation`, which is none of those that it has.
    pub fn of_metadata(operation: &str, status: u16) -> Self {
        Self::Refused {
            operation: operation.to_owned(),
            code: format!("HTTP {status}"),
            cause: if is_throttling(status) { Cause::Throttled } else { Cause::Other },
            permission: String::new(),
            message: "the service is in trouble, or does not let weftd ask".to_owned(),
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

/// The first line, as far as it is shown, without what a terminal would obey.
fn visible(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.chars().filter(|it| !it.is_control()).take(SHOWN_CHARACTERS_MAX).collect()
}

fn is_throttling(status: u16) -> bool {
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
}

//! How flannel reads the configuration's JSON: keys match in any case, and `null` is a value that
//! is not given, but for addresses. Knows the keys, not their meaning, and what is said of values
//! that can't be used.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NetworkConfigError {
    /// The configuration names a backend without its type.
    #[error("unknown backend type \"\": give Backend a Type such as \"udp\", or leave Backend out")]
    NoBackendType,
    /// The configuration leaves nodes no family of addresses.
    #[error(
        "none defined stack: EnableIPv4 is false and EnableIPv6 is not true; set one of them to \
         true in the network configuration"
    )]
    NoFamily,
    /// No JSON, or not an object.
    #[error("the network configuration is not a JSON object")]
    Syntax(#[source] serde_json::Error),
    /// Which key, what is wrong with its value, what would be right; in flannel's words where
    /// flannel has some.
    #[error("{0}")]
    Invalid(String),
}

/// Refuses keys that differ only in case: which of them is meant depends on the reader.
pub(super) fn check_keys(object: &Value) -> Result<(), NetworkConfigError> {
    let mut seen = BTreeSet::new();
    let mut keys = object.as_object().into_iter().flat_map(Map::keys);
    match keys.find(|key| !seen.insert(key.to_ascii_lowercase())) {
        None => Ok(()),
        Some(twice) => Err(NetworkConfigError::Invalid(format!(
            "{twice} is given twice in the network configuration, in different case: keep one"
        ))),
    }
}

/// The member of `object` called `name` in any case.
pub(crate) fn member<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    let members = object.as_object()?;
    members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

/// The value of `member`, which is called `shown`.
pub(super) fn boolean(
    shown: &str,
    member: Option<&Value>,
    default: bool,
) -> Result<bool, NetworkConfigError> {
    match member {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| wrong(shown, "true or false", value)),
    }
}

/// A key of a backend that is a text. What is there instead is not repeated if it may be a secret.
pub(super) fn text<'a>(
    settings: &'a Value,
    name: &str,
    expected: &str,
    is_secret: bool,
) -> Result<Option<&'a str>, NetworkConfigError> {
    match member(settings, name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) if is_secret => Err(NetworkConfigError::Invalid(format!(
            "Backend.{name} in the network configuration must be {expected}"
        ))),
        Some(other) => Err(wrong(&format!("Backend.{name}"), expected, other)),
    }
}

/// The same where the value may have a secret in it: of which type of JSON it is.
pub(super) fn wrong_type(key: &str, expected: &str, value: &Value) -> NetworkConfigError {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    NetworkConfigError::Invalid(format!(
        "{key} in the network configuration must be {expected}, it is {found}"
    ))
}

pub(super) fn wrong(key: &str, expected: &str, value: &Value) -> NetworkConfigError {
    /// Enough to recognise the value in a log line.
    const SHOWN_CHARACTERS_MAX: usize = 60;
    let mut found: String = value.to_string().chars().take(SHOWN_CHARACTERS_MAX + 1).collect();
    if found.chars().count() > SHOWN_CHARACTERS_MAX {
        found.pop();
        found.push('…');
    }
    NetworkConfigError::Invalid(format!(
        "{key} in the network configuration must be {expected}, it is {found}"
    ))
}

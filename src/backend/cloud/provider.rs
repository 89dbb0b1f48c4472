//! What the APIs of clouds have in common: what a look at the route tables gives, how JSON is read.

use serde_json::Value;

use super::error::CloudError;
use super::plan::Table;

/// What a request gives.
pub(super) type Result<T = ()> = std::result::Result<T, CloudError>;

/// What a look at the tables found.
pub(super) struct Found {
    pub(super) tables: Vec<Table>,
    /// What the own route leads to.
    pub(super) target: String,
    /// What else went wrong, without which the routes can be right.
    pub(super) trouble: Option<CloudError>,
}

/// The answer to `operation`, whose list at `pointer` must be there: half an answer is no empty
/// table.
pub(super) fn list(operation: &str, answer: &str, pointer: &str) -> Result<Vec<Value>> {
    let answer: Option<Value> = serde_json::from_str(answer).ok();
    let found = answer.as_ref().and_then(|answer| answer.pointer(pointer)?.as_array().cloned());
    found.ok_or_else(|| CloudError::Unusable(format!("{operation}: the answer has no {pointer}")))
}

/// A text of JSON; empty if there is none.
pub(super) fn text(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// A text that is there and not empty.
pub(super) fn filled(text: Option<String>) -> Option<String> {
    text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

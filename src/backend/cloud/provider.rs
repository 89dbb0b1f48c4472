//! What the APIs of clouds have in common: what a look at the route tables gives, how JSON is read.

use serde_json::Value;

use super::error::CloudError;
use super::plan::Table;

/// Pages of one list: more are a server that goes round in a circle.
pub(super) const PAGES_MAX: usize = 20;

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

/// That a list has more pages than any can have.
pub(super) fn endless(operation: &str) -> CloudError {
    CloudError::Unusable(format!("{operation}: after {PAGES_MAX} pages the answer has more"))
}

/// A part of the name of the host that requests go to: of letters, digits and `others`, so that the
/// metadata service names a host of the provider's.
pub(super) fn part_of_host(of: &str, told: String, others: &[char]) -> Result<String> {
    if told.chars().all(|it| it.is_ascii_alphanumeric() || others.contains(&it)) {
        return Ok(told);
    }
    Err(CloudError::Unusable(format!("the metadata service tells a {of} that can't be one")))
}

/// A text of JSON; empty if there is none.
pub(super) fn text(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// A text that is there and not empty.
pub(super) fn filled(text: Option<String>) -> Option<String> {
    text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_names_no_other_host() {
        let of = |told: &str| part_of_host("region", told.to_owned(), &['-']);
        assert_eq!(of("eu-west-1"), Ok("eu-west-1".to_owned()));
        for hostile in ["x.example.org/", "a@b", "a:1", "a#", "a b", "a?b", "a.b"] {
            assert!(of(hostile).is_err(), "requests go where {hostile} says");
        }
    }
}

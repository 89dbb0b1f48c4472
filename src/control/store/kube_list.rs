//! Takes a Kubernetes list apart while it arrives: item by item, so that memory holds one Node and
//! not the whole cluster. Pure: chunks of bytes in, items out.

use serde::Deserialize;

/// Largest single object. etcd takes requests of 1.5 MiB, which JSON spells longer.
pub(super) const ITEM_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Largest rest of a list beside its items: a version and a token.
const REST_BYTES_MAX: usize = 64 * 1024;
/// Longest key of the list that is told from others.
const KEY_BYTES_MAX: usize = 16;

/// Reads one page.
#[derive(Debug, Default)]
pub(super) struct ListReader {
    /// Brackets open.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Whether the bracket at depth 2 is that of `items`.
    in_items: bool,
    /// Whether the bracket at depth 3 is an item's.
    in_item: bool,
    /// The last string directly in the list.
    key: Vec<u8>,
    item: Vec<u8>,
    rest: Vec<u8>,
}

/// What a page says beside its items.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMetadata {
    pub(super) resource_version: String,
    /// Asks for the next page; empty after the last.
    #[serde(rename = "continue", default)]
    pub(super) next: String,
}

#[derive(Deserialize)]
struct Rest {
    metadata: ListMetadata,
}

/// Why bytes are no list.
#[derive(Debug, thiserror::Error)]
pub(super) enum ListError {
    #[error("an object of the list has more than {ITEM_BYTES_MAX} bytes")]
    ItemTooLarge,
    #[error("the list has more than {REST_BYTES_MAX} bytes beside its items")]
    RestTooLarge,
    #[error("the list is no JSON of a list")]
    Malformed(#[from] serde_json::Error),
}

impl ListReader {
    /// Takes the next bytes, and gives each item that they complete.
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        mut give: impl FnMut(&[u8]),
    ) -> Result<(), ListError> {
        // Where the bytes begin that nobody has copied yet.
        let (mut at, mut copied) = (0, 0);
        while let Some(&byte) = bytes.get(at) {
            if self.in_string {
                at += self.string(&bytes[at..]);
                continue;
            }
            at += 1;
            match byte {
                b'"' => {
                    self.in_string = true;
                    self.key.clear();
                }
                b'{' | b'[' => {
                    self.depth += 1;
                    if self.depth == 2 && byte == b'[' && self.key == b"items" {
                        self.keep(&bytes[copied..at])?;
                        (self.in_items, copied) = (true, at);
                    } else if self.depth == 3 && self.in_items {
                        // What stands between two items is of no use.
                        (self.in_item, copied) = (true, at - 1);
                    }
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 2 && self.in_item {
                        self.keep(&bytes[copied..at])?;
                        give(&self.item);
                        self.item.clear();
                        (self.in_item, copied) = (false, at);
                    } else if self.depth == 1 && self.in_items {
                        (self.in_items, copied) = (false, at - 1);
                    }
                }
                _ => {}
            }
        }
        self.keep(&bytes[copied..])
    }

    /// What the page says of itself, after its last byte.
    pub(super) fn finish(self) -> Result<ListMetadata, ListError> {
        Ok(serde_json::from_slice::<Rest>(&self.rest)?.metadata)
    }

    /// Skips to the end of a string, or of `bytes`.
    fn string(&mut self, bytes: &[u8]) -> usize {
        if std::mem::take(&mut self.escaped) {
            return 1;
        }
        let end = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
        if self.depth == 1 {
            let text = &bytes[..end.unwrap_or(bytes.len())];
            let room = (KEY_BYTES_MAX + 1).saturating_sub(self.key.len());
            self.key.extend_from_slice(&text[..text.len().min(room)]);
        }
        match end {
            Some(end) if bytes[end] == b'"' => {
                self.in_string = false;
                end + 1
            }
            Some(end) => {
                self.escaped = true;
                end + 1
            }
            None => bytes.len(),
        }
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), ListError> {
        if self.in_item {
            if self.item.len() + bytes.len() > ITEM_BYTES_MAX {
                return Err(ListError::ItemTooLarge);
            }
            self.item.extend_from_slice(bytes);
        } else if !self.in_items {
            if self.rest.len() + bytes.len() > REST_BYTES_MAX {
                return Err(ListError::RestTooLarge);
            }
            self.rest.extend_from_slice(bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str, chunk: usize) -> (Vec<Value>, Result<ListMetadata, ListError>) {
        let (mut reader, mut items) = (ListReader::default(), Vec::new());
        for bytes in text.as_bytes().chunks(chunk) {
            let give = |item: &[u8]| items.push(serde_json::from_slice(item).unwrap());
            if let Err(error) = reader.feed(bytes, give) {
                return (items, Err(error));
            }
        }
        (items, reader.finish())
    }

    #[test]
    fn a_list_comes_apart_wherever_its_bytes_are_cut() {
        let items = json!([
            {"metadata": {"name": "a", "annotations": {"x": "]}\"{[\\"}}, "items": [{"y": []}]},
            {},
            {"items": "items"},
        ]);
        let list = json!({
            "kind": "items", "apiVersion": "v1", "items": items,
            "metadata": {"resourceVersion": "7", "continue": "items\"[{"},
        });
        for text in [list.to_string(), serde_json::to_string_pretty(&list).unwrap()] {
            for chunk in [1, 2, 3, 7, 64, 4096] {
                let (found, metadata) = read(&text, chunk);
                assert_eq!(Value::from(found), items, "in pieces of {chunk}");
                let metadata = metadata.unwrap();
                assert_eq!(metadata.resource_version, "7");
                assert_eq!(metadata.next, "items\"[{");
            }
        }
    }

    #[test]
    fn an_empty_list_is_one_and_half_a_list_is_none() {
        for items in ["[]", "null", "[ ]"] {
            let text = format!(r#"{{"items":{items},"metadata":{{"resourceVersion":"3"}}}}"#);
            let (found, metadata) = read(&text, 5);
            assert!(found.is_empty() && metadata.is_ok(), "{text}");
        }
        let whole = r#"{"metadata":{"resourceVersion":"3"},"items":[{"a":1},{"a":2}]}"#;
        for end in 0..whole.len() {
            let (_, metadata) = read(&whole[..end], 8);
            assert!(metadata.is_err(), "{:?} was taken for a whole list", &whole[..end]);
        }
    }

    #[test]
    fn what_never_ends_is_given_up() {
        let endless = "x".repeat(ITEM_BYTES_MAX);
        let (_, result) = read(&format!(r#"{{"items":[{{"a":"{endless}"#), 1 << 16);
        assert!(matches!(result, Err(ListError::ItemTooLarge)), "{result:?}");
        let (_, result) = read(&format!(r#"{{"a":"{endless}"#), 1 << 16);
        assert!(matches!(result, Err(ListError::RestTooLarge)), "{result:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = ListReader::default();
            reader.feed(&bytes, |_| {}).ok();
            reader.finish().ok();
        }

        #[test]
        fn json_like_bytes_do_not_either(
            text in r#"(\{|\}|\[|\]|"items":|"|\\|,|a){0,60}"#,
            chunk in 1_usize..9,
        ) {
            let mut reader = ListReader::default();
            for bytes in text.as_bytes().chunks(chunk) {
                reader.feed(bytes, |_| {}).ok();
            }
            reader.finish().ok();
        }
    }
}

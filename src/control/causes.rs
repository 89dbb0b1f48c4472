//! Errors as text for people: one with all its causes. Pure; it never decides what an error means.

use std::error::Error;

/// `error` and its causes, outermost first.
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    described(error.to_string(), error.source())
}

/// `text`, then the causes that it does not contain already.
pub(crate) fn described(mut text: String, cause: Option<&(dyn Error + 'static)>) -> String {
    let mut next = cause;
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::acquire::AcquireError;
    use crate::control::store::StoreError;

    #[test]
    fn every_level_is_named_once() {
        let source = std::io::Error::new(std::io::ErrorKind::PermissionDenied, "no right to");
        let path = "/var/lib/weft/.lock".to_owned();
        let error = AcquireError::from(StoreError::File { action: "open", path, source });
        let text = with_causes(&error);
        let levels =
            "cannot acquire a lease: local store: cannot open /var/lib/weft/.lock: no right to";
        assert_eq!(text, levels);
        assert_eq!(
            described("it has no right to".to_owned(), error.source()),
            format!("it has no right to: local store: cannot open /var/lib/weft/.lock")
        );
    }
}

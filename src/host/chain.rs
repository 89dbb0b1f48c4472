//! An error with its causes, in one line for the operator. Formats; decides nothing.

use std::error::Error;

/// `error`, then each cause, separated by colons.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::host::netlink::NetlinkError;

    #[test]
    fn every_cause_is_named_once() {
        let source = io::Error::other("no more");
        let error = NetlinkError::Open { purpose: "requests", source };
        assert_eq!(chain(&error), "cannot open a netlink socket for requests: no more");
    }
}

//! The backends of clouds: three weftds, each with a metadata service, and an API that fails in the
//! ways that real ones do.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

mod aws;
mod others;

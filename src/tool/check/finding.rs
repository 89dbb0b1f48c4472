//! A question about the host, and what is found.

use serde::Serialize;

use super::facts::Facts;

/// How it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    Warning,
    Failed,
    Skipped,
}

impl Verdict {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// What a check says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    /// What was seen, or why nothing was looked at.
    pub(super) evidence: String,
    /// What to do, where something is wrong.
    pub(super) cure: Option<String>,
}

impl Finding {
    pub(super) fn ok(evidence: impl Into<String>) -> Self {
        Self { verdict: Verdict::Ok, evidence: evidence.into(), cure: None }
    }

    pub(super) fn skipped(why: impl Into<String>) -> Self {
        Self { verdict: Verdict::Skipped, evidence: why.into(), cure: None }
    }

    pub(super) fn warning(evidence: impl Into<String>, cure: impl Into<String>) -> Self {
        let (evidence, cure) = (evidence.into(), Some(cure.into()));
        Self { verdict: Verdict::Warning, evidence, cure }
    }

    pub(super) fn failed(evidence: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { verdict: Verdict::Failed, ..Self::warning(evidence, cure) }
    }
}

/// A question about the host.
pub(super) struct Check {
    /// For scripts; it never changes.
    pub(super) id: &'static str,
    /// What is well if it is well.
    pub(super) about: &'static str,
    pub(super) judge: fn(&Facts) -> Finding,
}

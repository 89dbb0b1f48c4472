//! What is found of one thing that is looked at.

use serde::Serialize;

/// How it looks, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Judgement {
    Ok,
    Skipped,
    Warning,
    Failed,
}

/// What a check says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) verdict: Judgement,
    /// What was seen, or why nothing was looked at.
    pub(super) evidence: String,
    /// What to do, where something is wrong.
    pub(super) cure: Option<String>,
}

/// The evidence that all is well, or what was found instead.
pub(super) type Checked = Result<String, Finding>;

impl From<Checked> for Finding {
    fn from(checked: Checked) -> Self {
        let well = |evidence| Self { verdict: Judgement::Ok, evidence, cure: None };
        checked.map_or_else(|finding| finding, well)
    }
}

/// A plain text says why nothing was looked at.
impl From<&str> for Finding {
    fn from(why: &str) -> Self {
        Self { verdict: Judgement::Skipped, evidence: why.to_owned(), cure: None }
    }
}

pub(super) fn well(evidence: impl Into<String>) -> Checked {
    Ok(evidence.into())
}

pub(super) fn skipped(why: impl AsRef<str>) -> Checked {
    Err(why.as_ref().into())
}

pub(super) fn warning(evidence: impl Into<String>, cure: impl Into<String>) -> Checked {
    let (evidence, cure) = (evidence.into(), Some(cure.into()));
    Err(Finding { verdict: Judgement::Warning, evidence, cure })
}

pub(super) fn failed(evidence: impl Into<String>, cure: impl Into<String>) -> Checked {
    let found = |finding| Finding { verdict: Judgement::Failed, ..finding };
    warning(evidence, cure).map_err(found)
}

/// What is said of two things, if anything is, with the worse verdict.
pub(super) fn together(one: Option<Checked>, other: Option<Checked>) -> Option<Checked> {
    let (one, other) = match (one, other) {
        (Some(one), Some(other)) if one == other => return Some(one),
        (Some(one), Some(other)) => (Finding::from(one), Finding::from(other)),
        (one, other) => return one.or(other),
    };
    let (worse, other) = if other.verdict > one.verdict { (other, one) } else { (one, other) };
    let evidence = format!("{}; {}", worse.evidence, other.evidence);
    let cures: Vec<_> = worse.cure.into_iter().chain(other.cure).collect();
    let cure = (!cures.is_empty()).then(|| cures.join(" "));
    let found = Finding { verdict: worse.verdict, evidence, cure };
    Some(if found.verdict == Judgement::Ok { Ok(found.evidence) } else { Err(found) })
}

/// How a device is made to forward. The switch of all devices sets each one's only when it changes
/// itself, and a device's name may have a dot.
pub(super) fn forwarding_cure(device: &str) -> String {
    format!("sysctl -w net/ipv4/ip_forward=1 net/ipv4/conf/{device}/forwarding=1")
}

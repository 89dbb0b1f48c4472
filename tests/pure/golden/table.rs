//! The cases of `cases.txt`.

const CASES: &str = include_str!("cases.txt");

/// One input, and what becomes of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Case {
    /// Its line in the file.
    pub(crate) line: usize,
    pub(crate) section: String,
    /// Who finds out weftd's outcome.
    pub(crate) kind: String,
    pub(crate) given: String,
    pub(crate) flanneld: String,
    /// Where that is something else.
    pub(crate) weftd: Option<String>,
    /// The row of differences.txt that explains this difference, or its beginning.
    pub(crate) why: Option<String>,
    /// File and name of the test that shows it.
    pub(crate) shown: Option<String>,
}

impl Case {
    /// weftd's outcome as the file has it.
    pub(crate) fn expected(&self) -> &str {
        self.weftd.as_deref().unwrap_or(&self.flanneld)
    }

    /// What is wrong if weftd's outcome is `actual`.
    pub(crate) fn objection(&self, actual: &str) -> Option<String> {
        let Self { line, given, flanneld, why, .. } = self;
        let differs = !is(flanneld, actual);
        if !is(self.expected(), actual) || (differs && why.is_none()) {
            let expected = self.expected();
            return Some(format!(
                "cases.txt:{line}: {given}\n  expected {expected}\n  weftd    {actual}\n  \
                 If that is on purpose, README.md and the case have to say so."
            ));
        }
        let gone = why.is_some() && !differs;
        gone.then(|| format!("cases.txt:{line}: {given}: no difference any more, so no `why`"))
    }
}

/// Whether an outcome is the one written, which may be its beginning.
fn is(written: &str, actual: &str) -> bool {
    match written.strip_suffix("...") {
        Some(beginning) => actual.starts_with(beginning),
        None => actual == written,
    }
}

/// All of them.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let (mut section, mut kind) = (String::new(), String::new());
    for (index, text) in CASES.lines().enumerate() {
        let line = index + 1;
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if let Some(heading) = text.strip_prefix("== ") {
            let (name, held_as) = heading.rsplit_once(": ").expect("a section has its kind");
            (section, kind) = (name.to_owned(), held_as.to_owned());
            continue;
        }
        let (key, value) = text.split_once(": ").unwrap_or_else(|| panic!("cases.txt:{line}"));
        if key == "given" {
            let (section, kind) = (section.clone(), kind.clone());
            cases.push(Case { line, section, kind, given: value.to_owned(), ..Case::default() });
            continue;
        }
        let case = cases.last_mut().unwrap_or_else(|| panic!("cases.txt:{line}: no `given`"));
        match key {
            "flanneld" => value.clone_into(&mut case.flanneld),
            "weftd" => case.weftd = Some(value.to_owned()),
            "why" => case.why = Some(value.to_owned()),
            "shown" => case.shown = Some(value.to_owned()),
            _ => panic!("cases.txt:{line}: no such key: {key}"),
        }
    }
    for Case { line, flanneld, weftd, why, .. } in &cases {
        assert!(!flanneld.is_empty(), "cases.txt:{line}: what does flanneld make of it?");
        // What differs in wording only, within what flanneld's outcome leaves open, has no row.
        let open = flanneld.ends_with("...") && why.is_none();
        assert!(open || weftd.is_some() == why.is_some(), "cases.txt:{line}: weftd needs its why");
    }
    cases
}

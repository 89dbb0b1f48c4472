//! Every flag of `flags.txt` in every spelling.

use std::collections::{BTreeMap, BTreeSet};

use crate::golden::program::{Ended, start};
use crate::golden::{of_each, report};

const FLAGS: &str = include_str!("flags.txt");

/// The difference of a flag that flanneld does not have.
pub(crate) const OURS: &str = "ours";

/// A row of the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flag {
    pub(crate) name: &'static str,
    kind: &'static str,
    default: &'static str,
    pub(crate) value: &'static str,
    record: &'static str,
    without: &'static str,
    pub(crate) becomes: &'static str,
    with: &'static str,
    /// Empty if there is none.
    pub(crate) difference: &'static str,
}

pub(crate) fn flags() -> Vec<Flag> {
    let rows = FLAGS.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let [name, kind, default, value, record, without, becomes, with, difference] = cells[..]
        else {
            panic!("flags.txt: not nine cells: {row}")
        };
        Flag { name, kind, default, value, record, without, becomes, with, difference }
    })
    .collect()
}

impl Flag {
    fn variable(&self) -> String {
        format!("FLANNELD_{}", self.name.to_uppercase().replace('-', "_"))
    }

    /// Arguments and variables of each way to give the flag its value.
    fn spellings(&self) -> Vec<(Vec<String>, Option<String>)> {
        let Self { name, value, .. } = self;
        let mut spellings =
            vec![vec![format!("-{name}={value}")], vec![format!("--{name}={value}")]];
        match self.kind {
            "bool" if *value == "true" => {
                spellings.extend([vec![format!("-{name}")], vec![format!("--{name}")]]);
            }
            "bool" => {}
            _ => {
                for dashes in ["-", "--"] {
                    spellings.push(vec![format!("{dashes}{name}"), (*value).to_owned()]);
                }
            }
        }
        let mut all: Vec<_> = spellings.into_iter().map(|words| (words, None)).collect();
        all.push((vec![], Some(self.variable())));
        // Where the lock that ends a start is beside this file, the command line has it always.
        all.retain(|(_, variable)| variable.is_none() || self.name != "subnet-file");
        all
    }

    fn start(&self, words: &[String], variable: Option<&str>) -> Ended {
        let with = self.with.split(' ').filter(|word| !word.is_empty());
        let arguments: Vec<_> = with.chain(words.iter().map(String::as_str)).collect();
        let variables: Vec<_> = variable.iter().map(|name| (*name, self.value)).collect();
        start(&arguments, &variables)
    }

    /// What is wrong with a start that was given the value.
    fn objection(&self, ended: &Ended) -> Option<String> {
        let fine = if self.record == "exit 1" {
            ended.code == Some(1) && !ended.runs() && ended.said.contains(self.becomes)
        } else {
            ended.field(self.record).is_some_and(|found| holds(self.becomes, found))
        };
        (!fine).then(|| format!("expected {} {}, weftd: {}", self.record, self.becomes, ended.said))
    }

    /// The command line wins over the environment, even with the flag's default.
    fn precedence(&self) -> Option<String> {
        // Its default is the file of the machine's own weftd.
        if self.name == "subnet-file" {
            return None;
        }
        let default = match (self.default, self.kind) {
            (_, "list") => return None,
            ("-", "bool") => "false",
            ("-", "int") => "0",
            ("-", _) => "",
            (default, _) => default.trim_matches('"'),
        };
        let words = [format!("-{}={default}", self.name)];
        let ended = self.start(&words, Some(&self.variable()));
        let found = ended.field(self.record);
        let wins = self.without == "-" || found == Some(self.without);
        (!wins).then(|| format!("{} loses against its variable: {}", words[0], ended.said))
    }

    fn objections(&self, defaults: &BTreeMap<String, String>) -> Vec<String> {
        let mut objections = Vec::new();
        for (words, variable) in self.spellings() {
            let ended = self.start(&words, variable.as_deref());
            let spelling =
                variable.map_or_else(|| words.join(" "), |name| format!("{name}={}", self.value));
            objections.extend(self.objection(&ended).map(|text| format!("{spelling}: {text}")));
        }
        let default = defaults.get(self.name).map_or("-", String::as_str);
        if default != self.default {
            objections.push(format!("-{}: its default is {default} in the usage", self.name));
        }
        if self.without != "-" {
            let ended = self.start(&[], None);
            let found = ended.field(self.record).unwrap_or("not shown");
            if found != self.without {
                objections.push(format!("without -{}: {}: {found}", self.name, self.record));
            }
        }
        objections.extend(self.precedence());
        // Its type, by what it refuses.
        if matches!(self.kind, "bool" | "int") {
            let ended = self.start(&[format!("-{}=x", self.name)], None);
            if ended.code != Some(2) {
                objections.push(format!("-{}=x is taken: no {}", self.name, self.kind));
            }
        }
        objections
    }
}

fn holds(expected: &str, found: &str) -> bool {
    match expected.strip_suffix("...") {
        Some(beginning) => found.starts_with(beginning),
        None => found == expected,
    }
}

/// Each flag of the usage text, with its default as printed.
fn usage() -> (BTreeSet<String>, BTreeMap<String, String>) {
    let said = start(&["-h"], &[]).said;
    let (mut names, mut defaults) = (BTreeSet::new(), BTreeMap::new());
    let mut name = String::new();
    for line in said.lines().skip(1) {
        if let Some(flag) = line.strip_prefix("  -") {
            flag.split([' ', '\t']).next().unwrap_or_default().clone_into(&mut name);
            names.insert(name.clone());
        }
        if let Some((_, default)) = line.rsplit_once("(default ") {
            defaults.insert(name.clone(), default.trim_end_matches(')').to_owned());
        }
    }
    (names, defaults)
}

#[test]
fn every_flag_spelling_type_and_default() {
    let (mut names, defaults) = usage();
    // Asked before any other flag is read.
    names.remove("version");
    let flags = flags();
    let listed: BTreeSet<_> = flags.iter().map(|flag| flag.name.to_owned()).collect();
    assert_eq!(listed, names, "flags.txt has not the flags of the usage text");
    report(of_each(&flags, |flag| flag.objections(&defaults)));
}

//! How many tests fail because somebody reworded a sentence that weft prints or logs, although
//! its behaviour is the same. Tests look at what happened instead: an exit code, a typed field of
//! the status, a counter, the kernel's state, the value that a message names, its level.
//!
//! Counted are functions of tests, helpers included, that compare something with a literal of
//! three or more English words, or hand one to a helper in [`COMPARERS`] that does; directly, or by
//! a binding of the same function or a constant of the same file. Not seen are: sentences in files
//! of the tests, in fields of structures (the table of faults in `tests/system/faults/`, which
//! docs/operations.md repeats), in constants of another file, and what is compared otherwise, such
//! as with a regular expression.

use std::collections::BTreeMap;

use super::source::{Function, Source, literals, words};
use super::{files, is_test_file, read, test_paths};

/// Most such functions. What is left is about the words: those of flannel and of Go that users
/// search their logs for, a deprecated flag's notice, the help. Lower it with each that goes.
const FUNCTIONS_MAX: usize = 25;

/// Functions and macros that compare with their arguments, helpers of tests among them.
const COMPARERS: &[&str] = &[
    "assert_eq",
    "assert_in_order",
    "assert_ne",
    "assert_refused",
    "assert_warned",
    "complaints",
    "contains",
    "ends_with",
    "find",
    "matches",
    "prop_assert_eq",
    "refuses",
    "rfind",
    "says",
    "split",
    "split_once",
    "starts_with",
    "strip_prefix",
    "strip_suffix",
    "wait_for",
    "wait_for_log",
    "wait_to_hear",
    "warned",
];

/// What a literal may stand in and still be what is compared.
const WRAPPERS: &[&str] = &["", "Err", "Ok", "Some", "concat", "format", "from", "vec"];

/// Literals with these words are no sentences of weft's: commands, and what other programs say.
const OF_OTHERS: &[&str] = &[
    "Destination Net Unreachable",
    "Time to live",
    "add rule ip",
    "delete table ip",
    "exposure level for",
    "ip route get",
    "the object has been modified",
];

/// Tests that read what flanneld, another program, says of itself.
const OF_FLANNELD: &str = "tests/beside/flanneld/";

/// Whether three words of letters follow each other in `literal`, no part of a path or a flag.
fn is_prose(literal: &str) -> bool {
    if OF_OTHERS.iter().any(|words| literal.contains(words)) {
        return false;
    }
    // A line that goes on, as the compiler joins it.
    let mut parts = literal.split("\\\n").map(str::trim_start);
    let text = parts.by_ref().collect::<String>().replace("\\n", " \n ");
    let is_word = |word: &str| {
        let word = word.trim_end_matches([',', '.', ':', ';']);
        word.chars().all(|letter| letter.is_ascii_alphabetic() || letter == '\'')
            && word.chars().any(|letter| letter.is_ascii_lowercase() || word == "I")
    };
    let text = text.trim_matches(['"', '#', 'r', 'b']);
    let pieces: Vec<_> = text.split(' ').collect();
    pieces.windows(3).any(|three| {
        let [first, second, third] = three else { return false };
        let is_inside = |word: &str| word.ends_with([',', '.', ':', ';']);
        [first, second, third].iter().all(|word| !word.is_empty() && is_word(word))
            && !is_inside(first)
            && !is_inside(second)
    })
}

/// What stands before a literal, outwards.
enum Place {
    /// It is an argument of a comparer.
    Compared,
    /// It is a value of the statement that begins here; its index in the innermost tuple.
    Of(usize, usize),
    /// It is something else's.
    Elsewhere,
}

/// Where the literal at `at` is.
fn place(code: &str, at: usize) -> Place {
    let bytes = code.as_bytes();
    let before = code[..at].trim_end_matches(|c: char| c.is_whitespace() || c == '&');
    if before.ends_with("==") || before.ends_with("!=") {
        return Place::Compared;
    }
    let (mut depth, mut commas, mut index) = (0, 0, 0);
    for open in (0..at).rev() {
        match bytes[open] {
            b'}' if depth == 0 && !code[open + 1..at].trim_start().starts_with([')', ',', '.']) => {
                return Place::Of(open + 1, index);
            }
            b')' | b']' | b'}' => depth += 1,
            b'{' | b';' if depth == 0 => return Place::Of(open + 1, index),
            b'(' | b'[' if depth == 0 => {
                let name = name_before(&code[..open]);
                if COMPARERS.contains(&name) && !is_message(name, commas) {
                    return Place::Compared;
                }
                if !WRAPPERS.contains(&name) {
                    return Place::Elsewhere;
                }
                if name.is_empty() && bytes[open] == b'(' {
                    index = commas;
                }
                commas = 0;
            }
            b'(' | b'[' | b'{' => depth -= 1,
            b',' if depth == 0 => commas += 1,
            _ => {}
        }
    }
    Place::Of(0, index)
}

/// Whether the argument after so many commas is what an assertion says when it fails.
fn is_message(name: &str, commas: usize) -> bool {
    name.contains("assert_") && (name.ends_with("_eq") || name.ends_with("_ne")) && commas > 1
}

/// The name that `code` ends with, of a function or a macro.
fn name_before(code: &str) -> &str {
    let code = code.strip_suffix('!').unwrap_or(code);
    let end = words(code).last().filter(|(at, word)| at + word.len() == code.len());
    end.map(|(_, word)| word).filter(|word| !matches!(*word, "in" | "return" | "mut")).unwrap_or("")
}

/// The names that the statement before `at` binds to a value whose place in a tuple is `index`,
/// and whether it is a constant.
fn bound(head: &str, index: usize) -> Option<(Vec<&str>, bool)> {
    let (at, keyword) = words(head)
        .find(|(_, word)| matches!(*word, "let" | "for" | "const" | "static"))
        .map(|(at, word)| (at + word.len(), word))?;
    let is_constant = matches!(keyword, "const" | "static");
    let end = if keyword == "for" { head[at..].find(" in ") } else { head[at..].find('=') }?;
    let pattern = head[at..at + end].trim();
    let pattern = if keyword == "for" { pattern } else { pattern.split(':').next()?.trim() };
    let inside = pattern.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
    let part = inside.and_then(|inside| inside.split(',').nth(index)).unwrap_or(pattern);
    Some((words(part).map(|(_, word)| word).collect(), is_constant))
}

/// The names that comparers of `code` have for an argument, with where that is.
fn compared_names(code: &str) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    for (at, word) in words(code) {
        let open = at + word.len();
        let open = open + usize::from(code[open..].starts_with('!'));
        if !COMPARERS.contains(&word) || !code[open..].starts_with('(') {
            continue;
        }
        let (mut depth, mut start, mut commas) = (0, open + 1, 0);
        for (offset, byte) in code.bytes().enumerate().skip(open) {
            depth += i32::from(matches!(byte, b'(' | b'[' | b'{'));
            depth -= i32::from(matches!(byte, b')' | b']' | b'}'));
            if depth == 0 || (depth == 1 && byte == b',') {
                let argument = code[start..offset].trim().trim_start_matches(['&', '*']);
                let argument = argument.strip_prefix("Some(").unwrap_or(argument);
                let length = words(argument).next().map_or(0, |(_, word)| word.len());
                let rest = argument[length..].trim_end_matches(')');
                let is_name = rest.is_empty() || (rest.starts_with('.') && rest.ends_with('('));
                if length > 0 && is_name && !is_message(word, commas) {
                    names.push((at, &argument[..length]));
                }
                (start, commas) = (offset + 1, commas + 1);
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

/// The functions of `source` that compare with prose, each with the literals, by their order.
fn asserts(
    source: &Source,
    is_test: impl Fn(usize) -> bool,
) -> BTreeMap<usize, (String, Vec<String>)> {
    let (code, functions) = (&source.code, source.functions());
    let names = compared_names(code);
    let around = |at: usize| {
        let inside =
            functions.iter().filter(|function| (function.start..function.end).contains(&at));
        inside.min_by_key(|function| function.end - function.start)
    };
    let mut found = BTreeMap::new();
    let mut add = |function: &Function, literal: &str| {
        let entry = found.entry(function.start);
        let (_, literals) = entry.or_insert_with(|| (function.name.clone(), Vec::new()));
        literals.push(literal.to_owned());
    };
    for literal in literals(&source.text) {
        let text = &source.text[literal.clone()];
        if !is_test(literal.start) || !text.ends_with(['"', '#']) || !is_prose(text) {
            continue;
        }
        let own = around(literal.start);
        match place(code, literal.start) {
            Place::Compared => own.into_iter().for_each(|function| add(function, text)),
            Place::Elsewhere => {}
            Place::Of(statement, index) => {
                let Some((bound, is_constant)) = bound(&code[statement..literal.start], index)
                else {
                    continue;
                };
                let used = names.iter().filter(|(_, name)| bound.contains(name));
                for function in used.filter_map(|(at, _)| around(*at)) {
                    if is_constant || own.is_some_and(|own| own.start == function.start) {
                        add(function, text);
                    }
                }
            }
        }
    }
    found
}

#[test]
fn few_tests_assert_on_prose() {
    let sources: Vec<_> =
        files(|name| name.ends_with(".rs")).iter().map(|path| read(path)).collect();
    let tests = test_paths(&sources);
    let mut found = Vec::new();
    for source in &sources {
        let is_whole =
            is_test_file(source) || tests.iter().any(|test| source.path.starts_with(test));
        if source.path.starts_with(OF_FLANNELD) || source.path.starts_with("tests/tidy/") {
            continue;
        }
        let is_test = |at| is_whole || source.test_items.iter().any(|item| item.contains(&at));
        for (name, literals) in asserts(source, is_test).into_values() {
            found.push(format!("{} {name}: {}", source.path, literals[0]));
        }
    }
    println!("{} functions assert on prose:\n{}", found.len(), found.join("\n"));
    assert!(
        found.len() <= FUNCTIONS_MAX,
        "{} functions of tests assert on prose, {FUNCTIONS_MAX} at most: assert on an exit code, a \
         field of the status, a counter, the kernel's state, or on the value that a message names:\
         \n{}",
        found.len(),
        found.join("\n")
    );
}

/// The functions that count in `text`.
fn counted(text: &str) -> Vec<String> {
    let source = Source::new("tests/x.rs", text);
    asserts(&source, |_| true).into_values().map(|(name, _)| name).collect()
}

#[test]
fn prose_is_found_where_it_is_compared() {
    let prose = "\"the store is away\"";
    for statement in [
        format!("assert!(log.contains({prose}));"),
        format!("assert_eq!(text, {prose});"),
        format!("assert_eq!(Some(&format!({prose}, x)), text);"),
        format!("assert!(text == {prose});"),
        format!("wait_until(SOON, \"x\", || log.lines().any(|line| line.starts_with({prose})));"),
        format!("let words = {prose}; wait_until(|| log.contains(words));"),
        format!("for words in [\"x\", {prose}] {{ assert!(log.contains(&words)); }}"),
        format!("for (x, words) in [(1, {prose})] {{ assert!(log.contains(words), \"{{x}}\"); }}"),
    ] {
        assert_eq!(counted(&format!("fn f() {{ {statement} }}")), ["f"], "{statement}");
    }
    let constant =
        format!("const WORDS: &str = {prose};\nfn f() {{ a.contains(WORDS) }}\nfn g() {{}}");
    assert_eq!(counted(&constant), ["f"]);
}

#[test]
fn other_literals_do_not_count() {
    let prose = "\"the store is away\"";
    for statement in [
        "assert!(log.contains(\"10.5.0.0/16\"));".to_owned(),
        "assert!(log.contains(\"--etcd-cafile nor SSL_CERT_FILE\"));".to_owned(),
        format!("assert!(log.contains(\"x\"), {prose});"),
        format!("assert_eq!(text, \"x\", {prose});"),
        format!("wait_until(SOON, {prose}, || log.contains(\"x\"));"),
        format!("assert_eq!(parse({prose}), 3);"),
        format!("for (what, x) in [({prose}, 1)] {{ assert_eq!(f(x), x, \"{{what}}\"); }}"),
        format!("let input = {prose}; assert_eq!(parse(input), 3);"),
        format!("// contains({prose})\n"),
    ] {
        assert_eq!(counted(&format!("fn f() {{ {statement} }}")), [""; 0], "{statement}");
    }
}

//! Rust source as the tidiness rules see it: code, comments and tests told apart, paths and
//! functions found, without a full parser. Knows tokens and brackets; no rule lives here.

use std::ops::Range;

/// One file.
pub(crate) struct Source {
    /// Path from the package's root, with `/`.
    pub(crate) path: String,
    /// As written.
    pub(crate) text: String,
    /// The code: comments and literals are spaces, so offsets and lines are those of `text`.
    pub(crate) code: String,
    /// The comments; all else is spaces.
    pub(crate) comments: String,
    /// The code without items marked `#[cfg(test)]`.
    pub(crate) product: String,
    /// Those items, as offsets.
    pub(crate) test_items: Vec<Range<usize>>,
}

/// A function with a body.
pub(crate) struct Function {
    /// Its name.
    pub(crate) name: String,
    /// Offset of `fn`.
    pub(crate) start: usize,
    /// Offset after the closing brace.
    pub(crate) end: usize,
}

/// A path in code, one entry per leaf of a `use` tree.
pub(crate) struct Path {
    /// Offset of its last segment.
    pub(crate) at: usize,
    /// The segments after the root.
    pub(crate) segments: Vec<String>,
}

impl Source {
    /// Takes `text` apart.
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let (code, comments) = split(text);
        let test_items = test_items(&code);
        let mut product = code.clone().into_bytes();
        for item in &test_items {
            blank(&mut product[item.clone()]);
        }
        let product = String::from_utf8_lossy(&product).into_owned();
        Self { path: path.to_owned(), text: text.to_owned(), code, comments, product, test_items }
    }

    /// The product with its literals: what is neither comment nor test.
    pub(crate) fn product_text(&self) -> String {
        let mut text = self.text.clone().into_bytes();
        for (byte, comment) in text.iter_mut().zip(self.comments.bytes()) {
            if !comment.is_ascii_whitespace() && *byte != b'\n' {
                *byte = b' ';
            }
        }
        for item in &self.test_items {
            blank(&mut text[item.clone()]);
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The line of an offset, from 1.
    pub(crate) fn line(&self, offset: usize) -> usize {
        let newlines = self.text.bytes().take(offset).filter(|byte| *byte == b'\n');
        newlines.count() + 1
    }

    /// The module path that the file stands for; empty for `lib.rs` and outside `src/`.
    pub(crate) fn module(&self) -> Vec<&str> {
        let inside = self.path.strip_prefix("src/").and_then(|path| path.strip_suffix(".rs"));
        let mut module: Vec<_> = inside.unwrap_or_default().split('/').collect();
        if module.last().is_some_and(|last| matches!(*last, "mod" | "lib" | "")) {
            module.pop();
        }
        module
    }

    /// Files that are test modules of this one: `#[cfg(test)] mod name;`.
    pub(crate) fn test_files(&self) -> Vec<String> {
        let (folder, file) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let below = match file {
            "mod.rs" | "lib.rs" => folder.to_owned(),
            _ => format!("{folder}/{}", file.trim_end_matches(".rs")),
        };
        let mut files = Vec::new();
        for item in &self.test_items {
            let words: Vec<_> = words(&self.code[item.clone()]).map(|(_, word)| word).collect();
            let Some(at) = words.iter().position(|word| *word == "mod") else { continue };
            if self.code[item.clone()].contains('{') {
                continue;
            }
            let given = self.text[item.clone()].split("path = \"").nth(1);
            match given.and_then(|rest| rest.split('"').next()) {
                Some(path) => files.push(format!("{folder}/{path}")),
                None => files.push(format!("{below}/{}.rs", words[at + 1])),
            }
        }
        files
    }

    /// Every function with a body.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let mut functions = Vec::new();
        let mut previous: Option<usize> = None;
        for (at, word) in words(&self.code) {
            if let Some(start) = previous.filter(|start| self.code[start + 2..at].trim().is_empty())
                && let Some(end) = body_end(self.code.as_bytes(), at)
            {
                functions.push(Function { name: word.to_owned(), start, end });
            }
            previous = (word == "fn").then_some(at);
        }
        functions
    }
}

/// Every path in `code` that starts with `root`, `use` trees taken apart.
pub(crate) fn paths(code: &str, root: &str) -> Vec<Path> {
    let mut found = Vec::new();
    for (at, word) in words(code) {
        let after = at + word.len();
        let inside_a_path = code[..at].ends_with("::") || code[..at].ends_with('.');
        if word == root && !inside_a_path && code[after..].starts_with("::") {
            expand(code, after + 2, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Every word of `code` with its offset.
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let bytes = code.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() && !is_word(bytes[at]) {
            at += 1;
        }
        let start = at;
        while at < bytes.len() && is_word(bytes[at]) {
            at += 1;
        }
        (start < at).then(|| (start, &code[start..at]))
    })
}

/// Reads what follows `::` and returns the offset after it.
fn expand(code: &str, at: usize, prefix: &mut Vec<String>, found: &mut Vec<Path>) -> usize {
    let mut at = skip_space(code, at);
    if code[at..].starts_with('{') {
        loop {
            at = skip_space(code, at + 1);
            if !code[at..].starts_with('}') {
                let depth = prefix.len();
                at = skip_space(code, expand(code, at, prefix, found));
                prefix.truncate(depth);
            }
            if !code[at..].starts_with(',') {
                return at + 1;
            }
        }
    }
    let star = usize::from(code[at..].starts_with('*'));
    let length = code[at..].bytes().take_while(|byte| is_word(*byte)).count() + star;
    prefix.push(code[at..at + length].to_owned());
    let end = at + length;
    let deeper = code[end..].strip_prefix("::").filter(|rest| !rest.starts_with('<'));
    if length > 0 && deeper.is_some() {
        return expand(code, end + 2, prefix, found);
    }
    found.push(Path { at, segments: prefix.clone() });
    let alias = skip_space(code, end);
    match code[alias..].starts_with("as ") {
        true => alias + 3 + code[alias + 3..].bytes().take_while(|byte| is_word(*byte)).count(),
        false => end,
    }
}

fn skip_space(code: &str, at: usize) -> usize {
    at + code[at..].bytes().take_while(u8::is_ascii_whitespace).count()
}

fn is_word(byte: u8) -> bool {
    byte == b'_' || byte.is_ascii_alphanumeric()
}

fn blank(bytes: &mut [u8]) {
    bytes.iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

enum Kind {
    Code,
    Comment,
    Literal,
}

/// Code and comments of `text`, each of its length.
fn split(text: &str) -> (String, String) {
    let bytes = text.as_bytes();
    let (mut code, mut comments) = (bytes.to_vec(), bytes.to_vec());
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = token(bytes, at);
        let end = end.clamp(at + 1, bytes.len());
        match kind {
            Kind::Code => blank(&mut comments[at..end]),
            Kind::Comment => blank(&mut code[at..end]),
            Kind::Literal => {
                blank(&mut comments[at..end]);
                blank(&mut code[at..end]);
            }
        }
        at = end;
    }
    let string = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (string(code), string(comments))
}

/// Where the literals of `text` are, their quotes included.
pub(crate) fn literals(text: &str) -> Vec<Range<usize>> {
    let (bytes, mut at, mut found) = (text.as_bytes(), 0, Vec::new());
    while at < bytes.len() {
        let (kind, end) = token(bytes, at);
        let end = end.clamp(at + 1, bytes.len());
        if matches!(kind, Kind::Literal) {
            found.push(at..end);
        }
        at = end;
    }
    found
}

/// How many words, literals and signs `text` has.
pub(crate) fn token_count(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut count) = (0, 0);
    while at < bytes.len() {
        count += usize::from(!bytes[at].is_ascii_whitespace());
        at = token(bytes, at).1.max(at + 1);
    }
    count
}

/// The token at `at`: its kind and the offset after it.
fn token(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    match rest {
        [b'/', b'/', ..] => {
            let length = rest.iter().take_while(|byte| **byte != b'\n').count();
            (Kind::Comment, at + length)
        }
        [b'/', b'*', ..] => (Kind::Comment, at + block_comment(rest)),
        [b'"', ..] => (Kind::Literal, at + quoted(rest, b'"')),
        [b'\'', b'\\', ..] => (Kind::Literal, at + quoted(rest, b'\'')),
        [b'\'', first, ..] => {
            let character = match first {
                0xf0.. => 4,
                0xe0.. => 3,
                0xc0.. => 2,
                _ => 1,
            };
            match rest.get(1 + character) {
                Some(b'\'') => (Kind::Literal, at + character + 2),
                _ => (Kind::Code, at + 1), // a lifetime
            }
        }
        [first, ..] if is_word(*first) => {
            let length = rest.iter().take_while(|byte| is_word(**byte)).count();
            let hashes = rest[length..].iter().take_while(|byte| **byte == b'#').count();
            let raw = matches!(&rest[..length], b"r" | b"br" | b"cr");
            if raw && rest.get(length + hashes) == Some(&b'"') {
                let open = length + hashes + 1;
                let close = [&b"\""[..], &b"#".repeat(hashes)].concat();
                let inner = rest[open..].windows(close.len()).position(|part| part == close);
                return (Kind::Literal, at + open + inner.unwrap_or(rest.len()) + close.len());
            }
            (Kind::Code, at + length)
        }
        _ => (Kind::Code, at + 1),
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (at, depth) = (at + 2, depth + 1),
            [b'*', b'/', ..] => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// Items marked `#[cfg(test)]`: modules, functions, but also variants and match arms.
fn test_items(code: &str) -> Vec<Range<usize>> {
    let starts = code.match_indices("#[cfg(test)]").map(|(at, _)| at);
    let mut items: Vec<Range<usize>> = Vec::new();
    for start in starts {
        if items.last().is_none_or(|last| last.end <= start) {
            items.push(start..item_end(code, start));
        }
    }
    items
}

fn item_end(code: &str, start: usize) -> usize {
    const KEYWORDS: [&str; 10] =
        ["fn", "impl", "mod", "use", "struct", "enum", "trait", "type", "const", "static"];
    let bytes = code.as_bytes();
    let mut at = start;
    while code[at..].starts_with('#') {
        at = skip_space(code, closing(bytes, at + 1));
    }
    let first = words(&code[at..]).map(|(_, word)| word);
    let is_item = first
        .take_while(|word| !matches!(*word, "match" | "if"))
        .take(4)
        .any(|word| KEYWORDS.contains(&word));
    while at < bytes.len() {
        match bytes[at] {
            b';' => return at + 1,
            b',' if !is_item => return at + 1,
            b'{' => return closing(bytes, at),
            b'(' | b'[' => at = closing(bytes, at),
            b')' | b']' | b'}' => return at,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The offset after the bracket that closes the one at `at`.
fn closing(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0;
    for (offset, byte) in bytes[at..].iter().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + offset + 1;
        }
    }
    bytes.len()
}

/// The end of the function whose name is at `at`; `None` if it has no body.
fn body_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    while at < bytes.len() {
        match bytes[at] {
            b';' => return None,
            b'{' => return Some(closing(bytes, at)),
            b'(' | b'[' => at = closing(bytes, at),
            b')' | b']' | b'}' => return None,
            _ => at += 1,
        }
    }
    None
}

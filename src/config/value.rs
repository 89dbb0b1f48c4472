//! The types of the flags' values: how Go parses and prints each.

use crate::config::options::Secret;

/// A value that Go's `flag` package reads.
pub(super) trait Value {
    /// What the usage text calls it; empty for a bool, which takes a value only with `=`.
    fn type_name(&self) -> &'static str;

    /// Takes a value; later ones win, and in a list they accumulate.
    fn read(&mut self, text: &str) -> Result<(), ValueProblem>;

    /// As the usage text shows a default: empty for Go's zero value.
    fn shown(&self) -> String;

    /// The value itself, as it can be given again; a secret shows as `***`.
    fn text(&self) -> String;
}

impl Value for String {
    fn type_name(&self) -> &'static str {
        "string"
    }

    fn read(&mut self, text: &str) -> Result<(), ValueProblem> {
        text.clone_into(self);
        Ok(())
    }

    fn shown(&self) -> String {
        if self.is_empty() { Self::new() } else { format!("{self:?}") }
    }

    fn text(&self) -> String {
        self.clone()
    }
}

impl Value for Secret {
    fn type_name(&self) -> &'static str {
        "string"
    }

    fn read(&mut self, text: &str) -> Result<(), ValueProblem> {
        text.clone_into(&mut self.0);
        Ok(())
    }

    fn shown(&self) -> String {
        String::new()
    }

    fn text(&self) -> String {
        if self.0.is_empty() { String::new() } else { "***".to_owned() }
    }
}

impl Value for Vec<String> {
    fn type_name(&self) -> &'static str {
        "value"
    }

    fn read(&mut self, text: &str) -> Result<(), ValueProblem> {
        self.push(text.to_owned());
        Ok(())
    }

    fn shown(&self) -> String {
        String::new()
    }

    fn text(&self) -> String {
        self.join(",")
    }
}

impl Value for bool {
    fn type_name(&self) -> &'static str {
        ""
    }

    fn read(&mut self, text: &str) -> Result<(), ValueProblem> {
        *self = parse_bool(text).ok_or(ValueProblem::Syntax)?;
        Ok(())
    }

    fn shown(&self) -> String {
        if *self { "true".to_owned() } else { String::new() }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for i64 {
    fn type_name(&self) -> &'static str {
        "int"
    }

    fn read(&mut self, text: &str) -> Result<(), ValueProblem> {
        *self = parse_int(text)?;
        Ok(())
    }

    fn shown(&self) -> String {
        if *self == 0 { String::new() } else { self.to_string() }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// What is wrong with a value; worded as in Go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ValueProblem {
    /// Not the syntax of the type.
    #[error("parse error")]
    Syntax,
    /// An integer beyond 64 bits.
    #[error("value out of range")]
    Range,
}

/// Go's `strconv.ParseBool`.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Go's `strconv.ParseInt` with base 0: sign, base prefix, underscores between digits.
pub(super) fn parse_int(text: &str) -> Result<i64, ValueProblem> {
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match unsigned.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &unsigned[2..]),
        [b'0', b'o' | b'O', ..] => (8, &unsigned[2..]),
        [b'0', b'b' | b'B', ..] => (2, &unsigned[2..]),
        [b'0', _, ..] => (8, &unsigned[1..]),
        _ => (10, unsigned),
    };
    let after_prefix = digits.len() < unsigned.len();
    let digits = without_underscores(digits, after_prefix).ok_or(ValueProblem::Syntax)?;
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(ValueProblem::Syntax);
    }
    let sign = if negative { "-" } else { "" };
    i64::from_str_radix(&format!("{sign}{digits}"), radix)
        .map_err(|_out_of_i64| ValueProblem::Range)
}

/// Underscores may only separate digits, or a base prefix from the first digit.
fn without_underscores(digits: &str, after_prefix: bool) -> Option<String> {
    let misplaced = digits.ends_with('_')
        || digits.contains("__")
        || (digits.starts_with('_') && !after_prefix);
    (!misplaced).then(|| digits.replace('_', ""))
}

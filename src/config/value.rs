//! The types of the flags' values: how Go parses and prints each.

use crate::config::options::Secret;

/// A flag's value, in the word that its row of the table has for it.
pub(super) type Text = String;
/// Values of a flag that may be given several times.
pub(super) type List = Vec<String>;
/// A whole number.
pub(super) type Number = i64;
/// On or off: takes a value only with `=`.
pub(super) type Switch = bool;

/// The place of a flag's value.
pub(super) enum Place<'a> {
    Text(&'a mut Text),
    Secret(&'a mut Secret),
    List(&'a mut List),
    Number(&'a mut Number),
    Switch(&'a mut Switch),
}

impl Place<'_> {
    /// What the usage text calls a value; empty for a switch.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Text(_) | Self::Secret(_) => "string",
            Self::List(_) => "value",
            Self::Number(_) => "int",
            Self::Switch(_) => "",
        }
    }

    /// Takes a value; later ones win, and in a list they accumulate. An error is in Go's words.
    pub(super) fn read(self, text: &str) -> Result<(), &'static str> {
        match self {
            Self::Text(place) => text.clone_into(place),
            Self::Secret(place) => text.clone_into(&mut place.0),
            Self::List(place) => place.push(text.to_owned()),
            Self::Number(place) => *place = parse_int(text)?,
            Self::Switch(place) => *place = parse_bool(text).ok_or(SYNTAX)?,
        }
        Ok(())
    }

    /// The value itself, as it can be given again; a secret shows as `***`.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Text(text) => text.to_string(),
            Self::Secret(secret) if secret.0.is_empty() => String::new(),
            Self::Secret(_) => "***".to_owned(),
            Self::List(texts) => texts.join(","),
            Self::Number(number) => number.to_string(),
            Self::Switch(is_on) => is_on.to_string(),
        }
    }

    /// As the usage text shows a default: empty for Go's zero value.
    pub(super) fn default_text(&self) -> String {
        match (self, self.text()) {
            (_, text) if matches!(text.as_str(), "" | "0" | "false") => String::new(),
            (Self::Text(_), text) => format!(" (default {text:?})"),
            (_, text) => format!(" (default {text})"),
        }
    }
}

/// Go's word for what is not the syntax of its type.
pub(super) const SYNTAX: &str = "parse error";
/// Go's word for an integer beyond 64 bits.
pub(super) const RANGE: &str = "value out of range";

/// Go's `strconv.ParseBool`.
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Go's `strconv.ParseInt` with base 0: sign, base prefix, underscores between digits.
pub(super) fn parse_int(text: &str) -> Result<i64, &'static str> {
    const BASES: [(&str, u32); 7] =
        [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2), ("0", 8)];
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let based = BASES.iter().find_map(|(prefix, radix)| {
        let digits = unsigned.strip_prefix(prefix).filter(|_| unsigned != "0")?;
        // An underscore may follow a base's prefix, but for that no digit is missing.
        Some((digits.strip_prefix('_').unwrap_or(digits), *radix))
    });
    let (digits, radix) = based.unwrap_or((unsigned, 10));
    // Between two underscores, and before and after them, there is a digit.
    if !digits.split('_').all(|part| !part.is_empty() && part.chars().all(|c| c.is_digit(radix))) {
        return Err(SYNTAX);
    }
    let sign = if text.starts_with('-') { "-" } else { "" };
    i64::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), radix)
        .map_err(|_out_of_i64| RANGE)
}

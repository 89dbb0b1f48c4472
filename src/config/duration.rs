//! Durations on the command line, in Go's spelling: `15m`, `1h30m`, `1.5s`. Pure.

use std::time::Duration;

/// Longest duration that Go's parser takes: 2^63 nanoseconds.
const NANOSECONDS_MAX: u128 = i64::MAX as u128;
/// Digits that are read of a number; what follows is more than the longest duration, or less than
/// a nanosecond.
const DIGITS_MAX: usize = 19;

/// Reads what Go's `time.ParseDuration` does, but for a negative duration; `None` otherwise.
#[must_use]
pub(super) fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u128;
    while !rest.is_empty() {
        let is_digit = |c: char| c.is_ascii_digit();
        let end = rest.find(|c| !is_digit(c) && c != '.')?;
        let (number, after) = rest.split_at(end);
        let unit_end = after.find(|c| is_digit(c) || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        total = total.checked_add(nanoseconds(number, unit)?)?;
        if total > NANOSECONDS_MAX {
            return None;
        }
        rest = after;
    }
    let nanoseconds = u64::try_from(total).ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

fn nanoseconds(number: &str, unit: &str) -> Option<u128> {
    let unit: u128 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let has_digits = !whole.is_empty() || !fraction.is_empty();
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if !has_digits || !digits(fraction) || whole.len() > DIGITS_MAX {
        return None;
    }
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u128>().ok()? };
    let fraction = fraction.get(..DIGITS_MAX).unwrap_or(fraction);
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = if fraction.is_empty() { 0 } else { fraction.parse::<u128>().ok()? };
    Some(whole * unit + part * unit / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_go_reads_is_read() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("15m", 900_000),
            ("+5s", 5_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            (".5s", 500),
            ("5.s", 5_000),
            ("1m0.25s", 60_250),
            ("300ms", 300),
            ("1000us", 1),
            ("2000µs", 2),
            ("3000000ns", 3),
            ("0.1000000000000000000000000000001s", 100),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text:?}");
        }
    }

    #[test]
    fn anything_else_is_no_duration() {
        for text in [
            "",
            "+",
            "5",
            "-5s",
            "m",
            ".s",
            ".",
            "1.2.3s",
            "5 s",
            "5x",
            "5ss",
            "s5",
            "1h-5m",
            "9999999999999h",
            "99999999999999999999s",
            "5é",
            "é",
        ] {
            assert_eq!(parse(text), None, "{text:?} was taken for a duration");
        }
    }
}

//! Durations on the command line, in Go's spelling: `15m`, `1h30m`, `1.5s`. Pure.

use std::time::Duration;

/// Longest duration that Go's parser takes: 2^63 nanoseconds.
const LONGEST: Duration = Duration::from_nanos(i64::MAX.cast_unsigned());

/// Reads what Go's `time.ParseDuration` does, but for a negative duration; `None` otherwise.
pub(super) fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let in_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut total = Duration::ZERO;
    loop {
        let (number, after) = rest.split_at(rest.find(|c| !in_number(c))?);
        let (unit, after) = after.split_at(after.find(in_number).unwrap_or(after.len()));
        let seconds = number.parse::<f64>().ok()? * seconds_of(unit)?;
        total = total.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
        if after.is_empty() {
            return (total <= LONGEST).then_some(total);
        }
        rest = after;
    }
}

fn seconds_of(unit: &str) -> Option<f64> {
    match unit {
        "ns" => Some(1e-9),
        "us" | "µs" | "μs" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_parse() {
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

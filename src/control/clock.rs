//! The two clocks of the control plane and the formats of a point in time.
//!
//! Renewal counts on the boot clock, which neither jumps nor stops while the host is suspended.
//! The wall clock serves people and the local store's files, never a renewal decision.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

const SECONDS_PER_DAY: i64 = 86_400;

/// Time since the host started, suspension included (`CLOCK_BOOTTIME`).
#[must_use]
pub fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    // The boot clock is never negative; a zero is harmless where a cast would wrap.
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Seconds since 1970, by the wall clock.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `2026-11-21T08:30:00Z` (RFC 3339).
#[must_use]
pub fn format_rfc3339(unix_seconds: u64) -> String {
    let Civil { year, month, day, hour, minute, second } = civil(unix_seconds);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// `2026-11-21 08:30:00 +0000 UTC`: Go's spelling, as in flannel's log lines.
#[must_use]
pub fn format_go(unix_seconds: u64) -> String {
    let text = format_rfc3339(unix_seconds).replace('T', " ").replace('Z', "");
    format!("{text} +0000 UTC")
}

/// `22h59m59.5s`: Go's spelling of a duration, as in flannel's log lines.
#[must_use]
pub fn format_go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let fraction = f64::from(duration.subsec_millis()) / 1000.0;
    // Below 60, so exact.
    let rest = f64::from(u32::try_from(seconds % 60).unwrap_or(0)) + fraction;
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        (_, _) => format!("{hours}h{minutes}m{rest}s"),
    }
}

/// A second of the Gregorian calendar, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Civil {
    pub(crate) year: i64,
    pub(crate) month: i64,
    pub(crate) day: i64,
    pub(crate) hour: i64,
    pub(crate) minute: i64,
    pub(crate) second: i64,
}

/// The calendar's second of `unix_seconds`.
pub(crate) fn civil(unix_seconds: u64) -> Civil {
    let seconds = i64::try_from(unix_seconds).unwrap_or(i64::MAX);
    let (year, month, day) = civil_from_days(seconds / SECONDS_PER_DAY);
    let second = seconds % SECONDS_PER_DAY;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    Civil { year, month, day, hour, minute, second }
}

/// Reads RFC 3339, fractions of a second dropped. `None` for anything else or before 1970.
#[must_use]
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let [year, month, day] = numbers(date, '-')?;
    let zone_at = time.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = time.split_at(zone_at);
    let [hour, minute, second] = numbers(time.split('.').next()?, ':')?;
    let valid = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_in_month(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !valid {
        return None;
    }
    let days = days_from_civil(year, month, day);
    let local = days * SECONDS_PER_DAY + hour * 3600 + minute * 60 + second;
    u64::try_from(local - zone_offset_seconds(zone)?).ok()
}

fn zone_offset_seconds(zone: &str) -> Option<i64> {
    let sign = match zone.get(..1)? {
        "+" => 1,
        "-" => -1,
        _ => return (zone.len() == 1).then_some(0),
    };
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let (hours, minutes) = (digits(hours)?, digits(minutes)?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts = text.split(separator);
    let found = [digits(parts.next()?)?, digits(parts.next()?)?, digits(parts.next()?)?];
    parts.next().is_none().then_some(found)
}

/// At most four digits, so that no sum can overflow.
fn digits(text: &str) -> Option<i64> {
    let plain = (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

fn days_in_month(year: i64, month: i64) -> i64 {
    let (next_year, next_month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days_from_civil(next_year, next_month, 1) - days_from_civil(year, month, 1)
}

/// Days since 1970-01-01 of a Gregorian date: H. Hinnant, "chrono-compatible low-level date
/// algorithms", for years from 0 on.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The inverse of `days_from_civil`, from the same source.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_are_spelt_and_read() {
        // Values from `date -u -d ... +%s`.
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2026-11-21T01:52:04Z", 1_795_225_924),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
        ] {
            assert_eq!(format_rfc3339(seconds), text);
            assert_eq!(parse_rfc3339(text), Some(seconds));
        }
        assert_eq!(format_go(951_868_799), "2000-02-29 23:59:59 +0000 UTC");
        assert_eq!(parse_rfc3339("2000-03-01T01:59:59.25+02:00"), Some(951_868_799));
    }

    #[test]
    fn durations_are_spelt_as_in_go() {
        for (millis, text) in [
            (0, "0s"),
            (1500, "1.5s"),
            (60_000, "1m0s"),
            (82_799_250, "22h59m59.25s"),
            (82_800_000, "23h0m0s"),
        ] {
            assert_eq!(format_go_duration(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn every_day_of_four_centuries_round_trips() {
        for day in 0..146_097 {
            let (year, month, day_of_month) = civil_from_days(day);
            assert_eq!(days_from_civil(year, month, day_of_month), day);
        }
    }

    #[test]
    fn anything_else_is_no_time() {
        for text in [
            "",
            "tomorrow",
            "2026-11-21",
            "2026-11-21T01:52:04",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00Zulu",
            "1969-12-31T23:59:59Z",
            "99999-01-01T00:00:00Z",
            "2026-01-01T00:00:00+99:00",
            "2026-1é-01T00:00:00Z",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text:?} was taken for a time");
        }
    }
}

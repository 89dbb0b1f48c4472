//! The two clocks of the control plane and the formats of a point in time.
//!
//! Renewal counts on the boot clock, which neither jumps nor stops while the host is suspended.
//! The wall clock serves people and the local store's files, never a renewal decision.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// Time since the host started, suspension included (`CLOCK_BOOTTIME`).
pub fn boot_time() -> Duration {
    // The boot clock is never negative; a zero is harmless where a cast would wrap.
    clock_gettime(ClockId::Boottime).try_into().unwrap_or_default()
}

/// Seconds since 1970, by the wall clock.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The point in time that many seconds after 1970; the last of the year 9999 stands for later ones.
pub(crate) fn timestamp(unix_seconds: u64) -> Timestamp {
    let seconds = i64::try_from(unix_seconds).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}

/// `2026-11-21T08:30:00Z` (RFC 3339).
pub fn format_rfc3339(unix_seconds: u64) -> String {
    timestamp(unix_seconds).to_string()
}

/// Reads RFC 3339, fractions of a second dropped. `None` for anything else or before 1970.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    u64::try_from(text.parse::<Timestamp>().ok()?.as_second()).ok()
}

/// `2026-11-21 08:30:00 +0000 UTC`: Go's spelling, as in flannel's log lines.
pub fn format_go(unix_seconds: u64) -> String {
    timestamp(unix_seconds).strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string()
}

/// `22h59m59.5s`: Go's spelling of a duration, as in flannel's log lines.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_format_and_parse() {
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
    fn durations_format_as_in_go() {
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
    fn invalid_times_are_rejected() {
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

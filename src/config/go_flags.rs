//! Go's `flag` package as flanneld's users know it: syntax of arguments, of booleans and of
//! integers, the environment rule, and the usage text. Knows types and places, never meanings.

use std::ffi::OsString;
use std::fmt::Write as _;

use crate::config::flag_table::{FLAGS, Flag, Setting, Settings, Slot, Source};
use crate::config::options::Secret;

/// Why the arguments stop a start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SyntaxError {
    /// `-h` or `--help`: not an error, but it ends parsing.
    #[error("help requested")]
    Help,
    /// No name after the dashes.
    #[error("bad flag syntax: {0}")]
    Malformed(String),
    /// No such flag.
    #[error("flag provided but not defined: -{0}")]
    Unknown(String),
    /// The last argument is a flag that takes a value.
    #[error("flag needs an argument: -{0}")]
    NoValue(&'static str),
    /// A value that its flag cannot hold.
    #[error("invalid value {value:?} for flag -{flag}: {problem}")]
    Value {
        /// The flag's name.
        flag: &'static str,
        /// The text given.
        value: String,
        /// What is wrong with it.
        problem: ValueProblem,
    },
    /// Bytes that are no text. Holds the flag, never the value, which may be a secret.
    #[error("the argument or value of {0} is not UTF-8")]
    NotUtf8(String),
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

/// Reads the arguments after the program's name into `settings`.
///
/// Parsing stops at the first word that is no flag, or after `--`; what follows is ignored.
pub(super) fn read_arguments(
    arguments: impl IntoIterator<Item = OsString>,
    settings: &mut Settings,
) -> Result<(), SyntaxError> {
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let argument = match argument.into_string() {
            Ok(argument) => argument,
            Err(raw) if raw.as_encoded_bytes().starts_with(b"-") => {
                let text = raw.to_string_lossy();
                let name = text.split('=').next().unwrap_or_default();
                return Err(SyntaxError::NotUtf8(name.to_owned()));
            }
            Err(_) => return Ok(()),
        };
        let Some(body) = flag_body(&argument) else { return Ok(()) };
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(SyntaxError::Malformed(argument));
        }
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) else {
            return Err(match name {
                "help" | "h" => SyntaxError::Help,
                _ => SyntaxError::Unknown(name.to_owned()),
            });
        };
        let value = match (inline, flag.slot) {
            (Some(value), _) => value,
            (None, Slot::Bool(_)) => "true".to_owned(),
            (None, Slot::Text(_) | Slot::Secret(_) | Slot::List(_) | Slot::Int(_)) => arguments
                .next()
                .ok_or(SyntaxError::NoValue(flag.name))?
                .into_string()
                .map_err(|_value| SyntaxError::NotUtf8(format!("-{}", flag.name)))?,
        };
        assign(flag, settings, value, Source::CommandLine)?;
    }
    Ok(())
}

/// Reads `FLANNELD_*` for every flag that the command line left alone. A value that does not
/// parse leaves the default; the complaint is returned for the log.
pub(super) fn read_environment(
    variable: impl Fn(&str) -> Option<OsString>,
    settings: &mut Settings,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for flag in FLAGS.iter().filter(|flag| flag.name != "version") {
        if is_given(flag, settings) {
            continue;
        }
        let name = environment_name(flag.name);
        let Some(value) = variable(&name).filter(|value| !value.is_empty()) else { continue };
        let outcome = value
            .into_string()
            .map_err(|_value| SyntaxError::NotUtf8(format!("-{}", flag.name)))
            .and_then(|value| assign(flag, settings, value, Source::Environment));
        if let Err(error) = outcome {
            complaints.push(format!("failed to set flag from {name}, ignoring it: {error}"));
        }
    }
    complaints
}

/// The variable that stands for a flag.
pub(super) fn environment_name(flag: &str) -> String {
    format!("FLANNELD_{}", flag.to_ascii_uppercase().replace('-', "_"))
}

/// Go's usage text.
pub(super) fn usage(program: &str) -> String {
    let mut text = format!("Usage: {program} [OPTION]...\n");
    let mut defaults = Settings::default();
    for flag in FLAGS {
        let (value_name, help) = unquote(flag);
        let mut line = format!("  -{}", flag.name);
        if !value_name.is_empty() {
            line.push(' ');
            line.push_str(value_name);
        }
        line.push_str(if line.len() <= 4 { "\t" } else { "\n    \t" });
        text.push_str(&line);
        text.push_str(&help);
        text.push_str(&default_note(flag, &mut defaults));
        text.push('\n');
    }
    text
}

/// What follows the dashes; `None` if the word is no flag or ends the flags.
fn flag_body(argument: &str) -> Option<&str> {
    let body = argument.strip_prefix('-')?;
    match body {
        "" | "-" => None,
        _ => Some(body.strip_prefix('-').unwrap_or(body)),
    }
}

fn is_given(flag: &Flag, settings: &mut Settings) -> bool {
    match flag.slot {
        Slot::Text(at) => at(settings).is_given(),
        Slot::Secret(at) => at(settings).is_given(),
        Slot::List(at) => at(settings).is_given(),
        Slot::Bool(at) => at(settings).is_given(),
        Slot::Int(at) => at(settings).is_given(),
    }
}

fn assign(
    flag: &Flag,
    settings: &mut Settings,
    value: String,
    source: Source,
) -> Result<(), SyntaxError> {
    let refuse = |problem| SyntaxError::Value { flag: flag.name, value: value.clone(), problem };
    match flag.slot {
        Slot::Text(at) => at(settings).set(value, source),
        Slot::Secret(at) => at(settings).set(Secret(value), source),
        Slot::List(at) => {
            let Setting { value: list, source: at_source } = at(settings);
            list.push(value);
            *at_source = source;
        }
        Slot::Bool(at) => {
            let parsed = parse_bool(&value).ok_or_else(|| refuse(ValueProblem::Syntax))?;
            at(settings).set(parsed, source);
        }
        Slot::Int(at) => {
            let parsed = parse_int(&value).map_err(refuse)?;
            at(settings).set(parsed, source);
        }
    }
    Ok(())
}

/// Go's `strconv.ParseBool`.
fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Go's `strconv.ParseInt` with base 0: sign, base prefix, underscores between digits.
fn parse_int(text: &str) -> Result<i64, ValueProblem> {
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

/// Splits the help into the value's name and the sentence, as Go's `UnquoteUsage`.
fn unquote(flag: &Flag) -> (&'static str, String) {
    let mut parts = flag.help.splitn(3, '`');
    if let (Some(before), Some(name), Some(after)) = (parts.next(), parts.next(), parts.next()) {
        return (name, format!("{before}{name}{after}"));
    }
    let by_type = match flag.slot {
        Slot::Text(_) | Slot::Secret(_) => "string",
        Slot::List(_) => "value",
        Slot::Bool(_) => "",
        Slot::Int(_) => "int",
    };
    (by_type, flag.help.to_owned())
}

fn default_note(flag: &Flag, defaults: &mut Settings) -> String {
    let mut note = String::new();
    let written = match flag.slot {
        Slot::Text(at) if !at(defaults).value.is_empty() => {
            write!(note, " (default {:?})", at(defaults).value)
        }
        Slot::Bool(at) if at(defaults).value => write!(note, " (default true)"),
        Slot::Int(at) if at(defaults).value != 0 => {
            write!(note, " (default {})", at(defaults).value)
        }
        Slot::Text(_) | Slot::Secret(_) | Slot::List(_) | Slot::Bool(_) | Slot::Int(_) => Ok(()),
    };
    debug_assert!(written.is_ok(), "writing to a string cannot fail");
    note
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::*;

    use super::*;

    fn read(words: &[&str]) -> Result<Settings, SyntaxError> {
        let mut settings = Settings::default();
        read_arguments(words.iter().map(OsString::from), &mut settings).map(|()| settings)
    }

    #[test]
    fn one_or_two_dashes_with_equals_or_a_following_word() {
        for words in [
            &["-etcd-prefix=/a"][..],
            &["--etcd-prefix=/a"],
            &["-etcd-prefix", "/a"],
            &["--etcd-prefix", "/a"],
        ] {
            assert_eq!(read(words).unwrap().etcd_prefix.value, "/a", "{words:?}");
        }
        assert_eq!(read(&["--etcd-prefix=/a=b"]).unwrap().etcd_prefix.value, "/a=b");
        assert_eq!(read(&["--etcd-prefix="]).unwrap().etcd_prefix.value, "");
        assert_eq!(read(&["--etcd-prefix", "--v"]).unwrap().etcd_prefix.value, "--v");
    }

    #[test]
    fn a_bool_takes_no_following_word() {
        let settings = read(&["--ip-masq", "false", "--v=3"]).unwrap();
        assert!(settings.ip_masq.value);
        assert_eq!(settings.v.value, 0, "parsing went on after the word `false`");
        assert!(!read(&["--ip-masq=F"]).unwrap().ip_masq.value);
    }

    #[test]
    fn parsing_stops_at_the_first_word_and_after_two_dashes() {
        for stop in ["word", "--", "-", ""] {
            let settings = read(&["--v=1", stop, "--v=2", "--no-such-flag"]).unwrap();
            assert_eq!(settings.v.value, 1, "{stop:?}");
        }
    }

    #[test]
    fn the_last_scalar_wins_and_lists_accumulate() {
        let settings =
            read(&["--v=1", "-v", "2", "--iface=a", "--iface", "b", "--iface-regex=x"]).unwrap();
        assert_eq!(settings.v.value, 2);
        assert_eq!(settings.iface.value, ["a", "b"]);
        assert_eq!(settings.iface_regex.value, ["x"]);
    }

    #[test]
    fn complaints_are_gos() {
        for (words, complaint) in [
            (&["--nope"][..], "flag provided but not defined: -nope"),
            (&["--nope=1"], "flag provided but not defined: -nope"),
            (&["---v"], "bad flag syntax: ---v"),
            (&["-=3"], "bad flag syntax: -=3"),
            (&["--=3"], "bad flag syntax: --=3"),
            (&["--v"], "flag needs an argument: -v"),
            (&["--v=x"], r#"invalid value "x" for flag -v: parse error"#),
            (&["--v=99999999999999999999"], "value out of range"),
            (&["--ip-masq=yes"], r#"invalid value "yes" for flag -ip-masq: parse error"#),
            (&["--ip-masq="], r#"invalid value "" for flag -ip-masq: parse error"#),
        ] {
            let error = read(words).unwrap_err().to_string();
            assert!(error.contains(complaint), "{words:?}: {error}");
        }
        for word in ["-h", "--h", "-help", "--help", "--help=x"] {
            assert_eq!(read(&[word]).unwrap_err(), SyntaxError::Help);
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_unless_ignored_anyway() {
        let raw = || OsString::from_vec(vec![b'-', b'v', b'=', 0xff]);
        let mut settings = Settings::default();
        assert!(matches!(read_arguments([raw()], &mut settings), Err(SyntaxError::NotUtf8(_))));
        assert_eq!(read_arguments([OsString::from("--"), raw()], &mut settings), Ok(()));
        let secret = || OsString::from_vec(b"hunter\xff".to_vec());
        let mut inline = OsString::from("--etcd-password=");
        inline.push(secret());
        for words in [vec![inline], vec![OsString::from("--etcd-password"), secret()]] {
            let error = read_arguments(words, &mut settings).unwrap_err().to_string();
            assert!(error.contains("-etcd-password") && !error.contains("hunter"), "{error}");
        }
    }

    #[test]
    fn integers_as_parse_int_base_zero() {
        for (text, value) in [
            ("0", 0),
            ("-0", 0),
            ("+7", 7),
            ("60", 60),
            ("0x3C", 60),
            ("0X3c", 60),
            ("074", 60),
            ("0o74", 60),
            ("0b111100", 60),
            ("1_000", 1000),
            ("0x_3c", 60),
            ("0_74", 60),
            ("-0x10", -16),
            ("9223372036854775807", i64::MAX),
            ("-9223372036854775808", i64::MIN),
        ] {
            assert_eq!(parse_int(text), Ok(value), "{text}");
        }
        for text in [
            "", "-", "+", "0x", "0b2", "08", "0o8", "_1", "1_", "1__0", "0x__1", "1.0", "1e3",
            " 1", "1 ", "--1", "+-1", "0x-1", "0b", "½",
        ] {
            assert_eq!(parse_int(text), Err(ValueProblem::Syntax), "{text:?}");
        }
        assert_eq!(parse_int("9223372036854775808"), Err(ValueProblem::Range));
        assert_eq!(parse_int("-0x8000000000000001"), Err(ValueProblem::Range));
    }

    #[test]
    fn bools_have_twelve_spellings() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(text), Some(true));
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(text), Some(false));
        }
        for text in ["", "yes", "on", "tRUE", "2", " true"] {
            assert_eq!(parse_bool(text), None, "{text:?}");
        }
    }

    #[test]
    fn environment_fills_only_what_the_command_line_left() {
        let mut settings = read(&["--v=1", "--iface=a"]).unwrap();
        let complaints = read_environment(
            |name| {
                let value = match name {
                    "FLANNELD_V" => "4",
                    "FLANNELD_IFACE" => "b",
                    "FLANNELD_IFACE_REGEX" => "x,y",
                    "FLANNELD_ETCD_PREFIX" => "/env",
                    "FLANNELD_HEALTHZ_IP" => "",
                    "FLANNELD_HEALTHZ_PORT" => "many",
                    "FLANNELD_LOG_BACKTRACE_AT" => "a.go:1",
                    "FLANNELD_VERSION" => "true",
                    _ => return None,
                };
                Some(value.into())
            },
            &mut settings,
        );
        assert_eq!(settings.v.value, 1);
        assert_eq!(settings.iface.value, ["a"]);
        assert_eq!(settings.iface_regex.value, ["x,y"], "no comma split");
        assert_eq!(settings.etcd_prefix.value, "/env");
        assert_eq!(settings.etcd_prefix.source, Source::Environment);
        assert!(!settings.healthz_ip.is_given());
        assert_eq!(settings.healthz_port.value, 0);
        assert_eq!(settings.log_backtrace_at.value, "a.go:1");
        assert!(!settings.version.value, "FLANNELD_VERSION has no effect");
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].contains("FLANNELD_HEALTHZ_PORT"), "{complaints:?}");
    }

    #[test]
    fn usage_is_gos_print_defaults() {
        let text = usage("/opt/bin/flanneld");
        assert!(text.starts_with("Usage: /opt/bin/flanneld [OPTION]...\n  -engine engine\n    \t"));
        for block in [
            "\n  -subnet-file file\n    \tfile to which the subnet's environment variables are \
             written (default \"/run/flannel/subnet.env\")\n",
            "\n  -healthz-port int\n    \tport on which",
            "\n  -version\n    \tprint the version and exit\n",
            "\n  -etcd-password string\n    \t",
        ] {
            assert!(text.contains(block), "{block:?} is not in:\n{text}");
        }
        assert!(text.contains("\n  -set-node-network-unavailable\n"));
        assert_eq!(text.matches("(default true)").count(), 2);
        for flag in FLAGS {
            assert!(text.contains(&format!("\n  -{}", flag.name)), "{}", flag.name);
        }
    }

    proptest! {
        #[test]
        fn any_words_give_settings_or_a_complaint(
            words in proptest::collection::vec("(-{0,3}(v|iface|ip-masq|etcd-prefix|x)?=?.{0,4})", 0..6)
        ) {
            let mut settings = Settings::default();
            if let Err(error) = read_arguments(words.iter().map(OsString::from), &mut settings) {
                prop_assert!(!error.to_string().is_empty());
            }
        }

        #[test]
        fn every_integer_reads_back(value: i64) {
            prop_assert_eq!(parse_int(&value.to_string()), Ok(value));
        }
    }
}

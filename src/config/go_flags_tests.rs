//! Go's syntax on literal arguments, and properties of the parsers.

use std::os::unix::ffi::OsStringExt;

use proptest::prelude::*;

use super::*;
use crate::config::value::{RANGE, SYNTAX, parse_bool, parse_int};

fn read(words: &[&str]) -> Result<FlagValues, SyntaxError> {
    let mut settings = FlagValues::default();
    read_arguments(words.iter().map(OsString::from), &mut settings).map(|_ignored| settings)
}

#[test]
fn flags_take_one_or_two_dashes() {
    for words in [
        &["-etcd-prefix=/a"][..],
        &["--etcd-prefix=/a"],
        &["-etcd-prefix", "/a"],
        &["--etcd-prefix", "/a"],
    ] {
        assert_eq!(read(words).unwrap().etcd_prefix, "/a", "{words:?}");
    }
    assert_eq!(read(&["--etcd-prefix=/a=b"]).unwrap().etcd_prefix, "/a=b");
    assert_eq!(read(&["--etcd-prefix="]).unwrap().etcd_prefix, "");
    assert_eq!(read(&["--etcd-prefix", "--v"]).unwrap().etcd_prefix, "--v");
}

#[test]
fn a_bool_takes_no_following_word() {
    let settings = read(&["--ip-masq", "false", "--v=3"]).unwrap();
    assert!(settings.ip_masq);
    assert_eq!(settings.v, 0, "parsing went on after the word `false`");
    assert!(!read(&["--ip-masq=F"]).unwrap().ip_masq);
}

#[test]
fn parsing_stops_at_word_or_double_dash() {
    for stop in ["word", "--", "-", ""] {
        let settings = read(&["--v=1", stop, "--v=2", "--no-such-flag"]).unwrap();
        assert_eq!(settings.v, 1, "{stop:?}");
    }
}

#[test]
fn ignored_arguments_are_counted_not_shown() {
    let words = ["--etcd-password", "two", "words", "--local-store=/x"].map(OsString::from);
    let ignored = read_arguments(words, &mut FlagValues::default()).unwrap();
    let told = ignored.expect("two arguments are ignored").to_string();
    assert!(told.contains(" 3 ") && told.contains(" 2"), "which, and how many: {told}");
    assert!(!told.contains("words"), "part of a password: {told}");
    let all_read = read_arguments([OsString::from("--v=1")], &mut FlagValues::default());
    assert_eq!(all_read, Ok(None));
}

#[test]
fn the_last_scalar_wins_and_lists_accumulate() {
    let settings =
        read(&["--v=1", "-v", "2", "--iface=a", "--iface", "b", "--iface-regex=x"]).unwrap();
    assert_eq!(settings.v, 2);
    assert_eq!(settings.iface, ["a", "b"]);
    assert_eq!(settings.iface_regex, ["x"]);
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
        (&["--ip-masq=yes"], r#"invalid boolean value "yes" for -ip-masq: parse error"#),
        (&["--ip-masq="], r#"invalid boolean value "" for -ip-masq: parse error"#),
    ] {
        let error = read(words).unwrap_err().to_string();
        assert!(error.contains(complaint), "{words:?}: {error}");
    }
    for word in ["-h", "--h", "-help", "--help", "--help=x"] {
        assert_eq!(read(&[word]).unwrap_err(), SyntaxError::Help);
    }
}

#[test]
fn non_utf8_argument_is_refused_unless_ignored() {
    let raw = || OsString::from_vec(vec![b'-', b'v', b'=', 0xff]);
    let mut settings = FlagValues::default();
    let error = read_arguments([raw()], &mut settings).unwrap_err().to_string();
    assert!(error.contains("-v") && error.contains("UTF-8"), "{error}");
    let ignored = read_arguments([OsString::from("--"), raw()], &mut settings);
    let told = ignored.unwrap().expect("two arguments are ignored");
    assert!(told.contains(" 1 ") && told.contains(" 2"), "which, and how many: {told}");
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
        "", "-", "+", "0x", "0b2", "08", "0o8", "_1", "1_", "1__0", "0x__1", "1.0", "1e3", " 1",
        "1 ", "--1", "+-1", "0x-1", "0b", "½",
    ] {
        assert_eq!(parse_int(text), Err(SYNTAX), "{text:?}");
    }
    assert_eq!(parse_int("9223372036854775808"), Err(RANGE));
    assert_eq!(parse_int("-0x8000000000000001"), Err(RANGE));
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
        &|name| {
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
    assert_eq!(settings.v, 1);
    assert_eq!(settings.iface, ["a"]);
    assert_eq!(settings.iface_regex, ["x,y"], "no comma split");
    assert_eq!(settings.etcd_prefix, "/env");
    assert_eq!(settings.given["etcd-prefix"], "FLANNELD_ETCD_PREFIX");
    assert!(!settings.given.contains_key("healthz-ip"));
    assert_eq!(settings.healthz_port, 0);
    assert_eq!(settings.log_backtrace_at, "a.go:1");
    assert!(!settings.version, "FLANNELD_VERSION has no effect");
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
    assert_eq!(text.matches("(default true)").count(), 4);
    for flag in FLAGS {
        assert!(text.contains(&format!("\n  -{}", flag.name)), "{}", flag.name);
    }
}

proptest! {
    #[test]
    fn any_words_give_settings_or_a_complaint(
        words in proptest::collection::vec("(-{0,3}(v|iface|ip-masq|etcd-prefix|x)?=?.{0,4})", 0..6)
    ) {
        let mut settings = FlagValues::default();
        if let Err(error) = read_arguments(words.iter().map(OsString::from), &mut settings) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn every_integer_reads_back(value: i64) {
        prop_assert_eq!(parse_int(&value.to_string()), Ok(value));
    }
}

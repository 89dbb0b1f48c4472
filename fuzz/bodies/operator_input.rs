//! One input of the `operator_input` target: a command line with its environment, or a packet that
//! claims to be the answer to an echo.
//!
//! The first byte chooses. A command line has a word in each line; words such as `FLANNELD_V=1` are
//! variables. What is logged of it must be one line, whatever the words are.

use std::ffi::{OsStr, OsString};
use std::net::Ipv4Addr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use weft::config::flags::{self, Outcome};
use weft::packet::echo::{self, Answer, Reply, Request};

const TOKEN: u64 = 0x7765_6674;

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    match data {
        [] => {}
        [choice, rest @ ..] if choice % 2 == 0 => command_line(rest),
        [_, rest @ ..] => answer(rest),
    }
}

fn command_line(data: &[u8]) {
    let is_variable = |word: &&[u8]| word.starts_with(b"FLANNELD_") && word.contains(&b'=');
    let all = || data.split(|byte| *byte == b'\n');
    let variables: Vec<_> = all().filter(is_variable).collect();
    let words = all().filter(|word| !is_variable(word));
    let words = words.map(|word| OsStr::from_bytes(word).to_owned());
    let variable = |name: &str| {
        let found = variables.iter().find_map(|word| {
            word.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec)
        });
        found.map(OsString::from_vec)
    };
    let words = std::iter::once(OsString::from("weftd")).chain(words);
    match flags::parse(words, &variable) {
        Outcome::Run(options, warnings) => {
            for line in [options.log_line(), format!("{options:?}")].iter().chain(&warnings) {
                assert!(!line.contains(['\n', '\r', '\x1b']), "not one plain line: {line:?}");
            }
        }
        Outcome::End(text, code) => {
            assert!(code <= 2 && text.ends_with('\n'), "{code}: {text:?}");
            assert!(!text.contains(['\r', '\x1b']), "drives a terminal: {text:?}");
        }
    }
}

fn answer(packet: &[u8]) {
    let reply = Reply::read(packet);
    if let Some(reply) = reply {
        assert!(usize::from(reply.total_bytes) <= packet.len());
        assert!(echo::is_answer_from(reply.source, packet), "two readers differ: {packet:02x?}");
    }
    let expected = reply.filter(|reply| reply.token == TOKEN).map(Answer::Reply);
    let token_of = |_, _, _| TOKEN;
    match Answer::read(packet, &token_of) {
        Some(Answer::Lost { by, .. } | Answer::Refused { by, .. }) => {
            assert!(reply.is_none() && echo::is_answer_from(by, packet), "{packet:02x?}");
        }
        Some(Answer::Asked(by)) => {
            assert!(reply.is_none() && !echo::is_answer_from(by, packet), "{packet:02x?}");
        }
        found => assert_eq!(found, expected),
    }
    echo::is_answer_from(Ipv4Addr::UNSPECIFIED, packet);
    // What we send asks, and is no answer.
    let mut request = packet.to_vec();
    let [source, destination] = [Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST];
    let (ttl, identifier, sequence, token) = (echo::TTL, 7, 1, TOKEN);
    Request { source, destination, ttl, identifier, sequence, token }.write(&mut request);
    let is_request = (echo::ECHO_BYTES_MIN..1 << 16).contains(&request.len());
    let asked = is_request.then_some(Answer::Asked(source));
    assert_eq!(Answer::read(&request, &token_of), asked);
}

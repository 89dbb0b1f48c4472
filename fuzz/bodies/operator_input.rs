//! One input of the `operator_input` target: a command line with its environment, or a packet that
//! claims to be the answer to an echo.
//!
//! The first byte chooses. A command line has a word in each line; words such as `FLANNELD_V=1` are
//! variables. What is logged of it must be one line, whatever the words are.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use weft::config::flags::{self, Outcome};
use weft::packet::echo::{self, Answer, Message, Reply, Request, TokenOf};
use weft::packet::{Family, Header};

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
    let reply = Message::read(packet).and_then(|message| Reply::of(&message));
    // Of IPv6 the other reader knows no extension headers.
    let is_answer_from = |by: IpAddr| match by {
        IpAddr::V4(_) => echo::is_answer_from(by, packet),
        IpAddr::V6(_) => true,
    };
    if let Some(reply) = reply {
        assert!(usize::from(reply.total_bytes) <= packet.len());
        assert!(is_answer_from(reply.source), "two readers differ: {packet:02x?}");
    }
    let expected = reply.filter(|reply| reply.token == TOKEN).map(Answer::Reply);
    let token_of = |_, _, _| TOKEN;
    let read = answer_of(packet, &token_of);
    match read {
        Some(Answer::Lost { by, destination, .. }) => {
            assert!(reply.is_none() && is_answer_from(by), "{packet:02x?}");
            assert_eq!(by.is_ipv4(), destination.is_ipv4(), "of another family: {packet:02x?}");
        }
        Some(Answer::Refused { by, .. }) => {
            assert!(reply.is_none() && is_answer_from(by), "{packet:02x?}");
        }
        Some(Answer::Asked(by)) => {
            let is_asked = by.is_ipv6() || !is_answer_from(by);
            assert!(reply.is_none() && is_asked, "{packet:02x?}");
        }
        found => assert_eq!(found, expected),
    }
    // A socket of IPv6 gives the same without the header, unless extensions follow that.
    if let Ok(header) = Header::<Ipv6Addr>::parse(packet)
        && header.header_bytes == 40
        && header.protocol == 58
    {
        let message = &packet[40..header.total_bytes.into()];
        let message = Message::received(Some(header.source), message);
        assert_eq!(message.and_then(|it| Answer::of(&it, &token_of)), read, "{packet:02x?}");
    }
    echo::is_answer_from(Ipv4Addr::UNSPECIFIED.into(), packet);
    echo::is_answer_from(Ipv6Addr::UNSPECIFIED.into(), packet);
    is_no_answer([Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST], packet);
    is_no_answer([Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED], packet);
}

fn answer_of(packet: &[u8], token_of: TokenOf<'_>) -> Option<Answer> {
    Answer::of(&Message::read(packet)?, token_of)
}

/// What we send asks, and is no answer.
fn is_no_answer<A: Family>([source, destination]: [A; 2], packet: &[u8]) {
    let mut request = packet.to_vec();
    let (ttl, identifier, sequence, token) = (echo::TTL, 7, 1, TOKEN);
    Request { source, destination, ttl, identifier, sequence, token }.write(&mut request);
    let is_request = (Request::<A>::BYTES_MIN..1 << 16).contains(&request.len());
    let asked = is_request.then_some(Answer::Asked(source.into()));
    assert_eq!(answer_of(&request, &|_, _, _| TOKEN), asked);
}

//! Requests, replies and errors of both families.

use super::*;

const V4: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 5, 1, 0), Ipv4Addr::new(10, 5, 2, 0)];
const V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 5, 1, 0, 0, 0, 0, 0), Ipv6Addr::new(0xfd00, 5, 2, 0, 0, 0, 0, 0)];
const TOKEN: u64 = 0x0123_4567_89ab_cdef;

fn request<A: Family>([source, destination]: [A; 2], bytes: usize) -> Vec<u8> {
    let mut packet = vec![0xff; bytes];
    let (identifier, sequence, token) = (0xcdef, 7, TOKEN);
    Request { source, destination, ttl: TTL, identifier, sequence, token }.write(&mut packet);
    packet
}

fn answer_with(packet: &[u8], token_of: TokenOf<'_>) -> Option<Answer> {
    Answer::of(&Message::read(packet)?, token_of)
}

/// With the tokens of one run, in which all echoes of number 7 to the far host have this one.
fn read(packet: &[u8]) -> Option<Answer> {
    let is_far = |to| to == IpAddr::from(V4[1]) || to == IpAddr::from(V6[1]);
    answer_with(packet, &|to, number, _| if is_far(to) && number == 7 { TOKEN } else { 1 })
}

/// With those of another daemon.
fn read_by_another(packet: &[u8]) -> Option<Answer> {
    answer_with(packet, &|_, _, _| TOKEN + 1)
}

fn reply(packet: &[u8]) -> Option<Reply> {
    Reply::of(&Message::read(packet)?)
}

/// From the far host to the near one.
fn back<A: Family>(packet: &mut [u8]) {
    let half = usize::from(A::BITS / 8);
    packet[A::ADDRESSES_AT..][..2 * half].rotate_left(half);
}

/// What a kernel makes of a request (`icmp_echo`, net/ipv4/icmp.c; `icmpv6_echo_reply`,
/// net/ipv6/icmp.c).
fn answer<A: Family>(ends: [A; 2], request: &[u8]) -> Vec<u8> {
    let mut reply = request.to_vec();
    back::<A>(&mut reply);
    reply[A::HEADER_BYTES_MIN] = Kinds::of(ends[1].into()).reply;
    reply
}

/// An error of this type and code about the beginning of a packet.
fn error<A: Family>(ends: [A; 2], kind: u8, code: u8, quoted: &[u8]) -> Vec<u8> {
    let quote_at = A::HEADER_BYTES_MIN + ICMP_HEADER_BYTES;
    let mut packet = request(ends, quote_at + quoted.len().max(8));
    back::<A>(&mut packet);
    packet[A::HEADER_BYTES_MIN..quote_at].copy_from_slice(&[kind, code, 0, 0, 0, 0, 0, 0]);
    packet[quote_at..][..quoted.len()].copy_from_slice(quoted);
    packet
}

fn is_valid_and_its_reply_recognised<A: Family>(ends: [A; 2]) {
    let [near, far] = ends.map(Into::<IpAddr>::into);
    for bytes in [Request::<A>::BYTES_MIN, 548, 1371, 1472, 65_507] {
        let request = request(ends, bytes);
        let header = A::parse(&request).expect("every kernel takes it");
        assert_eq!([header.source, header.destination], ends);
        assert_eq!((header.ttl, header.protocol), (TTL, A::ICMP));
        let icmp = &request[A::HEADER_BYTES_MIN..];
        let pseudo = if A::VERSION == 4 { 0 } else { header.pseudo_header_sum() };
        let sum = checksum::add(pseudo, checksum::sum(icmp));
        assert_eq!(checksum::finish(sum), [0, 0], "{bytes} bytes");
        let reply = answer(ends, &request);
        let total_bytes = bytes as u16;
        let expected = Reply { source: far, total_bytes, token: TOKEN, sequence: 7 };
        assert_eq!(read(&reply), Some(Answer::Reply(expected)));
        assert_eq!(read_by_another(&reply), None, "somebody else's reply");
        assert_eq!(read(&reply[..bytes - 1]), None, "cut off");
        assert_eq!(read(&request), Some(Answer::Asked(near)));
    }
    let short = request(ends, Request::<A>::BYTES_MIN - 1);
    assert!(short.iter().all(|byte| *byte == 0), "no room for a token: {short:?}");
}

#[test]
fn a_request_is_valid_and_its_reply_recognised() {
    is_valid_and_its_reply_recognised(V4);
    is_valid_and_its_reply_recognised(V6);
    let packet = request(V4, 84);
    assert_ne!(packet[4..6], [0, 0], "the kernel would make an identification");
    let reply = answer(V4, &packet);
    assert!(is_answer_from(V4[1].into(), &reply));
    assert!(!is_answer_from(V4[0].into(), &reply) && !is_answer_from(V4[0].into(), &packet));
}

fn errors_are_read<A: Family>(ends: [A; 2], kinds: Kinds, others: [u8; 2]) {
    let [near, far] = ends.map(Into::<IpAddr>::into);
    let (header_bytes, request_bytes) = (A::HEADER_BYTES_MIN, Request::<A>::BYTES_MIN);
    let echo = request(ends, 84);
    for (kind, code) in [(kinds.expired, None), (kinds.unreachable, Some(0))] {
        let expected = Answer::Lost { by: far, destination: far, sequence: 7, code };
        let packet = error(ends, kind, 0, &echo[..64]);
        assert_eq!(read(&packet), Some(expected));
        assert_eq!(read_by_another(&packet), None, "of another daemon");
        assert_eq!(read(&error(ends, kind, 0, &echo[..header_bytes + 8])), None, "no token");
    }
    let mut datagram = echo[..header_bytes + UDP_HEADER_BYTES].to_vec();
    datagram[if A::VERSION == 4 { 9 } else { 6 }] = protocol::UDP;
    datagram[header_bytes..][..4].copy_from_slice(&[0x20, 0x5d, 0x20, 0x5e]);
    let destination = SocketAddr::new(far, 0x205e);
    let refused =
        |echo_to| Some(Answer::Refused { by: far, code: 3, source: near, destination, echo_to });
    let error = |kind, quoted: &[u8]| error(ends, kind, 3, quoted);
    assert_eq!(read(&error(kinds.unreachable, &datagram)), refused(None));
    for before in [0, VXLAN_BYTES] {
        let carried = [&datagram, &vec![8; before], &echo[..request_bytes]].concat();
        let packet = error(kinds.unreachable, &carried);
        assert_eq!(read(&packet), refused(Some(far)), "{before}");
        assert_eq!(read_by_another(&packet), refused(None));
    }
    for kind in others.into_iter().chain([kinds.expired]) {
        assert_eq!(read(&error(kind, &datagram)), None, "type {kind}");
    }
    let whole = error(kinds.unreachable, &datagram);
    for bytes in 0..whole.len() {
        assert_eq!(read(&whole[..bytes]), None, "cut off");
    }
}

#[test]
fn an_error_about_our_echo_or_datagram_is_read() {
    // Types that are errors in the other family.
    errors_are_read(V4, Kinds::V4, [12, 1]);
    errors_are_read(V6, Kinds::V6, [11, 2]);
    let packet = error(V4, Kinds::V4.expired, 0, &request(V4, 84)[..64]);
    assert!(is_answer_from(V4[1].into(), &packet));
    // A router of one family says nothing of the other's packets.
    assert_eq!(read(&error(V6, Kinds::V6.unreachable, 0, &request(V4, 84))), None);
    assert_eq!(read(&error(V4, Kinds::V4.unreachable, 0, &request(V6, 84))), None);
}

/// By hand: the number is 7, the token that of the far host.
#[test]
fn an_answer_counts_with_the_token_of_its_sender_number_and_length_only() {
    let mut reply = [
        0x45, 0, 0, 36, 0, 0, 0, 0, 64, 1, 0x63, 0xd0, 10, 5, 2, 0, 10, 5, 1, 0, //
        0, 0, 0, 0, 0xcd, 0xef, 0, 7, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
    ];
    let token = |to, sequence, bytes| match (to, sequence, bytes) {
        (IpAddr::V4(to), 7, 36) if to == V4[1] => TOKEN,
        _ => !TOKEN,
    };
    let is_read = |packet: &[u8]| answer_with(packet, &token).is_some();
    assert!(is_read(&reply));
    // The source's bytes are in the header's checksum.
    for (at, what) in
        [(&[14, 10][..], "another peer's"), (&[27], "another number's"), (&[35], "made up")]
    {
        at.iter().for_each(|at| reply[*at] ^= 1);
        assert!(self::reply(&reply).is_some() && !is_read(&reply), "{what}");
        at.iter().for_each(|at| reply[*at] ^= 1);
    }
    let mut long = [&reply[..], &[0; 1400]].concat();
    long[2..4].copy_from_slice(&1436_u16.to_be_bytes());
    long[10..12].copy_from_slice(&[0x5e, 0x58]);
    assert!(self::reply(&long).is_some() && !is_read(&long), "that of a shorter one");
    let [one, other] = [Tokens::default(), Tokens::default()];
    let [near, far] = V4.map(IpAddr::from);
    assert_eq!(one.of(far, 7, 84), one.of(far, 7, 84));
    let others = [one.of(near, 7, 84), one.of(far, 8, 84), one.of(far, 7, 85)];
    assert!(!others.contains(&one.of(far, 7, 84)));
    assert_ne!(one.of(far, 7, 84), other.of(far, 7, 84), "another run's");
}

/// As a kernel writes it, and as a raw socket gives it, without the header.
#[test]
fn a_message_of_ipv6_is_the_same_from_a_packet_and_from_a_socket() {
    let head = [
        0x60, 0, 0, 0, 0, 16, 58, 64, //
        0xfd, 0, 0, 5, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, //
        0xfd, 0, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let message = [129, 0, 0, 0, 0xcd, 0xef, 0, 7, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];
    let reply = Reply { source: V6[1].into(), total_bytes: 56, token: TOKEN, sequence: 7 };
    assert_eq!(read(&[&head[..], &message].concat()), Some(Answer::Reply(reply)));
    let received = |bytes| Reply::of(&Message::received(Some(V6[1]), bytes)?);
    assert_eq!(received(&message), Some(reply));
    assert_eq!(received(&message[..15]), None, "cut off");
}

#[test]
fn codes_mean_what_their_family_says() {
    let [v4, v6] = [V4[1].into(), V6[1].into()];
    for (by, code, reason) in [
        (v4, 0, Reason::Other),
        (v4, 1, Reason::NoHost),
        (v4, 3, Reason::NoPort),
        (v4, 13, Reason::Forbidden),
        (v6, 0, Reason::Other),
        (v6, 1, Reason::Forbidden),
        (v6, 3, Reason::NoHost),
        (v6, 4, Reason::NoPort),
        (v6, 13, Reason::Other),
    ] {
        assert_eq!(Reason::of(by, code), reason, "{by}, code {code}");
    }
}

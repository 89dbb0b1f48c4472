//! The four messages of WireGuard as they are on the wire (section 5.4 of its paper), and the two
//! codes at the end of those of a handshake.

use blake2::digest::consts::U16;
use blake2::digest::{Digest, FixedOutput, Mac};
use blake2::{Blake2s256, Blake2sMac};

use super::keys::PublicKey;

/// The first message of a handshake.
pub const INITIATION_BYTES: usize = 148;
/// Its answer.
pub const RESPONSE_BYTES: usize = 92;
/// What a host that is short of time answers instead.
pub const COOKIE_REPLY_BYTES: usize = 64;
/// What stands before a sealed packet: type, index, counter.
pub const DATA_HEADER_BYTES: usize = 16;
/// The longest of those of a handshake.
pub const HANDSHAKE_BYTES_MAX: usize = INITIATION_BYTES;

/// The codes behind the messages of a handshake.
const MACS_BYTES: usize = 32;
const MAC_BYTES: usize = 16;

/// One of those codes.
pub(super) type Code = [u8; MAC_BYTES];

/// A message, by its type and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// Begins a handshake.
    Initiation(&'a [u8; INITIATION_BYTES]),
    /// Answers one.
    Response(&'a [u8; RESPONSE_BYTES]),
    /// Asks for the same again, with a proof of its address.
    CookieReply(&'a [u8; COOKIE_REPLY_BYTES]),
    /// A sealed packet.
    Data(DataHeader),
}

/// What stands before a sealed packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHeader {
    /// The session, by the number that its receiver gave it.
    pub receiver_index: u32,
    /// The number of the packet in it.
    pub counter: u64,
}

impl<'a> Message<'a> {
    /// Reads what a datagram is; `None` if it is nothing of WireGuard's.
    #[inline]
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        let (kind, rest) = datagram.split_first_chunk::<4>()?;
        match u32::from_le_bytes(*kind) {
            4 => {
                let (index, rest) = rest.split_first_chunk::<4>()?;
                let counter = u64::from_le_bytes(*rest.first_chunk()?);
                Some(Self::Data(DataHeader { receiver_index: u32::from_le_bytes(*index), counter }))
            }
            1 => datagram.try_into().ok().map(Self::Initiation),
            2 => datagram.try_into().ok().map(Self::Response),
            3 => datagram.try_into().ok().map(Self::CookieReply),
            _ => None,
        }
    }
}

/// The number at `at`, little-endian.
pub(super) fn index_at(message: &[u8], at: usize) -> u32 {
    message.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |it| u32::from_le_bytes(*it))
}

/// HASH of two parts, which BLAKE2s makes 32 bytes of.
pub(super) fn hash(label: &[u8; 8], key: &PublicKey) -> [u8; 32] {
    Blake2s256::new().chain_update(label).chain_update(key.0).finalize().into()
}

/// MAC: keyed BLAKE2s of 16 bytes.
pub(super) fn mac(key: &[u8], parts: &[&[u8]]) -> Code {
    // A key is 16 or 32 bytes, and up to 32 fit.
    let Ok(mut mac) = Blake2sMac::<U16>::new_from_slice(key) else { return [0; MAC_BYTES] };
    parts.iter().for_each(|part| Mac::update(&mut mac, part));
    mac.finalize_fixed().into()
}

/// Whether two codes are the same, in a time that says nothing of where they differ.
pub(super) fn equal(one: &Code, other: &Code) -> bool {
    let differences = one.iter().zip(other).fold(0, |all, (one, other)| all | (one ^ other));
    std::hint::black_box(differences) == 0
}

/// What a message of a handshake consists of: all before its codes, and the two.
pub(super) fn parts(message: &[u8]) -> Option<(&[u8], &Code, &Code)> {
    let (body, macs) = message.split_last_chunk::<MACS_BYTES>()?;
    let (mac1, mac2) = macs.split_first_chunk::<MAC_BYTES>()?;
    Some((body, mac1, mac2.first_chunk()?))
}

/// Writes the two codes behind a message of a handshake: the first says that its sender knows the
/// `receiver` by its public key, the second that it can receive where it sends from. Returns the
/// first.
pub(super) fn sign(message: &mut [u8], receiver: &PublicKey, cookie: Option<&Code>) -> Code {
    let Some((body, macs)) = message.split_last_chunk_mut::<MACS_BYTES>() else {
        return [0; MAC_BYTES];
    };
    let mac1 = mac(&hash(b"mac1----", receiver), &[body]);
    let mac2 = cookie.map_or([0; MAC_BYTES], |cookie| mac(cookie, &[body, &mac1]));
    macs[..MAC_BYTES].copy_from_slice(&mac1);
    macs[MAC_BYTES..].copy_from_slice(&mac2);
    mac1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_what_its_type_and_its_length_say() {
        let mut initiation = [7; INITIATION_BYTES];
        initiation[..4].copy_from_slice(&[1, 0, 0, 0]);
        assert!(matches!(Message::parse(&initiation), Some(Message::Initiation(_))));
        assert_eq!(Message::parse(&initiation[1..]), None);
        assert_eq!(Message::parse(&initiation[..147]), None, "too short");
        initiation[1] = 1;
        assert_eq!(Message::parse(&initiation), None, "the reserved bytes are zero");

        let data = [4, 0, 0, 0, 1, 2, 3, 4, 9, 0, 0, 0, 0, 0, 0, 1];
        let header = DataHeader { receiver_index: 0x0403_0201, counter: 9 | 1 << 56 };
        assert_eq!(Message::parse(&data), Some(Message::Data(header)));
        assert_eq!(Message::parse(&data[..15]), None);
        assert_eq!(Message::parse(&[]), None);
    }

    /// RFC 7693 has BLAKE2s of "abc"; the keyed one is the reference implementation's (its
    /// `kat` file), cut to 16 bytes by the parameter block, so only its shape is tested here.
    #[test]
    fn codes_depend_on_key_and_all_parts() {
        let base = mac(&[1; 32], &[b"ab", b"c"]);
        assert_eq!(base, mac(&[1; 32], &[b"abc"]));
        assert_ne!(base, mac(&[2; 32], &[b"abc"]));
        assert_ne!(base, mac(&[1; 32], &[b"abd"]));
        assert!(equal(&base, &base) && !equal(&base, &[0; 16]));
    }
}

//! Keys of WireGuard: 32 bytes each, as texts in base64. No text of a secret one is ever shown.

use std::str::FromStr;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// Bytes of each key.
pub const KEY_BYTES: usize = 32;

/// As Go reads it, which does not look at the two bits that the last letter has too many.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// A text is no key. What it is stays unsaid: it may be most of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not the base64 of {KEY_BYTES} bytes (44 characters, as `wg genkey` prints)")]
pub struct KeyError;

/// What a host is known by.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display, derive_more::Debug,
)]
#[display("{}", BASE64.encode(_0))]
#[debug("{self}")]
pub struct PublicKey(pub [u8; KEY_BYTES]);

const fn bytes_of(first: u8, rest: u8, last: u8) -> [u8; KEY_BYTES] {
    let mut bytes = [rest; KEY_BYTES];
    (bytes[0], bytes[KEY_BYTES - 1]) = (first, last);
    bytes
}

/// The points of Curve25519 whose order divides 8: 0, 1, two more, and the first three again, as
/// they are written beyond the prime 2^255 - 19.
const OF_LOW_ORDER: [[u8; KEY_BYTES]; 7] = [
    bytes_of(0, 0, 0),
    bytes_of(1, 0, 0),
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4,
        0x6a, 0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49,
        0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef,
        0x5b, 0x04, 0x44, 0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f,
        0x11, 0x57,
    ],
    bytes_of(0xec, 0xff, 0x7f),
    bytes_of(0xed, 0xff, 0x7f),
    bytes_of(0xee, 0xff, 0x7f),
];

/// What proves a host to be the one of its public key.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop, derive_more::Debug)]
#[debug("***")]
pub struct PrivateKey([u8; KEY_BYTES]);

/// What all hosts of a network share besides, against whoever breaks Curve25519 one day.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop, derive_more::Debug)]
#[debug("***")]
pub struct PresharedKey([u8; KEY_BYTES]);

impl PublicKey {
    /// Whether what is agreed on with it is known to everybody (RFC 7748, section 6.1): no device
    /// does a handshake with such a peer.
    pub fn is_of_low_order(&self) -> bool {
        // The highest bit does not count.
        let mut point = self.0;
        point[KEY_BYTES - 1] &= 0x7f;
        OF_LOW_ORDER.contains(&point)
    }
}

impl PrivateKey {
    /// A key of bytes that nobody can guess.
    pub fn from_random(mut bytes: [u8; KEY_BYTES]) -> Self {
        // RFC 7748, section 5: what everybody does before the bytes are used. `wg genkey` and
        // flannel write them so.
        bytes[0] &= 0b1111_1000;
        bytes[KEY_BYTES - 1] = bytes[KEY_BYTES - 1] & 0b0111_1111 | 0b0100_0000;
        Self(bytes)
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> PublicKey {
        let secret = x25519_dalek::StaticSecret::from(self.0);
        PublicKey(x25519_dalek::PublicKey::from(&secret).to_bytes())
    }

    /// As a key file has it.
    pub fn to_base64(&self) -> Zeroizing<String> {
        Zeroizing::new(BASE64.encode(self.0))
    }
}

macro_rules! secret {
    ($key:ident) => {
        impl $key {
            /// The bytes, for the device.
            pub fn bytes(&self) -> &[u8; KEY_BYTES] {
                &self.0
            }
        }

        impl From<[u8; KEY_BYTES]> for $key {
            fn from(bytes: [u8; KEY_BYTES]) -> Self {
                Self(bytes)
            }
        }

        impl FromStr for $key {
            type Err = KeyError;

            fn from_str(text: &str) -> Result<Self, KeyError> {
                decode(text).map(|bytes| Self(*bytes))
            }
        }
    };
}

secret!(PrivateKey);
secret!(PresharedKey);

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        decode(text).map(|bytes| Self(*bytes))
    }
}

/// Line ends are skipped as Go skips them, wherever they are.
fn decode(text: &str) -> Result<Zeroizing<[u8; KEY_BYTES]>, KeyError> {
    let characters = text.chars().filter(|it| !matches!(it, '\r' | '\n'));
    let text: Zeroizing<String> = Zeroizing::new(characters.collect());
    let bytes = Zeroizing::new(BASE64.decode(text.as_bytes()).map_err(|_text| KeyError)?);
    bytes.as_slice().try_into().map(Zeroizing::new).map_err(|_length| KeyError)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7748, section 6.1: Alice's keys.
    const PRIVATE: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
    const PUBLIC: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";

    #[test]
    fn a_private_key_has_the_public_key_of_the_rfc() {
        let private: PrivateKey = PRIVATE.parse().unwrap();
        let public: PublicKey = PUBLIC.parse().unwrap();
        assert_eq!((private.public(), public.to_string()), (public, PUBLIC.to_owned()));
        assert_eq!(*private.to_base64(), PRIVATE);
    }

    #[test]
    fn keys_that_hide_nothing_are_told() {
        let others = [[9; KEY_BYTES], bytes_of(0xeb, 0xff, 0x7f), bytes_of(2, 0, 0)];
        let high = OF_LOW_ORDER.map(|mut bytes| {
            bytes[KEY_BYTES - 1] |= 0x80;
            bytes
        });
        for bytes in OF_LOW_ORDER.into_iter().chain(high).chain(others) {
            let secret = x25519_dalek::StaticSecret::from([7; KEY_BYTES]);
            let is_secret = secret.diffie_hellman(&bytes.into()).was_contributory();
            assert_eq!(PublicKey(bytes).is_of_low_order(), !is_secret, "{bytes:x?}");
        }
    }

    #[test]
    fn what_go_takes_for_a_key_is_one() {
        for text in [PUBLIC.to_owned(), format!("{PUBLIC}\r\n"), PUBLIC.replace("Tmo", "T\nmp")] {
            assert!(text.parse::<PublicKey>().is_ok(), "{text:?}");
        }
        for text in ["", "AAAA", "hSDw", &PUBLIC[..43], &format!("{PUBLIC}A"), "\0", "é"] {
            assert_eq!(text.parse::<PublicKey>(), Err(KeyError), "{text:?}");
        }
        assert!(format!(" {PUBLIC}").parse::<PublicKey>().is_err());
        assert!(PUBLIC.replace('/', "_").parse::<PublicKey>().is_err(), "another alphabet");
    }

    #[test]
    fn a_made_key_is_clamped_as_everybody_clamps_it() {
        assert_eq!(PrivateKey::from_random([0xff; 32]).bytes()[0], 0xf8);
        assert_eq!(PrivateKey::from_random([0xff; 32]).bytes()[31], 0x7f);
        assert_eq!(PrivateKey::from_random([0; 32]).bytes()[31], 0x40);
        let raw = PrivateKey::from([0xff; 32]);
        assert_eq!(PrivateKey::from_random([0xff; 32]).public(), raw.public());
    }

    #[test]
    fn secrets_are_never_shown() {
        let private: PrivateKey = PRIVATE.parse().unwrap();
        let preshared: PresharedKey = PRIVATE.parse().unwrap();
        assert_eq!(format!("{private:?} {preshared:#?}"), "*** ***");
        let error = "dwdtCnMYpX08FsFyUbJmRd9".parse::<PresharedKey>().unwrap_err().to_string();
        assert!(!error.contains("dwdt"), "{error}");
    }
}

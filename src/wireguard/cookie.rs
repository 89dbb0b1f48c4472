//! What keeps a flood of handshakes from costing more than it should (section 5.3 of WireGuard's
//! paper): while there is no time for all, only those are answered that come from where they say,
//! and of those each address gets a share.

use std::net::{IpAddr, SocketAddr};

use chacha20poly1305::aead::AeadInPlace;
use chacha20poly1305::{Key, KeyInit, Tag, XChaCha20Poly1305, XNonce};

use super::keys::PublicKey;
use super::message::{COOKIE_REPLY_BYTES, Code, equal, hash, index_at, mac, parts};

/// How long a secret holds, and so a cookie.
const SECRET_LIFE_NS: u64 = 120 * 1_000_000_000;

/// Handshakes of one address, while there is no time for all: as the kernel's
/// (drivers/net/wireguard/ratelimiter.c), 20 a second, 5 at once.
const HANDSHAKE_PERIOD_NS: u64 = 1_000_000_000 / 20;
const HANDSHAKES_AT_ONCE: u64 = 5;

/// Addresses that are told apart: those with the same hash share their limit.
const LIMITS: usize = 4096;

/// Random bytes, which nobody else can know.
pub trait Randomness {
    /// Fills `bytes`.
    fn fill(&mut self, bytes: &mut [u8]);
}

/// The receiving side.
pub(super) struct CookieJar {
    own: PublicKey,
    /// By which senders show that they know it: made once, for anybody may have it compared.
    mac1_key: [u8; 32],
    /// Of which a cookie is made, and since when.
    secret: Option<([u8; 32], u64)>,
    /// When each address may have its next one, at the latest.
    next_ns: Box<[u64]>,
    limit_key: [u8; 32],
}

impl CookieJar {
    pub(super) fn new(own: PublicKey, random: &mut impl Randomness) -> Self {
        let mut limit_key = [0; 32];
        random.fill(&mut limit_key);
        let mac1_key = hash(b"mac1----", &own);
        Self { own, mac1_key, secret: None, next_ns: vec![0; LIMITS].into_boxed_slice(), limit_key }
    }

    /// Whether the sender of a message of a handshake knows who we are.
    pub(super) fn has_mac1(&self, message: &[u8]) -> bool {
        parts(message).is_some_and(|(body, mac1, _)| equal(mac1, &mac(&self.mac1_key, &[body])))
    }

    /// Whether it can receive at `source`, for which it has shown a cookie.
    pub(super) fn has_mac2(&self, message: &[u8], source: SocketAddr, now_ns: u64) -> bool {
        let Some((secret, since_ns)) = &self.secret else { return false };
        let is_fresh = now_ns.saturating_sub(*since_ns) < SECRET_LIFE_NS;
        is_fresh
            && parts(message).is_some_and(|(body, mac1, mac2)| {
                equal(mac2, &mac(&cookie(secret, source), &[body, mac1]))
            })
    }

    /// Whether `source` has some of its share left, and takes it.
    pub(super) fn has_share(&mut self, source: SocketAddr, now_ns: u64) -> bool {
        let [low, high, ..] = mac(&self.limit_key, &[&network_of(source.ip())]);
        let Some(next_ns) =
            self.next_ns.get_mut(usize::from(u16::from_le_bytes([low, high])) % LIMITS)
        else {
            return false;
        };
        if *next_ns > now_ns + (HANDSHAKES_AT_ONCE - 1) * HANDSHAKE_PERIOD_NS {
            return false;
        }
        *next_ns = now_ns.max(*next_ns) + HANDSHAKE_PERIOD_NS;
        true
    }

    /// The answer that gives the sender of `message` its cookie.
    pub(super) fn reply(
        &mut self,
        message: &[u8],
        source: SocketAddr,
        now_ns: u64,
        random: &mut impl Randomness,
    ) -> Option<[u8; COOKIE_REPLY_BYTES]> {
        let (_, mac1, _) = parts(message)?;
        let secret = match self.secret {
            Some((secret, since_ns)) if now_ns.saturating_sub(since_ns) < SECRET_LIFE_NS => secret,
            Some(_) | None => {
                let mut secret = [0; 32];
                random.fill(&mut secret);
                self.secret = Some((secret, now_ns));
                secret
            }
        };
        let mut reply = [0; COOKIE_REPLY_BYTES];
        reply[0] = 3;
        reply[4..8].copy_from_slice(&index_at(message, 4).to_le_bytes());
        random.fill(&mut reply[8..32]);
        let (head, sealed) = reply.split_at_mut(32);
        let (place, tag_place) = sealed.split_at_mut(16);
        place.copy_from_slice(&cookie(&secret, source));
        let nonce = XNonce::from_slice(&head[8..32]);
        let tag = cipher(&self.own).encrypt_in_place_detached(nonce, mac1, place).ok()?;
        tag_place.copy_from_slice(&tag);
        Some(reply)
    }
}

/// The cookie in an answer of `peer`'s to our message with this first code.
pub(super) fn read_reply(
    reply: &[u8; COOKIE_REPLY_BYTES],
    peer: &PublicKey,
    mac1: &Code,
) -> Option<Code> {
    let (head, sealed) = reply.split_at(32);
    let (cookie, tag) = sealed.split_at(16);
    let mut cookie: Code = cookie.try_into().ok()?;
    let nonce = XNonce::from_slice(&head[8..32]);
    let tag = Tag::from_slice(tag);
    cipher(peer).decrypt_in_place_detached(nonce, mac1, &mut cookie, tag).ok()?;
    Some(cookie)
}

fn cipher(receiver: &PublicKey) -> XChaCha20Poly1305 {
    XChaCha20Poly1305::new(Key::from_slice(&hash(b"cookie--", receiver)))
}

fn cookie(secret: &[u8; 32], source: SocketAddr) -> Code {
    let port = source.port().to_be_bytes();
    match source.ip() {
        IpAddr::V4(address) => mac(secret, &[&address.octets(), &port]),
        IpAddr::V6(address) => mac(secret, &[&address.octets(), &port]),
    }
}

/// What one owner may have: an address of IPv4, 2^64 of IPv6.
fn network_of(address: IpAddr) -> [u8; 8] {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [4, 0, 0, 0, a, b, c, d]
        }
        IpAddr::V6(address) => ((address.to_bits() >> 64) as u64).to_be_bytes(),
    }
}

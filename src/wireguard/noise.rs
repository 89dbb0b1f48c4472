//! The handshake, Noise_IKpsk2 by the crate snow: two messages, and both have the same keys.

use snow::params::NoiseParams;
use snow::{Builder, HandshakeState};

use super::keys::{PresharedKey, PrivateKey, PublicKey};

/// The protocol's name, of which snow makes the same first hash as WireGuard's paper.
const PROTOCOL: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";

/// What both mix in first.
const PROLOGUE: &[u8] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";

/// Where the preshared key is mixed in: after the second message's keys.
const PSK_PLACE: u8 = 2;

/// An ephemeral key (32), the sealed static key (48), the sealed time (28).
pub(super) const INITIATION_NOISE_BYTES: usize = 108;
/// An ephemeral key (32), nothing, sealed (16).
pub(super) const RESPONSE_NOISE_BYTES: usize = 48;

/// TAI64N: seconds and nanoseconds, big-endian.
pub(super) type Timestamp = [u8; 12];

/// The message is no part of a handshake between these two, or was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not part of a handshake between these two")]
pub(super) struct NoHandshake;

impl From<snow::Error> for NoHandshake {
    fn from(_which: snow::Error) -> Self {
        Self
    }
}

/// The keys of a session, of which each direction has one.
pub(super) struct SessionKeys {
    pub(super) sends: [u8; 32],
    pub(super) receives: [u8; 32],
}

/// A handshake that this host has begun.
pub(super) struct Initiator(Box<HandshakeState>);

/// One that a peer has begun: what it says.
pub(super) struct Responder {
    state: Box<HandshakeState>,
    /// Who it is.
    pub(super) peer: PublicKey,
    /// When it says that it began: later ones have later times.
    pub(super) timestamp: Timestamp,
}

fn builder<'a>(own: &'a PrivateKey) -> Result<Builder<'a>, NoHandshake> {
    let protocol: NoiseParams = PROTOCOL.parse().map_err(|_unknown| NoHandshake)?;
    Ok(Builder::new(protocol).prologue(PROLOGUE)?.local_private_key(own.bytes())?)
}

/// Without a preshared key there is one of zeros.
fn psk_bytes(psk: Option<&PresharedKey>) -> [u8; 32] {
    psk.map_or([0; 32], |psk| *psk.bytes())
}

impl Initiator {
    /// Begins a handshake with `peer`.
    pub(super) fn begin(
        own: &PrivateKey,
        peer: &PublicKey,
        psk: Option<&PresharedKey>,
        timestamp: &Timestamp,
    ) -> Result<(Self, [u8; INITIATION_NOISE_BYTES]), NoHandshake> {
        let psk = psk_bytes(psk);
        let builder = builder(own)?.remote_public_key(&peer.0)?.psk(PSK_PLACE, &psk)?;
        let (mut state, mut message) = (builder.build_initiator()?, [0; INITIATION_NOISE_BYTES]);
        state.write_message(timestamp, &mut message)?;
        Ok((Self(Box::new(state)), message))
    }

    /// Reads the answer. One that is none leaves the handshake as it was.
    pub(super) fn finish(
        &mut self,
        response: &[u8; RESPONSE_NOISE_BYTES],
    ) -> Result<SessionKeys, NoHandshake> {
        let Self(state) = self;
        state.read_message(response, &mut [])?;
        let (sends, receives) = state.dangerously_get_raw_split();
        Ok(SessionKeys { sends, receives })
    }
}

impl Responder {
    /// Reads the first message of a handshake, whoever it is from.
    pub(super) fn read(
        own: &PrivateKey,
        initiation: &[u8; INITIATION_NOISE_BYTES],
    ) -> Result<Self, NoHandshake> {
        let mut state = Box::new(builder(own)?.build_responder()?);
        let mut timestamp = Timestamp::default();
        state.read_message(initiation, &mut timestamp)?;
        let peer = state.get_remote_static().and_then(|key| key.try_into().ok());
        Ok(Self { state, peer: PublicKey(peer.ok_or(NoHandshake)?), timestamp })
    }

    /// Answers it.
    pub(super) fn respond(
        mut self,
        psk: Option<&PresharedKey>,
    ) -> Result<([u8; RESPONSE_NOISE_BYTES], SessionKeys), NoHandshake> {
        let mut message = [0; RESPONSE_NOISE_BYTES];
        self.state.set_psk(PSK_PLACE.into(), &psk_bytes(psk))?;
        self.state.write_message(&[], &mut message)?;
        let (receives, sends) = self.state.dangerously_get_raw_split();
        Ok((message, SessionKeys { sends, receives }))
    }
}

//! A session: the keys that a handshake has agreed on, and what was sent and received by them.
//! Sealing and opening need no lock: workers take counters from one number, and what has come is
//! in a window of atomics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use derive_more::Debug;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use super::message::DATA_HEADER_BYTES;
use super::noise::SessionKeys;
use super::window::{COUNTERS_MAX, ReplayWindow};

/// The authentication tag behind each packet.
pub const TAG_BYTES: usize = 16;

/// Packets are padded to a multiple of this, so that their exact length does not show.
pub const PADDED_TO_BYTES: usize = 16;

/// What a packet becomes longer by, its padding aside.
pub const OVERHEAD_BYTES: usize = DATA_HEADER_BYTES + TAG_BYTES;

/// A session with a peer.
#[derive(Debug)]
pub struct Session {
    /// The number of the peer.
    pub peer: u32,
    /// The number by which the peer names this session to us.
    pub local_index: u32,
    /// The number by which it knows it.
    pub remote_index: u32,
    /// When it was made, on the clock of the workers.
    pub born_ns: u64,
    /// Whether this host began the handshake: it sees to the next one.
    pub is_initiator: bool,
    #[debug(skip)]
    seals: LessSafeKey,
    #[debug(skip)]
    opens: LessSafeKey,
    next_counter: AtomicU64,
    #[debug(skip)]
    window: ReplayWindow,
    /// Whether the peer has it too: whoever answered a handshake knows that by the first packet
    /// only.
    is_confirmed: AtomicBool,
}

/// Why a datagram of a session was not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unopened {
    /// Too short to have a tag.
    Short,
    /// Its counter came before, or is too old to know.
    Replayed,
    /// The tag doesn't fit: it was changed on the way, or is forged.
    NotAuthentic,
}

impl Session {
    /// A new one between `local_index` here and `remote_index` at the peer of this number.
    pub(super) fn new(
        (peer, local_index, remote_index): (u32, u32, u32),
        keys: &SessionKeys,
        born_ns: u64,
        is_initiator: bool,
    ) -> Option<Self> {
        let key = |bytes: &[u8; 32]| {
            Some(LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, bytes).ok()?))
        };
        Some(Self {
            peer,
            local_index,
            remote_index,
            born_ns,
            is_initiator,
            seals: key(&keys.sends)?,
            opens: key(&keys.receives)?,
            next_counter: AtomicU64::new(0),
            window: ReplayWindow::new(),
            is_confirmed: AtomicBool::new(is_initiator),
        })
    }

    /// Whether packets may be sent by it.
    #[inline]
    pub fn is_confirmed(&self) -> bool {
        self.is_confirmed.load(Ordering::Relaxed)
    }

    /// A datagram of its own with this packet in it, which has its padding.
    pub(super) fn datagram(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = vec![0; OVERHEAD_BYTES + packet.len()];
        bytes.get_mut(DATA_HEADER_BYTES..)?.get_mut(..packet.len())?.copy_from_slice(packet);
        self.seal(&mut bytes)?;
        Some(bytes)
    }

    /// Seals the packet that lies in `datagram` with its padding, with room for the header before
    /// and the tag behind it. `None` if the session has sent all that it may, or the room lacks.
    #[inline]
    pub fn seal(&self, datagram: &mut [u8]) -> Option<()> {
        let (header, rest) = datagram.split_first_chunk_mut::<DATA_HEADER_BYTES>()?;
        let (packet, tag_place) = rest.split_last_chunk_mut::<TAG_BYTES>()?;
        let counter = self.next_counter.fetch_add(1, Ordering::Relaxed);
        if counter >= COUNTERS_MAX {
            // Never seen, and never to begin anew.
            self.next_counter.store(COUNTERS_MAX, Ordering::Relaxed);
            return None;
        }
        header[..4].copy_from_slice(&[4, 0, 0, 0]);
        header[4..8].copy_from_slice(&self.remote_index.to_le_bytes());
        header[8..].copy_from_slice(&counter.to_le_bytes());
        let tag = self.seals.seal_in_place_separate_tag(nonce(counter), Aad::empty(), packet);
        tag_place.copy_from_slice(tag.ok()?.as_ref());
        Some(())
    }

    /// Opens a datagram in place: its packet with the padding, which begins behind the header.
    #[inline]
    pub fn open<'a>(&self, counter: u64, datagram: &'a mut [u8]) -> Result<&'a [u8], Unopened> {
        if !self.window.may_admit(counter) {
            return Err(Unopened::Replayed);
        }
        let sealed = datagram.get_mut(DATA_HEADER_BYTES..).ok_or(Unopened::Short)?;
        let opened = self.opens.open_in_place(nonce(counter), Aad::empty(), sealed);
        let packet = opened.map_err(|_unspecified| Unopened::NotAuthentic)?;
        if !self.window.admit(counter) {
            return Err(Unopened::Replayed);
        }
        if !self.is_confirmed() {
            self.is_confirmed.store(true, Ordering::Relaxed);
        }
        Ok(packet)
    }
}

/// 32 zero bits and the counter, little-endian.
fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}
